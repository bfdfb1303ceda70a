"""A rank that fails or dies while it attaches ends that on all, with one line; what attaching made is given back by
``close``, though a part of it fails, and for a model that was let go of by the next attach."""

import gc
import inspect
import os
import signal
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import heard, said_by

import eplb_runtime as eplb
from eplb_runtime.distributed import process_groups
from eplb_runtime.distributed.process_groups import ProcessGroups
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.hosts import AttachError
from eplb_runtime.hosts.attaching import attach as attaching

RANKS = 3
LAST = RANKS - 1
AT_ONCE = 0.001
"""Seconds of a timeout that each step of setting up takes longer than."""


def attach(rank: int, timeout_seconds: float = 30.0, **options: Any) -> eplb.Balancer:
    model = make_model("olmoe", experts=6, layers=1)
    optimizer = torch.optim.AdamW(model.parameters())
    return training.attach(model, optimizer, timeout_seconds=timeout_seconds, transport="torch", **options)


def fail(*_: object, **__: object) -> None:
    raise MemoryError("made to fail")


PLACES: dict[str, tuple[Any, str]] = {
    "describing": (eplb.hosts, "_describe"),
    "the backend": (process_groups, "backend_for"),
    "the first group": (process_groups, "gather_job"),
    "the carrier": (TRANSPORTS["torch"], "__init__"),
    "checks": (attaching, "check"),
    "cutting": (attaching, "shard"),
    "installing": (attaching, "install"),
    "recording": (attaching, "_record"),
}
"""Where a rank fails: from the start of attach to its end, between collectives."""


def fails_somewhere(rank: int) -> dict[str, str]:
    """What each rank says as the last one fails in each place in turn. Then all attach, and setting up takes longer
    than what ranks wait for each other from then on."""
    said, odd = {}, rank == LAST
    for place, (owner, name) in PLACES.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises((AttachError, MemoryError)) as refused:
            if odd:
                patch.setattr(owner, name, fail)
            attach(rank)
        said[place] = str(refused.value)
    with pytest.raises((AttachError, TypeError)) as refused:
        eplb.attach(None if odd else make_model("olmoe", experts=6))  # type: ignore[arg-type]
    said["no model"] = str(refused.value)
    said["no rank of its job"] = said_by(lambda: attach(rank, ranks=Ranks(job=(0, 1)) if odd else Ranks()))
    with pytest.MonkeyPatch.context() as patch:
        if odd:
            patch.setattr(attaching, "cut_rows", fail)
        said["shard_experts"] = said_by(lambda: eplb.shard_experts(make_model("olmoe", experts=6)))
    attach(rank, AT_ONCE).close()
    return said


def test_a_rank_that_fails_at_attach_ends_it_on_all_with_its_own_line() -> None:
    for rank, said in enumerate(run_ranks(RANKS, fails_somewhere)):
        assert "not iterable" in said.pop("no model")
        assert f"rank {LAST} is not among the ranks of the job" in said.pop("no rank of its job")
        assert said.keys() == {*PLACES, "shard_experts"}
        for place, line in said.items():  # others say the same of one that they have waited for in vain, in other words
            assert "made to fail" in line and "\n" not in line, (place, line)
            assert rank == LAST or f"rank {LAST}" in line, (place, line)


DIES = {"between groups": (process_groups, "host_timeout"), "checks": PLACES["checks"]}


def dies(rank: int, place: str) -> str:
    if rank == LAST:
        setattr(*DIES[place], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    process_groups.SETUP_SECONDS, process_groups.ACCOUNT_SECONDS = 8.0, 8.0
    with pytest.raises(AttachError) as refused:
        attach(rank, 8.0)
    return str(refused.value)


@pytest.mark.long
@pytest.mark.parametrize("place", DIES)
def test_a_rank_that_dies_at_attach_is_named_within_the_deadline(place: str) -> None:
    """Others wait for it in the store, to connect, or in a collective."""
    for said in run_ranks(RANKS, dies, place, expect_exit=(LAST,))[:LAST]:
        assert f"{LAST} was lost at attach: it has died, or does not answer" in said


# -- given back --------------------------------------------------------------------------------------------------------


def trained(rank: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    model = make_model("olmoe", experts=4, layers=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    balancer = training.attach(model, optimizer, timeout_seconds=30, interval=2, listen=0)
    training.step(model, optimizer, batch_of(rank, 0))
    return model, optimizer, balancer


def groups_of_balancing() -> list[str]:
    """Those that there are for rebalancing alone."""
    named = [group.group_desc for group in dist.distributed_c10d._world.pg_map]
    return [name for name in named if name.endswith(("control", "migration", "background"))]


def let_go_of(rank: int) -> list[str]:
    """Of four models, each other one after a close. What is said, and lines for what is held."""
    ended, release = list[str](), ProcessGroups.release

    def noted(groups: ProcessGroups, *of: Any) -> None:
        ended.append(inspect.stack()[1].function)
        release(groups, *of)

    ProcessGroups.release = noted  # type: ignore[method-assign]
    with heard() as said:
        for number in range(4):
            model, optimizer, balancer = trained(rank)
            if number % 2:
                balancer.close()
            reference = weakref.ref(model)
            del model, optimizer, balancer
            ended.clear()
            gc.collect()
            assert reference() is None
            assert not ended, "the collector runs on any thread and in the middle of anything: no group ends there"
            attach(rank).close()  # to end what was let go of, and itself
            assert not groups_of_balancing()
    return said


@pytest.mark.long
def test_a_model_that_is_let_go_of_is_gone_and_what_it_held_ends_at_the_next_attach() -> None:
    for said in run_ranks(2, let_go_of):
        assert len([line for line in said if "without balancer.close()" in line]) == 2


def closed_with_failures(rank: int) -> None:
    """A listener fails as it is closed, and after it the transport."""
    closed, transport = list[str](), TRANSPORTS["torch"]
    close = transport.close
    transport.close = lambda self: (close(self), closed.append("the transport"), fail())  # type: ignore[attr-defined]
    model, optimizer, balancer = trained(rank)
    balancer.close_with(fail)
    balancer.close_with(lambda: closed.append("the next listener"))
    with heard() as said, pytest.raises(MemoryError):
        balancer.close()
    assert any("an event listener failed as it was closed" in line for line in said)
    assert sorted(closed) == ["the next listener", "the transport"] and not groups_of_balancing()
    training.step(model, optimizer, batch_of(rank, 0))


@pytest.mark.long
def test_what_fails_while_it_is_closed_leaves_nothing_else_open() -> None:
    run_ranks(2, closed_with_failures)


def fails_late(rank: int) -> int:
    """Descriptors that the second attach leaves which fails when all is installed, while its model is there."""
    attaching._record, model, held = fail, make_model("olmoe", experts=4, layers=1), []
    for _ in range(2):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with pytest.raises((AttachError, MemoryError)):
            training.attach(model, optimizer, timeout_seconds=30.0, transport="torch")
        gc.collect()
        held.append(len(os.listdir("/proc/self/fd")))
    return held[1] - held[0]


def test_an_attach_that_fails_late_leaves_no_connections_as_long_as_its_model_is_there() -> None:
    assert max(run_ranks(2, fails_late)) < 5
