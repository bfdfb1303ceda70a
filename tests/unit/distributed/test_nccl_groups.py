"""NCCL's groups that experts travel over are all made at attach, and nothing is written into the environment later."""

from __future__ import annotations

import os
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import transport_contract

from eplb_runtime.distributed import nccl_groups, private_groups
from eplb_runtime.distributed.nccl_groups import SPARE, NcclGroups, NoGroupsLeft

NAME = "TORCH_NCCL_BLOCKING_WAIT"


class FakeNccl:
    """Reads the environment where torch does, in its constructor."""

    Options = SimpleNamespace

    def __init__(self, store: dist.Store, rank: int, size: int, options: SimpleNamespace) -> None:
        self.place, self.options, self.aborted = (rank, size), options, False
        self.watchdog_ends_the_process = os.environ.get(NAME) != "1"

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> NcclGroups:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    return NcclGroups(dist.HashStore(), "a job's", [4, 6], 6, timedelta(seconds=90))


def told_by_the_others(monkeypatch: pytest.MonkeyPatch, used: int) -> None:
    """Another rank has used so many."""

    def all_reduce(value: torch.Tensor, **named: Any) -> None:
        value.fill_(max(int(value), used))

    monkeypatch.setattr(nccl_groups.dist, "all_reduce", all_reduce)


@pytest.mark.parametrize("before", [None, "0"])
def test_all_are_made_at_attach_with_a_watchdog_that_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    monkeypatch.delenv(NAME, raising=False)
    if before is not None:
        monkeypatch.setenv(NAME, before)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    groups = NcclGroups(dist.HashStore(), "a job's", [4, 6], 6, timedelta(seconds=90))
    assert os.environ.get(NAME) == before
    monkeypatch.delattr(nccl_groups, "os")  # nothing reads or writes the environment any more
    told_by_the_others(monkeypatch, 0)
    taken = [groups.take(dist.ProcessGroup(0, 1)) for _ in range(1 + SPARE)]
    assert not any(backend.watchdog_ends_the_process for _, backend in taken)
    assert len({name for name, _ in taken}) == 1 + SPARE
    assert all(backend.place == (1, 2) and backend.options._timeout.seconds == 90 for _, backend in taken)
    assert all(backend.options.group_name == name for name, backend in taken)


def test_control_a_group_that_is_made_later_has_the_usual_watchdog(groups: NcclGroups) -> None:
    later = nccl_groups.nccl_backend(dist.HashStore(), "later", [0], 0, timedelta(seconds=9))
    assert later.watchdog_ends_the_process


def test_ranks_take_the_same_one_though_some_have_used_fewer(
    groups: NcclGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by_the_others(monkeypatch, 0)
    assert groups.take(dist.ProcessGroup(0, 1))[0] == "a job's/0"
    told_by_the_others(monkeypatch, 3)
    made = list(groups._made)
    assert groups.take(dist.ProcessGroup(0, 1))[0] == "a job's/3"
    assert [backend.aborted for backend in made] == [False, True, True, False, False]  # those that were passed over
    assert groups.take(dist.ProcessGroup(0, 1))[0] == "a job's/4"


def test_what_is_used_up_is_said_in_a_line_and_what_is_left_over_is_ended(
    groups: NcclGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list(groups._made)
    told_by_the_others(monkeypatch, 1)
    groups.take(dist.ProcessGroup(0, 1))
    told_by_the_others(monkeypatch, 1 + SPARE)
    with pytest.raises(NoGroupsLeft, match=r"made anew 4 times, and no more are ready: experts stay") as error:
        groups.take(dist.ProcessGroup(0, 1))
    assert "\n" not in str(error.value)
    groups.close()
    assert [backend.aborted for backend in made] == [True, False, True, True, True]


def test_a_private_group_takes_the_backend_that_it_is_given(
    groups: NcclGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_by_the_others(monkeypatch, 0)
    name, backend = groups.take(dist.ProcessGroup(0, 1))
    backend._set_sequence_number_for_group = lambda: None
    group = MagicMock()
    group.return_value = group
    monkeypatch.setattr(private_groups.dist, "ProcessGroup", group)
    made = private_groups.make(dist.HashStore(), name, [4, 6], 6, "nccl", timedelta(seconds=9), "a test's", backend)
    assert group._register_backend.call_args.args[2] is backend
    assert dist.distributed_c10d._world.pg_map[made][0] == "nccl"
    private_groups.forget(made)


def test_faults_of_transports_are_tried_on_groups_without_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", dist.HashStore)
    given: list[Any] = []
    monkeypatch.setattr(private_groups, "make", lambda *arguments: given.extend(arguments))
    transport_contract.group_of_all(1, "nccl", "a case")
    assert given[4] == "nccl"
    assert not given[-1].watchdog_ends_the_process
