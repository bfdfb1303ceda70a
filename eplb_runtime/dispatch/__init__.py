"""Carry tokens to the slots that were picked for them and bring the results back in logical top-k order."""

from .choosing import SUMS_BY_RANK, Choice, choose_together, maker

__all__ = ["SUMS_BY_RANK", "Choice", "choose_together", "maker"]
