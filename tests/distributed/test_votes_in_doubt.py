"""Ranks that have said yes to a migration beside training and hear no answer: all commit or none does, whatever is late
or lost, and training goes on in the very bits of training without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from beside import INTERVAL, RANKS, Job, at
from ranks import run_ranks
from support.seen import same
from support.shuffle import plan_by, plan_shuffle

from eplb_runtime.distributed.consensus import Agreement
from eplb_runtime.distributed.store import JobStore, StoreError
from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.events import BalancingPaused, BalancingResumed, RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import MigrationBroken, Phase
from eplb_runtime.migration.overlapped import Overlapped

SECONDS = 2.0
"""A silent store is waited for so long."""


@contextmanager
def silent_store(job: Job, until_unanswered: int) -> Iterator[list[str]]:
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


def until_committed_anew(job: Job) -> None:
    """Train until connections stand, if they broke, and experts have moved again."""
    heard = job.balancer.events
    while len(heard.of_type(BalancingPaused)) > len(heard.of_type(BalancingResumed)):
        job.step()
    job.until(RebalanceCommitted)


def once(do: Callable[[], None]) -> Callable[[Any], None]:
    done: list[bool] = []

    def first(subject: Any) -> None:
        if not done:
            done.append(True)
            do()

    return first


def one_silent_store(job: Job, victim: int, count_is_lost: bool) -> int:
    """The store of one rank falls silent as it is about to vote; its count may get lost, too. How often it was asked in
    vain."""
    with ExitStack() as stack:
        unanswered: list[list[str]] = []

        def fall_silent() -> None:
            unanswered.append(stack.enter_context(silent_store(job, until_unanswered=2)))
            if count_is_lost:
                lose_one_count()

        with at(job, victim, Phase.VERIFIED, once(fall_silent)):
            for _ in range(8):
                job.step()
    until_committed_anew(job)
    return len(unanswered[0]) if unanswered else 0


def lose_one_count() -> None:
    """All ranks hear this one's next word; it does not hear theirs."""
    gather = Agreement.gather

    def lost(self: Agreement, word: torch.Tensor, seconds: float | None = None) -> torch.Tensor:
        Agreement.gather = gather
        gather(self, word, seconds)
        raise RuntimeError("a test says: timed out")

    Agreement.gather = lost


def interrupted(job: Job) -> bool:
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
    return same(before, job.state())


def transport_fails_ahead_of_load_state_dict(job: Job) -> str:
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
        try:
            job.balancer.load_state_dict(state)
        except RuntimeError as error:
            return str(error)
    return ""


def paused_while_under_way(job: Job) -> tuple[str, bool]:
    """Connections break while experts are on their way, and a comparison notices. What it says, and whether the
    migration has ended with it."""
    job.until_sent()
    job.balancer.runtime.groups.hang_up()
    said, rebalancer = "", job.balancer.rebalancer
    try:
        rebalancer.run(lambda _, agreement: agreement.gather(torch.zeros(1)))
    except RuntimeError as error:
        said = str(error)
    return said, not job.background.in_flight


def in_doubt(rank: int) -> dict[str, Any]:
    job, said = Job(rank, overlap=True, staging_bytes=40_000, timeout_seconds=SECONDS), {}
    job.until(RebalanceCommitted)
    for name, lost in {"answer": False, "count and answer": True}.items():
        said[f"{name} lost"] = one_silent_store(job, 1, lost)
    said["whole"] = interrupted(job)
    until_committed_anew(job)
    said["failed in flight"] = transport_fails_ahead_of_load_state_dict(job)
    until_committed_anew(job)
    said["paused"] = paused_while_under_way(job)
    until_committed_anew(job)
    said["causes"] = [event.cause for event in job.balancer.events.of_type(RebalanceAborted)]
    still = Job(rank, overlap=False)
    while still.steps < job.steps:
        still.step()
    said["same"] = job.losses == still.losses and same(job.state(), still.state())
    said["digest"] = job.balancer.placement.digest()
    for each in (job, still):
        each.balancer.close()
    return said


def test_ranks_in_doubt_ranks_interrupted_and_calls_that_meet_what_is_in_flight() -> None:
    results = run_ranks(RANKS, in_doubt)
    assert all(result["same"] for result in results)
    assert len({result["digest"] for result in results}) == 1
    assert all(results[1][f"{what} lost"] >= 2 for what in ("answer", "count and answer"))
    assert all(result["whole"] for result in results)
    assert all("could not compare" in result["failed in flight"] for result in results)
    assert all(result["paused"][0] and result["paused"][1] for result in results)
    assert not [cause for result in results for cause in result["causes"] if "staging" in cause]


def broken_in_a_commit(rank: int) -> dict[str, Any]:
    """Ctrl-C on every rank in the midst of a commit beside training; the loop catches it and goes on."""
    job, said = Job(rank, overlap=True, staging_bytes=40_000), {"whole": True}

    def break_off(subject: Any) -> None:
        raise KeyboardInterrupt

    with at(job, rank, Phase.COMMITTED, once(lambda: break_off(None))):
        try:
            for _ in range(60):
                job.step()
        except KeyboardInterrupt:
            said["interrupted"] = job.steps
    for name, call in (("forward", job.step), ("state_dict", job.balancer.state_dict), ("again", job.step)):
        try:
            call()
        except MigrationBroken as error:
            said[name] = str(error)
    return said


def test_a_commit_that_is_interrupted_ends_training_however_often_the_loop_goes_on() -> None:
    for said in run_ranks(RANKS, broken_in_a_commit):
        assert said["interrupted"]
        assert all("go back to a checkpoint" in said[name] for name in ("forward", "state_dict", "again"))


def copies_not_refreshed(rank: int) -> str:
    """What training says where copies cannot be refreshed after a commit beside it, as when a rank has died."""
    job = Job(rank, overlap=True, staging_bytes=40_000, replica_slots=1)
    plan_by(job.balancer, plan_shuffle)
    refresh = job.balancer.runtime.maps.replicas.refresh

    def fail(layers: Any = None) -> None:
        if layers is not None:
            raise OSError("a test says: connection closed by peer")
        refresh()

    job.balancer.runtime.maps.replicas.refresh = fail
    try:
        job.until(RebalanceCommitted)
    except MigrationBroken as error:
        return str(error)
    return ""


def test_copies_that_cannot_follow_are_named_not_the_experts_that_are_where_they_should_be() -> None:
    for said in run_ranks(RANKS, copies_not_refreshed):
        assert said.startswith("copies of layer") and "connection closed by peer" in said


def group_in_doubt(rank: int) -> dict[str, Any]:
    """EP 2 x EDP 2. The stores of a whole EP group fall silent as its ranks are about to vote, and it does not hear the
    count; the other group hears all."""
    group = [dist.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    job = Job(rank, overlap=True, staging_bytes=40_000, timeout_seconds=SECONDS, ep_group=group)
    job.until(RebalanceCommitted)
    unanswered: list[list[str]] = []
    with ExitStack() as stack:

        def fall_silent() -> None:
            unanswered.append(stack.enter_context(silent_store(job, until_unanswered=2)))
            lose_one_count()

        with at(job, rank if rank < 2 else -1, Phase.VERIFIED, once(fall_silent)):
            for _ in range(8):
                job.step()
    until_committed_anew(job)
    still = Job(rank, overlap=False, ep_group=group)
    while still.steps < job.steps:
        still.step()
    said = {
        "unanswered": len(unanswered[0]) if unanswered else 0,
        "same": job.losses == still.losses and same(job.state(), still.state()),
        "digest": job.balancer.placement.digest(),
    }
    for each in (job, still):
        each.balancer.close()
    return said


def test_an_ep_group_all_in_doubt_beside_another_that_is_not_asks_until_it_hears() -> None:
    results = run_ranks(4, group_in_doubt)
    assert [result["unanswered"] >= 2 for result in results] == [True, True, False, False]
    assert all(result["same"] for result in results)
    assert len({result["digest"] for result in results}) == 1
