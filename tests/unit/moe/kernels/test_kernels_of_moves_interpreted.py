"""Kernels that move rows in Triton's interpreter: a file of its own, so that two workers share the work."""

from __future__ import annotations

from collections.abc import Callable


def test_kernels_give_what_their_references_give(interpreted: Callable[[str], None]) -> None:
    interpreted("interpreted_moves.py")
