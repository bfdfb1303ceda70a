"""Carry tokens to the slots that were picked for them and bring the results back in logical top-k order."""

from .choosing import Choice, choose_together, maker, notes

__all__ = ["Choice", "choose_together", "maker", "notes"]
