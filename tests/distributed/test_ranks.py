"""What the other tests' ranks are forked from."""

from __future__ import annotations

import sys

from ranks import PRELOAD, run_ranks


def missing(rank: int) -> list[str]:
    return [name for name in PRELOAD if name not in sys.modules]


def test_ranks_are_forked_from_a_process_that_has_loaded_everything() -> None:
    """What it does not find it passes over in silence, and every test takes seconds longer."""
    assert run_ranks(1, missing) == [[]]
