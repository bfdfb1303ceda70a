"""Process groups that torch has not made, and its functions know."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from eplb_runtime.distributed import private_groups

WORLD = dist.distributed_c10d._world


@pytest.fixture
def store() -> Iterator[dist.Store]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def reduced(store: dist.Store) -> dist.ProcessGroup:
    group = private_groups.make(store, "a name", [0], 0, "gloo", timedelta(seconds=10), "a test's")
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == 1
    return group


def test_a_group_is_listed_with_its_name_and_not_counted(store: dist.Store) -> None:
    named = len(WORLD.pg_names)
    group = reduced(store)
    assert "a name" in [one["pg_name"] for one in WORLD.pg_config_info]
    assert len(WORLD.pg_names) == named
    private_groups.forget(group)
    assert "a name" not in [one["pg_name"] for one in WORLD.pg_config_info]


@pytest.mark.parametrize("before", [None, "0"])
def test_nccl_groups_are_made_with_a_watchdog_that_ends_nothing(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name, seen = "TORCH_NCCL_BLOCKING_WAIT", []
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)

    class Nccl:
        Options = SimpleNamespace

        def __init__(self, *arguments: object) -> None:
            seen.append(os.environ.get(name))
            raise RuntimeError("there is no NCCL here")

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    with pytest.raises(RuntimeError, match="no NCCL here"):
        private_groups.make(store, "a name", [0], 0, "nccl", timedelta(seconds=9), "a test's")
    assert seen == ["1"] and os.environ.get(name) == before
