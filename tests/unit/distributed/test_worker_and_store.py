"""Waits that end: work on a thread of ours, and words in the launcher's store."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from eplb_runtime.distributed import consensus
from eplb_runtime.distributed.process_groups import forget_group, make_group
from eplb_runtime.distributed.ranks import Job
from eplb_runtime.distributed.store import JobStore, StoreError, name_of_job
from eplb_runtime.utils.worker import Worker


def test_work_that_never_ends_is_not_waited_for_and_what_nobody_waits_for_is_left_out() -> None:
    worker, release, done = Worker("test"), threading.Event(), []
    with pytest.raises(TimeoutError):
        worker.do(release.wait, 0.01)
    with pytest.raises(TimeoutError):
        worker.do(lambda: done.append("too late"), 0.01)
    assert not worker.close(0.0)
    release.set()
    assert worker.close(10.0)
    assert done == []


def test_what_work_returns_and_raises_is_handed_back() -> None:
    worker = Worker("test")
    assert worker.do(lambda: 7, 10.0) == 7
    with pytest.raises(KeyError):
        worker.do(lambda: {}["nothing"], 10.0)
    with pytest.raises(TimeoutError, match="its own"):
        worker.do(lambda: (_ for _ in ()).throw(TimeoutError("its own")), 10.0)
    assert worker.close(10.0)
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(lambda: 7)


class Stuck:
    """A store whose server has gone silent until it is released."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self.release, self.clones = store, threading.Event(), 0

    def clone(self) -> dist.Store:
        self.clones += 1
        self.release.wait()
        return self.store


def test_a_store_that_does_not_answer_is_not_waited_for_longer_than_the_timeout() -> None:
    stuck = Stuck(dist.HashStore())
    store = JobStore(stuck, "job", 0.05)
    for _ in range(3):
        with pytest.raises(StoreError, match=r"does not answer|given no answer"):
            store.compare_set("decision", "commit")
    assert stuck.clones == 1, "one thread and one connection wait, however often it was asked"
    stuck.release.set()
    patient = JobStore(stuck, "job", 10.0)
    assert patient.compare_set("another decision", "abort") == "abort"
    assert patient.compare_set("another decision", "commit") == "abort"
    assert (patient.word_of("another decision"), patient.word_of("a third")) == ("abort", "")
    assert (patient.add("count", 2), patient.add("count", 1)) == (2, 3)


class Lines(dist.HashStore):
    """Its own connections; a line that is cut says so when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.cut = list[Lines](), False

    def clone(self) -> dist.Store:
        self.made.append(Lines())
        return self.made[-1]

    def check(self, keys: list[str]) -> bool:
        if self.cut:
            raise RuntimeError("Connection reset by peer")
        return super().check(keys)


def test_a_connection_that_was_given_back_is_used_again_until_it_is_cut() -> None:
    lines = Lines()
    for count, made in ((1, 1), (2, 1), (1, 2), (2, 2)):
        store = JobStore(lines, "job", 10.0)
        assert (store.add("count", 1), len(lines.made)) == (count, made)
        store.close()
        lines.made[0].cut = count == 2


def test_the_lives_of_a_job_and_its_attaches_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    names = []
    for life in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", life)
        for _ in range(2):
            here = [name_of_job(store, (0, 1), rank) for rank in (0, 1)]
            assert here[0] == here[1], "ranks of one job find the same name"
            names.append(here[0])
        names.append(name_of_job(store, (0, 2), 0))
    assert len(set(names)) == 6


@pytest.mark.parametrize(("what", "patient"), [("attach", True), ("rebalance()", False)])
def test_a_meeting_over_a_silent_store_ends_and_a_slow_store_is_waited_for(
    what: str, patient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(dist.HashStore())
    stuck.timeout = timedelta(seconds=10)  # type: ignore[attr-defined]
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: stuck)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with monkeypatch.context() as impatient, pytest.raises(StoreError, match=r"does not answer|given no answer"):
        impatient.setattr(consensus, "SETUP_SECONDS" if patient else "_STORE_SECONDS", 0.05)
        consensus.barrier([0], what, 0.01, patient=patient)
    threading.Timer(0.2, stuck.release.set).start()
    consensus.barrier([0], what, 0.01, patient=patient)  # what timed out may have been counted: it meets all the same


# -- Who has which rows of experts, from what the ranks of a job said


def job(divided_rows: int) -> Job:
    """Two stages of eight ranks, EP 2."""
    sets = tuple((first, first + 1) for first in range(0, 16, 2))
    return Job(tuple(range(16)), 5, sets, ((0,),) * 4 + ((1,),) * 4, (1, 1), 1, divided_rows)


def test_rows_lie_in_ep_groups_or_divided_on_all_ranks_of_a_stage_or_once_in_each_replica_of_the_model() -> None:
    assert job(0).row_sets == list(job(0).ep_sets)
    assert (job(0).row_ranks, job(0).row_rank, job(0).dp_shard_degree) == ((4, 5), 1, 1)
    assert job(4).shard_sets[0] == (0, 2, 4, 6) and all(len(ranks) == 1 for ranks in job(4).edp_replica_sets)
    assert job(4).row_sets == [(0, 2, 4, 6, 1, 3, 5, 7), (8, 10, 12, 14, 9, 11, 13, 15)]
    assert (job(4).row_rank, job(4).dp_shard_degree) == (6, 4)
    assert job(2).row_sets == [(0, 2, 1, 3), (4, 6, 5, 7), (8, 10, 9, 11), (12, 14, 13, 15)]
    assert (job(2).row_rank, job(2).dp_shard_degree) == (2, 2)
    assert job(2).shard_sets[:2] == [(0, 2), (4, 6)] and job(2).edp_replica_sets[:2] == [(0, 4), (2, 6)]
    assert job(1).row_sets == list(job(1).ep_sets)
    assert job(0).shard_sets[0] == (0, 2, 4, 6) and all(len(ranks) == 1 for ranks in job(0).edp_replica_sets)


def test_divided_state_travels_among_all_ranks_of_a_stage() -> None:
    plain, divided = job(0), replace(job(0), divided_state=True)
    assert plain.migration_sets == plain.row_sets and plain.migration_rank == plain.row_rank
    assert divided.row_sets == plain.row_sets and divided.state_holders == 4 and plain.state_holders == 1
    assert divided.migration_sets == [(0, 2, 4, 6, 1, 3, 5, 7), (8, 10, 12, 14, 9, 11, 13, 15)]
    assert divided.migration_rank == divided.ep_rank * 4 + divided.edp_ranks.index(divided.rank) == 6


# -- Process groups that torch has not made, and its functions know


WORLD = dist.distributed_c10d._world


@pytest.fixture
def store() -> Iterator[dist.Store]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def reduced(store: dist.Store) -> dist.ProcessGroup:
    group = make_group(store, "a name", [0], 0, "gloo", timedelta(seconds=10), "a test's")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 1
    return group


def test_a_group_is_listed_with_its_name_and_not_counted(store: dist.Store) -> None:
    named = len(WORLD.pg_names)
    group = reduced(store)
    assert "a name" in [one["pg_name"] for one in WORLD.pg_config_info]
    assert len(WORLD.pg_names) == named
    forget_group(group)
    assert "a name" not in [one["pg_name"] for one in WORLD.pg_config_info]


@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_groups_are_made_with_a_watchdog_that_ends_nothing(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    def nccl(*_: object) -> None:
        seen.append(os.environ.get(name))
        raise RuntimeError("there is no NCCL here")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Mock(side_effect=nccl), raising=False)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        make_group(store, "a name", [0], 0, "nccl", timedelta(seconds=9), "a test's")
    assert seen == ["1"] and os.environ.get(name) == before
