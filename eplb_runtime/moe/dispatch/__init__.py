"""Carry tokens to the slots that were picked for them and bring the results back in logical top-k order."""

from .choosing import OVER_TORCH, DispatchChoice, choose_together, make_dispatcher, notes

__all__ = ["OVER_TORCH", "DispatchChoice", "choose_together", "make_dispatcher", "notes"]
