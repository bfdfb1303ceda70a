"""What the other tests' ranks are forked from, and that ranks which hang do not keep what others saw."""

from __future__ import annotations

import sys
import threading

import pytest
import ranks
from ranks import PRELOAD, run_ranks


def missing(rank: int) -> list[str]:
    return [name for name in PRELOAD if name not in sys.modules]


def test_ranks_are_forked_from_a_process_that_has_loaded_everything() -> None:
    """What it does not find it passes over in silence, and every test takes seconds longer."""
    assert run_ranks(1, missing) == [[]]


def fail_or_wait_for_ever(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError("the reason")
    threading.Event().wait()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_not_waited_for_by_the_others_without_end(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "FINISH_AFTER_FAILURE_SECONDS", 0.5)
    with pytest.raises(AssertionError, match="the reason") as error:
        run_ranks(2, fail_or_wait_for_ever, failing)
    assert f"rank {1 - failing}:\ndid not finish" in str(error.value)
