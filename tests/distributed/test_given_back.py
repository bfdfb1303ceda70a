"""Threads, file descriptors and transports: what attaching makes is given back by ``close``, and by an attach that
fails, without waiting for Python's garbage collector."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.config import MigrationConfig
from eplb_runtime.distributed.process_groups import ProcessGroups
from eplb_runtime.hosts.attaching import attach as attaching

KEPT = 5 * 3, 5 * 5 + 1
"""Threads and descriptors of the gloo groups that a closed model of two ranks still has, at most: counts and places in
front of its tokens, the tokens, copies, norms. Each has three threads; it listens, has a loop, and one peer. They met
by one connection to the store."""


def held() -> tuple[int, int]:
    """Threads and file descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def more(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return now[0] - before[0], now[1] - before[1]


def more_at_rest(before: tuple[int, int]) -> tuple[int, int]:
    """`more` now; the system may take a moment to end a thread that was joined."""
    until = time.monotonic() + 5.0
    while (now := more(held(), before))[0] > KEPT[0] and time.monotonic() < until:
        time.sleep(0.01)
    return now


def no_more(rounds: list[tuple[int, int]]) -> bool:
    """Whether the last ones hold no more than the first. A thread that ends just then may be counted in one of them."""
    half = len(rounds) // 2
    return all(
        min(late) <= min(early)
        for early, late in zip(zip(*rounds[:half], strict=True), zip(*rounds[half:], strict=True), strict=True)
    )


def attach(transport: str = "torch") -> tuple[torch.nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("olmoe", experts=4, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    migration = MigrationConfig(transport=transport)
    return model, optimizer, training.attach(model, optimizer, timeout_seconds=30, migration=migration, interval=2)


def train(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    training.step(model, optimizer, batch_of(rank, 0))


class Transports:
    """Those that attaching has made, and which of them were closed."""

    def __init__(self, fail: bool) -> None:
        self.open: list[Any] = []
        self._make, self._fail = attaching.new_transport, fail

    def __call__(self, *args: Any) -> Any:
        transport = self._make(*args)
        self.open.append(transport)
        close = transport.close

        def closing() -> None:
            close()
            self.open[:] = [other for other in self.open if other is not transport]
            if self._fail:
                raise MemoryError("made to fail")

        transport.close = closing
        return transport


class Lines(logging.Handler):
    """Warnings, as they are said."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def dropped_rounds(rank: int) -> dict[str, Any]:
    """Each trains and lets go of its model, every other one after a close. Which are gone, where groups were ended,
    what is said, and what is held."""
    lines, ended, gone, after = Lines(), list[str](), list[bool](), list[tuple[int, int]]()
    logging.getLogger("eplb_runtime").addHandler(lines)
    give_back = ProcessGroups.give_back

    def noted(groups: ProcessGroups, *of: Any) -> None:
        ended.append(inspect.stack()[1].function)
        give_back(groups, *of)

    ProcessGroups.give_back = noted  # type: ignore[method-assign]
    for number in range(6):
        model, optimizer, balancer = attach()
        train(rank, model, optimizer)
        if number % 2:
            balancer.close()
        reference = weakref.ref(model)
        del model, optimizer, balancer
        ended.clear()
        gc.collect()
        gone.append(reference() is None and not ended)
        attach()[2].close()  # to end what was let go of, and itself
        after.append(held())
    return {"gone": gone, "said": lines.said, "after": after}


def test_a_model_that_is_let_go_of_is_gone_and_what_it_held_ends_at_the_next_attach() -> None:
    """The collector runs on any thread and in the middle of anything: no group ends there."""
    for result in run_ranks(2, dropped_rounds):
        assert result["gone"] == [True] * 6
        assert no_more(result["after"][2:]), result["after"]
        assert len([line for line in result["said"] if "without balancer.close()" in line]) == 3


def failing(name: str) -> Callable[..., None]:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("made to fail")

    return fails


def closed_with_failures(rank: int) -> dict[str, Any]:
    """A listener fails as it is closed, and after it the transport. What one close gives back, and what it says."""
    gc.collect()
    gc.disable()
    lines = Lines()
    logging.getLogger("eplb_runtime").addHandler(lines)
    first = attach()  # makes what lives as long as the process
    train(rank, *first[:2])
    first[2].close()
    attaching.new_transport = Transports(True)
    before = held()
    model, optimizer, balancer = attach()
    train(rank, model, optimizer)
    ended: list[str] = []
    balancer.close_with(failing("a listener"))
    balancer.close_with(lambda: ended.append("the next listener"))
    with pytest.raises(MemoryError):
        balancer.close()
    gc.collect()  # a transport of this test refers to itself
    given_back = more_at_rest(before)
    train(rank, model, optimizer)
    return {"one": given_back, "ended": ended, "said": lines.said}


def test_what_fails_while_it_is_closed_leaves_nothing_else_open() -> None:
    for result in run_ranks(2, closed_with_failures):
        threads, descriptors = result["one"]
        assert threads <= KEPT[0] and descriptors <= KEPT[1], result["one"]
        assert result["ended"] == ["the next listener"]
        assert [line for line in result["said"] if "an event listener failed as it was closed" in line]
