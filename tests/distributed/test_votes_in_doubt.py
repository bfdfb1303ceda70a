"""Ranks that stand still, die or hear no answer at each point of the protocol, while experts migrate beside training:
all ranks commit a layer or none does, and who lives goes on, in the very bits of training without."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.beside import INTERVAL, RANKS, Run, at
from support.ranks import run_ranks
from support.seen import said_by, same
from support.shuffle import plan_by, plan_shuffle

from eplb_runtime.distributed.consensus import Agreement
from eplb_runtime.distributed.store import JobStore, StoreError
from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.events import BalancingPaused, RebalanceCommitted
from eplb_runtime.migration.engine import MigrationBroken, Phase
from eplb_runtime.migration.overlapped import Overlapped

SECONDS = 2.0
"""A silent store is waited for so long."""
DEADLINE, SHORTER, LONGER = 3.0, 0.3, 4.0
STOPPED = 2
"""The rank that stands still, or dies."""


def once(do: Callable[[], None]) -> Callable[[Any], None]:
    done: list[bool] = []

    def first(subject: Any) -> None:
        if not done:
            done.append(True)
            do()

    return first


# -- no answer ---------------------------------------------------------------------------------------------------------


@contextmanager
def silent_store(job: Run, until_unanswered: int) -> Iterator[list[str]]:
    """Inside, the launcher's store hears nothing on this rank, until it was asked in vain a few times. What it was."""
    asked, answers, ask = [], threading.Event(), JobStore._ask
    store = job.balancer.runtime.groups.store

    def asking(self: JobStore, *arguments: Any) -> Any:
        try:
            return ask(self, *arguments)
        except StoreError as error:
            asked.append(str(error))
            if len(asked) == until_unanswered:
                answers.set()
            raise

    store._worker.submit(answers.wait)
    JobStore._ask = asking
    try:
        yield asked
    finally:
        answers.set()
        JobStore._ask = ask


def silent_while_voting(job: Run, victims: tuple[int, ...], count_is_lost: bool) -> bool:
    """The stores of ranks fall silent as they are about to vote; their counts may get lost, too. Whether this one's was
    asked in vain and asked again."""
    with ExitStack() as stack:
        unanswered: list[list[str]] = []

        def fall_silent() -> None:
            unanswered.append(stack.enter_context(silent_store(job, until_unanswered=2)))
            if count_is_lost:
                lose_one_count()

        with at(job, job.rank if job.rank in victims else -1, Phase.VERIFIED, once(fall_silent)):
            job.train(8)
    job.until_committed_anew()
    return bool(unanswered) and len(unanswered[0]) >= 2


def lose_one_count() -> None:
    """All ranks hear this one's next word; it does not hear theirs."""
    gather = Agreement.gather

    def lost(self: Agreement, word: torch.Tensor, seconds: float | None = None) -> torch.Tensor:
        Agreement.gather = gather
        gather(self, word, seconds)
        raise RuntimeError("a test says: timed out")

    Agreement.gather = lost


def interrupted(job: Run) -> bool:
    """Ctrl-C on every rank, between the outcome of a round and its commit; the loop catches it, looks at what it has,
    and repeats the step. Whether what it saw was whole."""
    commit, broke_off = Overlapped._commit, []

    def break_off(self: Overlapped, flight: Any) -> None:
        if self is job.background and flight.layer == 1 and not broke_off:
            broke_off.append(True)
            raise KeyboardInterrupt
        commit(self, flight)

    Overlapped._commit = break_off
    before = {}
    while not broke_off:
        before = job.state()
        with suppress(KeyboardInterrupt):
            job.step()
    whole = same(before, job.state())
    job.until_committed_anew()
    return whole


def transport_fails_ahead_of_load_state_dict(job: Run) -> str:
    """On one rank what is in flight fails, and it says so to nobody; then all compare something. What that came to."""
    state, failed = job.balancer.state_dict(), threading.Event()

    def fail(subject: Any) -> None:
        # What leaves after a step in which a decision is due has another step to fail in: the loop below goes on then.
        if job.balancer.rebalancer.step % INTERVAL and not failed.is_set():
            failed.set()
            raise TransportError("a test says: the device went away")

    with at(job, 2, Phase.STAGED, fail):
        job.until_sent()
        if job.rank == 2:
            failed.wait()
        said = said_by(lambda: job.balancer.load_state_dict(state))
    job.until_committed_anew()
    return said


def in_doubt(rank: int) -> dict[str, Any]:
    job = Run(rank, overlap=True, staging_bytes=40_000, timeout_seconds=SECONDS)
    job.until(RebalanceCommitted)
    said: dict[str, Any] = {"unanswered": silent_while_voting(job, (1,), count_is_lost=False)}
    said["whole"] = interrupted(job)
    said["failed in flight"] = transport_fails_ahead_of_load_state_dict(job)
    said["staging"] = [cause for cause in job.causes() if "staging" in cause]
    said["digest"] = job.balancer.placement.digest()
    return {**said, "same": job.equals(job.still())}


def test_ranks_in_doubt_ranks_interrupted_and_calls_that_meet_what_is_in_flight() -> None:
    results = run_ranks(RANKS, in_doubt)
    assert len({result["digest"] for result in results}) == 1
    assert [result["unanswered"] for result in results] == [False, True, False]
    for result in results:
        assert result["same"] and result["whole"] and not result["staging"]
        assert "could not compare" in result["failed in flight"]


def group_in_doubt(rank: int) -> dict[str, Any]:
    """EP 2 x EDP 2: a whole EP group falls silent and does not hear the count; the other group hears all."""
    group = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    job = Run(rank, overlap=True, staging_bytes=40_000, timeout_seconds=SECONDS, ep_group=group)
    job.until(RebalanceCommitted)
    said = {
        "unanswered": silent_while_voting(job, (0, 1), count_is_lost=True),
        "digest": job.balancer.placement.digest(),
    }
    return {**said, "same": job.equals(job.still())}


@pytest.mark.long
def test_an_ep_group_all_in_doubt_beside_another_that_is_not_asks_until_it_hears() -> None:
    results = run_ranks(4, group_in_doubt)
    assert [result["unanswered"] for result in results] == [True, True, False, False]
    assert all(result["same"] for result in results) and len({result["digest"] for result in results}) == 1


# -- copies that cannot follow -----------------------------------------------------------------------------------------


def copies_not_refreshed(rank: int) -> str:
    """What training says where copies cannot be refreshed after a commit beside it, as when a rank has died."""
    job = Run(rank, overlap=True, staging_bytes=40_000, replica_slots=1)
    plan_by(job.balancer, plan_shuffle)
    replicas = job.balancer.runtime.maps.replicas
    refresh = replicas.refresh

    def fail(layers: Any = None) -> None:
        if layers is not None:
            raise OSError("a test says: connection closed by peer")
        refresh()

    replicas.refresh = fail
    with pytest.raises(MigrationBroken) as broken:
        job.until(RebalanceCommitted)
    return str(broken.value)


@pytest.mark.long
def test_copies_that_cannot_follow_are_named_not_the_experts_that_are_where_they_should_be() -> None:
    for said in run_ranks(RANKS, copies_not_refreshed):
        assert said.startswith("replicas of MoE layer") and "connection closed by peer" in said


# -- a rank that stands still, or dies ---------------------------------------------------------------------------------


def stand_still(seconds: float) -> None:
    """Stops this process, all threads of it; a child wakes it."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    # To this very thread: sent to the process, another may take it, and this one goes on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def came_to_nothing(job: Run) -> int:
    """Rebalances and rounds, so far."""
    return len(job.causes()) + len(job.balancer.events.of_type(BalancingPaused)) + job.background.late_rounds


def stopped_at_each_point(rank: int) -> dict[str, Any]:
    job = Run(rank, overlap=True, staging_bytes=40_000, timeout_seconds=DEADLINE)
    said: dict[str, Any] = {"noticed": []}
    for phase, seconds in ((Phase.STAGED, SHORTER), (Phase.VERIFIED, LONGER), (Phase.PREPARED, LONGER)):
        job.until_committed_anew()
        before, reached = came_to_nothing(job), threading.Event()

        def stop(seconds: float = seconds, reached: threading.Event = reached) -> None:
            reached.set()
            stand_still(seconds)

        with at(job, STOPPED, phase, once(stop)):
            job.train(8)
        assert rank != STOPPED or reached.is_set(), f"never came to {phase}"
        said["noticed"].append(came_to_nothing(job) - before)
    job.until_committed_anew()
    said["digest"] = job.balancer.placement.digest()
    return {**said, "same": job.equals(job.still())}


@pytest.mark.long
def test_a_rank_that_stands_still_shorter_or_longer_than_the_deadline() -> None:
    results = run_ranks(RANKS, stopped_at_each_point)
    assert all(result["same"] for result in results) and len({result["digest"] for result in results}) == 1
    _, *longer = zip(*(result["noticed"] for result in results), strict=True)
    assert all(max(of_ranks) > 0 for of_ranks in longer)


def killed(rank: int, phase: Phase) -> dict[str, Any]:
    """One rank is killed at a point of the protocol; a job without migrations, a step ahead, says what is right."""
    job = Run(rank, overlap=True, staging_bytes=40_000, timeout_seconds=DEADLINE)
    job.until(RebalanceCommitted)
    still, states, epoch = job.still(), {}, job.balancer.placement.epoch
    said = {"error": ""}
    try:
        with at(job, STOPPED, phase, lambda subject: os.kill(os.getpid(), signal.SIGKILL)):
            for _ in range(8):
                states[still.steps] = still.state()
                still.step()
                states[still.steps] = still.state()
                job.step()
    except RuntimeError as error:
        said["error"] = str(error)
    said["stands"] = job.balancer.placement.epoch - epoch, job.balancer.placement.digest()
    right = states[job.steps]
    said["whole"] = whole(job, right)
    with torch.no_grad():
        next(rows_of(job, right))[0].flatten()[0] += 1
    return {**said, "control": whole(job, right)}


def rows_of(job: Run, right: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's live rows of weights and optimizer state, each tensor with the rows that it should hold."""
    homes_LRH = torch.from_numpy(job.balancer.placement.homes_LRH.copy())
    for name, layer in job.balancer.layer_of_parameter.items():
        homes_H, parameter = homes_LRH[layer, job.rank], job.model.get_parameter(name)
        yield parameter.data, right[f"model.{name}"][homes_H]
        for key in ("exp_avg", "exp_avg_sq"):
            yield job.optimizer.state[parameter][key], right[f"optimizer.{name}.{key}"][homes_H]


def whole(job: Run, right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(rows, wanted) for rows, wanted in rows_of(job, right))


@pytest.mark.long
@pytest.mark.parametrize("phase", [Phase.STAGED, Phase.DECIDED], ids=lambda phase: phase.value)
def test_who_outlives_a_killed_rank_holds_whole_experts_of_one_placement(phase: Phase) -> None:
    results = run_ranks(RANKS, killed, phase, expect_exit=(STOPPED,))
    alive = [result for rank, result in enumerate(results) if rank != STOPPED]
    assert all(result["error"] for result in alive) and len({result["stands"] for result in alive}) == 1
    assert all(result["whole"] and not result["control"] for result in alive)
