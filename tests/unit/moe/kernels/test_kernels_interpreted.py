"""Kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable


def test_kernels_give_what_their_references_give(interpreted: Callable[..., None]) -> None:
    interpreted("interpreted.py", "interpreted_moves.py")
