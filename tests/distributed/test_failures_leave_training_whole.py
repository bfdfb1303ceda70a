"""Whatever goes wrong in a rebalance, the old placement stands on every rank, an event says why, and training goes on
to the very bits that it reaches without a balancer's help."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, plan_newest, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.events import (
    BalancingPaused,
    BalancingResumed,
    EventLog,
    RebalanceAborted,
    RebalanceCommitted,
    RebalancePlanned,
)
from eplb_runtime.migration.engine import MigrationBroken, Phase

STEPS = 8
INTERVAL = 2
Injection = Callable[[int, eplb.Balancer], None]


def train(
    rank: int,
    policy: str,
    inject: Injection,
    timeout_seconds: float = 20.0,
    staging_bytes: int = 256 << 20,
    planner: Callable[..., eplb.Plan] = plan_shuffle,
) -> dict:
    model = make_model("olmoe", experts=16, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    balancer = training.attach(
        model,
        optimizer,
        interval=INTERVAL,
        policy=policy,
        gate="always",
        timeout_seconds=timeout_seconds,
        staging_bytes=staging_bytes,
    )
    wait_until_compiled(balancer)
    if policy != "static":
        plan_by(balancer, planner)
    inject(rank, balancer)
    placements, losses = [], []
    for step in itertools.count():
        if step >= STEPS and has_rebalanced_since_it_connected(balancer.events):
            break
        losses.append(training.step(model, optimizer, batch_of(rank, step) % 12 + 12 * ((step // 2) % 7)))
        placements.append((balancer.placement.digest(), balancer.placement.epoch))
    result = {
        "losses": losses,
        "state": eplb.logical_state_dict(model, optimizer),
        "placements": placements,
        "aborted": [(e.step, e.phase, e.cause) for e in balancer.events.of_type(RebalanceAborted)],
        "partly": [(e.committed_layers, e.left_layers) for e in balancer.events.of_type(RebalanceAborted)],
        "committed": [e.step for e in balancer.events.of_type(RebalanceCommitted)],
    }
    balancer.close()
    return result


def has_rebalanced_since_it_connected(events: EventLog) -> bool:
    """Whether the ranks stand connected, and have decided a few times since they had to connect again, if they had."""
    paused, resumed = events.of_type(BalancingPaused), events.of_type(BalancingResumed)
    decided = events.of_type(RebalancePlanned)
    return len(paused) == len(resumed) and all(
        len([e for e in decided if e.step > again.step]) >= 4 for again in resumed
    )


def nothing(rank: int, balancer: eplb.Balancer) -> None:
    pass


class Once:
    """Does something the first time a phase is reached on one rank."""

    def __init__(self, phase: Phase, action: Callable[[object], None]) -> None:
        self.phase, self.action, self.done = phase, action, False

    def __call__(self, phase: Phase, subject: object) -> None:
        if phase is self.phase and subject and not self.done:
            self.done = True
            self.action(subject)


def corrupt_a_staged_byte(rank: int, balancer: eplb.Balancer) -> None:
    def flip(staged: list) -> None:
        staged[0].record[3] ^= 1

    if rank == 1:
        balancer._rebalancer._engine.probe = Once(Phase.STAGED, flip)


def garble_the_plan(rank: int, balancer: eplb.Balancer) -> None:
    done = []

    def garble(message: bytearray) -> None:
        if not done and b'"placement": {' in message:
            done.append(True)
            message[-20:] = b"#" * 20

    if rank == 3:
        balancer._rebalancer._engine.probe = lambda phase, subject: garble(subject) if phase is Phase.PLANNED else None


def fail_in_the_second_round(rank: int, balancer: eplb.Balancer) -> None:
    seen = {"rounds": 0, "failed": False}

    def probe(phase: Phase, subject: object) -> None:
        if phase is Phase.PREPARED:
            seen["rounds"] = 0
        if phase is Phase.COMMITTED:
            seen["rounds"] += 1
        if phase is Phase.VERIFIED and seen["rounds"] == 1 and not seen["failed"]:
            seen["failed"] = True
            raise OSError("the device went away")

    if rank == 2:
        balancer._rebalancer._engine.probe = probe


DROPPED: dict[Injection, tuple[str, str]] = {
    corrupt_a_staged_byte: ("staged", "checksum"),
    garble_the_plan: ("planned", "no plan on rank 3"),
}
"""The phase that an event tells of, and its cause."""


def one_after_another(rank: int) -> dict[str, dict]:
    """Jobs that need no new connections."""
    return {
        "undisturbed": train(rank, "static", nothing),
        **{inject.__name__: train(rank, "incremental", inject) for inject in DROPPED},
        "half way": train(rank, "incremental", fail_in_the_second_round, staging_bytes=1, planner=plan_newest),
    }


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict]]:
    of_ranks = run_ranks(4, one_after_another)
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


@pytest.fixture
def undisturbed(trained: dict[str, list[dict]]) -> list[dict]:
    return trained["undisturbed"]


@pytest.mark.parametrize("inject", DROPPED, ids=lambda inject: inject.__name__)
def test_the_rebalance_is_dropped_and_the_next_one_works(
    undisturbed: list[dict], trained: dict[str, list[dict]], inject: Injection
) -> None:
    results, (phase, cause) = trained[inject.__name__], DROPPED[inject]
    for rank, result in enumerate(results):
        assert len(result["aborted"]) == 1, f"rank {rank}: {result['aborted']}"
        step, where, why = result["aborted"][0]
        assert (where, step % INTERVAL) == (phase, 1)
        assert cause in why
        before, after = result["placements"][step - 2], result["placements"][step - 1]
        assert before == after, "a dropped rebalance changed the placement"
        assert [s for s in result["committed"] if s > step], "no rebalance after the dropped one"
        assert result["placements"] == results[0]["placements"]
        assert result["losses"] == undisturbed[rank]["losses"]
        for name, tensor in result["state"].items():
            assert torch.equal(tensor, undisturbed[rank]["state"][name]), name


def test_a_rebalance_that_stops_half_way_says_so_and_training_goes_on_with_what_was_committed(
    undisturbed: list[dict], trained: dict[str, list[dict]]
) -> None:
    """One expert a round: the first is committed, the second fails; the next rebalance starts from there."""
    results = trained["half way"]
    for rank, result in enumerate(results):
        ((step, phase, cause),) = result["aborted"]
        assert (phase, cause) == ("staged", "rank 2: OSError: the device went away")
        ((committed, left),) = result["partly"]
        assert committed and left
        before, after = result["placements"][step - 2], result["placements"][step - 1]
        assert before[0] != after[0] and after[1] == before[1] + 1
        assert [s for s in result["committed"] if s > step], "no rebalance after the dropped one"
        assert result["placements"] == results[0]["placements"]
        assert result["losses"] == undisturbed[rank]["losses"]
        for name, tensor in result["state"].items():
            assert torch.equal(tensor, undisturbed[rank]["state"][name]), name


def stall_until_the_others_gave_up(rank: int, balancer: eplb.Balancer) -> None:
    """Rank 1 does not send its experts before the others have dropped the rebalance."""
    store = dist.distributed_c10d._get_default_store()

    def announce(event: object) -> None:
        if isinstance(event, RebalanceAborted):
            store.set(f"gave up {rank}", "1")

    def stall(subject: object) -> None:
        store.wait([f"gave up {other}" for other in (0, 2, 3)])

    balancer.events.subscribe(announce)
    if rank == 1:
        balancer._rebalancer._engine.probe = Once(Phase.PREPARED, stall)


def test_ranks_that_waited_in_vain_find_together_again(undisturbed: list[dict]) -> None:
    results = run_ranks(4, train, "incremental", stall_until_the_others_gave_up, 3.0)
    for rank, result in enumerate(results):
        assert len(result["aborted"]) == 1, f"rank {rank}: {result['aborted']}"
        assert [s for s in result["committed"] if s > result["aborted"][0][0]], "no rebalance after the dropped one"
        assert result["losses"][:STEPS] == undisturbed[rank]["losses"]


def migrate_while_a_rank_dies(rank: int) -> tuple[str, bool]:
    """Rank 2 dies with its experts staged; returns where the others' rebalance broke off and whether they are whole."""
    model = make_model("olmoe", experts=16, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(interval=2, timeout_seconds=3.0))
    before = [p.detach().clone() for p in model.parameters()]
    old = balancer.placement
    if rank == 2:
        balancer._rebalancer._engine.probe = Once(Phase.STAGED, lambda staged: os._exit(1))
    rotated = (old.physical_to_logical + 4) % 16
    balancer._rebalancer._migrate(eplb.Placement(rotated, 16, 4, rotated.argsort(axis=1), old.epoch + 1))
    whole = balancer.placement == old and all(map(torch.equal, before, model.parameters()))
    return balancer.events.of_type(RebalanceAborted)[0].phase, whole


def test_a_rank_that_dies_while_staging_leaves_the_old_placement() -> None:
    results = run_ranks(4, migrate_while_a_rank_dies, expect_exit=[0, 1, 2, 3])
    assert [result for rank, result in enumerate(results) if rank != 2] == [("staged", True)] * 3


def fail_after_the_vote_and_go_on(rank: int) -> list[str]:
    """Rank 1 runs out of memory in a commit; a loop that catches errors goes on. What it hears at each call after."""
    model = make_model("olmoe", experts=16, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    balancer = training.attach(model, optimizer, interval=2, timeout_seconds=20.0)

    def fail(subject: object) -> None:
        raise MemoryError("out of memory")

    if rank == 1:
        balancer._rebalancer._engine.probe = Once(Phase.COMMITTED, fail)
    old, said = balancer.placement, []
    rotated = (old.physical_to_logical + 4) % 16
    target = eplb.Placement(rotated, 16, 4, rotated.argsort(axis=1), old.epoch + 1)
    calls: list[Callable[[], object]] = [
        lambda: balancer._rebalancer._migrate(target),
        lambda: model(input_ids=batch_of(rank, 0)),
        optimizer.step,
        balancer.rebalance,
    ]
    for call in calls[: 4 if rank == 1 else 1]:
        try:
            call()
            said.append("")
        except MigrationBroken as error:
            said.append(str(error))
    return said


def test_a_rank_that_fails_in_a_commit_does_not_train_on() -> None:
    results = run_ranks(4, fail_after_the_vote_and_go_on)
    assert [said for rank, said in enumerate(results) if rank != 1] == [[""]] * 3
    assert len(results[1]) == 4
    assert all("go back to a checkpoint" in line and "out of memory" in line for line in results[1])
