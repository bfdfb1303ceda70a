"""Copies of experts are found wherever a loop of the user's may keep them."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.moe.experts.outside import Outside

MODEL = nn.Linear(8, 8)  # around the experts; what it holds says nothing
EXPERTS = nn.Parameter(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)))


class Keeper:
    def __init__(self, **kept: Any) -> None:
        self.__dict__.update(kept)


class Slotted:
    __slots__ = ("kept",)

    def __init__(self, kept: Any) -> None:
        self.kept = kept


KEPT: dict[str, Callable[[Any], Any]] = {
    "by itself": lambda copy: copy,
    "a list": lambda copy: [copy],
    "a tuple": lambda copy: (copy,),
    "a dict": lambda copy: {"down": copy},
    "a list of dicts": lambda copy: [{"down": copy}],
    "an attribute": lambda copy: Keeper(kept=copy),
    "an attribute's dict": lambda copy: Keeper(kept={"down": copy}),
    "a slot": lambda copy: Slotted(copy),
}


def copy_of_numpy() -> np.ndarray:
    return EXPERTS.detach().numpy().copy()


def copy_of_torch() -> Tensor:
    return EXPERTS.detach().clone()


@pytest.fixture(params=[False, True], ids=["read", "followed"])
def outside(request: pytest.FixtureRequest) -> Iterator[Outside]:
    """With what is new followed, it has looked once, before there were copies."""
    found = Outside({"down": EXPERTS}, [MODEL], lambda: [EXPERTS], follows=request.param)
    assert found.found() == ""
    yield found
    found.close()


@pytest.mark.parametrize(("copy", "where"), [*((copy_of_numpy, where) for where in KEPT), (copy_of_torch, "by itself")])
def test_a_copy_is_found_and_its_holder_named(outside: Outside, copy: Callable[[], Any], where: str) -> None:
    kept = KEPT[where](copy())
    gc.collect()  # from now on the collector knows no dict and no tuple that holds arrays alone
    said = outside.found(copies_only=True)
    assert "large as experts, one of shape [2, 64, 64] as down" in said
    assert said.startswith("kept in test_a_copy_is_found_and_its_holder_named() holds 1 ")
    assert kept is not None


def test_control_experts_themselves_and_what_is_gone_are_not(outside: Outside) -> None:
    kept = [EXPERTS, EXPERTS.detach(), EXPERTS.detach().numpy(), torch.randn(64, 64)]
    KEPT["a list of dicts"](copy_of_numpy())
    assert outside.found(copies_only=True) == ""
    assert kept


def test_a_loop_keeps_what_it_has_from_locals(outside: Outside) -> None:
    """Python 3.11 and 3.12 give a running function's dict of variables to whoever asks, always the same one."""
    steps = 3
    here = locals()
    assert outside.found(copies_only=True) == ""
    assert here["steps"] == steps and here["outside"] is outside


def test_what_a_loop_deletes_is_not_kept_alive_by_a_look(outside: Outside) -> None:
    """The dict that is made for a look lives as long as the function runs."""
    passing = Keeper()
    alive = weakref.ref(passing)
    assert outside.found(copies_only=True) == ""
    del passing
    assert alive() is None


def test_what_is_followed_reads_no_heap_while_nothing_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap of a job has hundreds of thousands of objects, and homes may move in many steps in a row."""
    outside, reads = Outside({"down": EXPERTS}, [MODEL], lambda: [EXPERTS], follows=True), []
    all_objects = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda *young: (reads.append(young), all_objects(*young))[1])
    assert outside.found() == "" and () in reads
    reads.clear()
    passing = [torch.randn(8, 8), copy_of_numpy()[:1], {"of another size": np.zeros(7)}]
    gc.collect()
    assert outside.found(copies_only=True) == "" and reads and () not in reads
    passing.append(copy_of_torch())
    assert outside.found(copies_only=True) and () in reads
    outside.close()


def test_what_gc_freeze_hides_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    outside = Outside({"down": EXPERTS}, [MODEL], lambda: [EXPERTS])
    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        assert outside.found() == "" and not caplog.messages
        kept = [copy_of_torch()]
        gc.freeze()
        try:
            assert outside.found() == "" == outside.found()  # not found: so it is said
        finally:
            gc.unfreeze()
    assert len(caplog.messages) == 1 and "gc.freeze() hides" in caplog.messages[0]
    assert outside.found() and kept
