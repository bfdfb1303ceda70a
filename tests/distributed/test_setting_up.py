"""Setting up takes as long as it must; a rank that fails or dies ends it on all, soon and with one line."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe_models import make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.distributed import process_groups
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.hosts import AttachError
from eplb_runtime.hosts.attaching import attach as attaching

RANKS = 3
SHORT = 0.25
"""Seconds of a timeout that every rank here is held back for longer than."""
SOON = 60.0
"""Seconds: less than any deadline of setting up, more than a busy machine needs to end all that is left."""


def attach(rank: int, timeout_seconds: float = 30.0, **options: Any) -> eplb.Balancer:
    model = make_model("olmoe", experts=6)
    optimizer = torch.optim.AdamW(model.parameters())
    config = eplb.BalancerConfig(
        dense_gradients="allreduce", timeout_seconds=timeout_seconds, migration=eplb.MigrationConfig(transport="torch")
    )
    return eplb.attach(model, optimizer, config=config, **options)


def at(owner: Any, name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Do something before a part of attaching; what is returned takes it back."""
    whole = getattr(owner, name)

    def first(*args: Any, **options: Any) -> Any:
        action()
        return whole(*args, **options)

    setattr(owner, name, first)
    return lambda: setattr(owner, name, whole)


PLACES: dict[str, tuple[Any, str]] = {
    "describing": (eplb.hosts, "_describe"),
    "the first group": (process_groups, "gather_job"),
    "between groups": (process_groups, "host_timeout"),
    "the carrier": (attaching, "new_transport"),
    "links": (attaching, "measure"),
    "checks": (attaching, "check"),
    "copies": (attaching, "transport_of_copies"),
    "cutting": (attaching, "shard"),
    "the balancer": (attaching, "Balancer"),
    "installing": (attaching, "install"),
    "replicas": (eplb.Balancer, "begin"),
    "recording": (attaching, "_record"),
}
"""Where a rank fails: from the start of attach to its end, between all collectives."""


def held_back(rank: int) -> None:
    """Rank 1 is held at each place until the others have waited there for longer than the timeout."""
    undo = [at(*place, lambda: time.sleep(3 * SHORT)) for place in PLACES.values() if rank == 1]
    balancer = attach(rank, SHORT)
    for take_back in undo:
        take_back()
    balancer.close()


def test_setting_up_may_take_longer_than_a_rebalance() -> None:
    run_ranks(2, held_back)


def fails_somewhere(rank: int) -> dict[str, tuple[str, bool]]:
    """The last rank fails in each place in turn; what each says, and whether it was soon. Then all attach."""
    said = {}
    for place, (owner, name) in PLACES.items():
        if place == "between groups":  # the others wait for the deadline, in gloo
            continue

        def fail() -> None:
            raise MemoryError("made to fail")

        undo = at(owner, name, fail) if rank == RANKS - 1 else lambda: None
        began = time.monotonic()
        with pytest.raises((AttachError, MemoryError)) as refused:
            attach(rank)
        undo()
        said[place] = str(refused.value), time.monotonic() - began < SOON
    odd = rank == RANKS - 1
    with pytest.raises((AttachError, TypeError)) as refused:
        eplb.attach(None if odd else make_model("olmoe", experts=6))  # type: ignore[arg-type]
    said["no model"] = str(refused.value), True
    with pytest.raises(AttachError) as refused:
        attach(rank, ranks=Ranks(job=(0, 1)) if odd else Ranks())
    said["no rank of its job"] = str(refused.value), True
    attach(rank).close()
    return said


def test_a_rank_that_fails_at_attach_ends_it_on_all_with_its_own_line() -> None:
    for rank, said in enumerate(run_ranks(RANKS, fails_somewhere)):
        assert "not iterable" in said.pop("no model")[0]
        assert f"rank {RANKS - 1} is not among the ranks of the job" in said.pop("no rank of its job")[0]
        assert list(said) == [place for place in PLACES if place != "between groups"]
        for place, (line, soon) in said.items():
            assert "made to fail" in line and "\n" not in line, (place, line)
            assert rank == RANKS - 1 or f"rank {RANKS - 1}" in line, (place, line)
            assert soon, f"{place}: the others waited for a deadline"


# -- a rank that dies --------------------------------------------------------------------------------------------------


def dies(rank: int, place: str) -> str:
    owner, name = PLACES[place]
    if rank == RANKS - 1:
        at(owner, name, lambda: os.kill(os.getpid(), signal.SIGKILL))
    process_groups.SETUP_SECONDS, process_groups.ACCOUNT_SECONDS = 8.0, 8.0
    with pytest.raises(AttachError) as refused:
        attach(rank, 8.0)
    return str(refused.value)


def run_with_one_that_dies(place: str) -> list[str]:
    """What the others say; they end by themselves, without the barrier that `run_ranks` ends with."""
    return [said for said in run_ranks(RANKS, dies, place, expect_exit=(RANKS - 1,)) if said is not None]


@pytest.mark.parametrize("place", ["between groups", "checks"])
def test_a_rank_that_dies_at_attach_is_named_within_the_deadline(place: str) -> None:
    """Others wait for it in the store, to connect, or in a collective."""
    for said in run_with_one_that_dies(place):
        assert f"{RANKS - 1} was lost at attach: it has died, or does not answer" in said
