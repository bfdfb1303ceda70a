"""Process groups that torch has not made, and its functions know."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from eplb_runtime.distributed import private_groups
from eplb_runtime.distributed.setting_up import OthersGaveUp, WatchedStore

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
    assert total.item() == 1 and private_groups.is_private(group)
    return group


def test_a_group_is_listed_with_its_name_and_not_counted(store: dist.Store) -> None:
    named = len(WORLD.pg_names)
    group = reduced(store)
    assert "a name" in [one["pg_name"] for one in WORLD.pg_config_info]
    assert len(WORLD.pg_names) == named and not private_groups.is_private(dist.group.WORLD)
    private_groups.forget(group)
    assert not private_groups.is_private(group)
    assert "a name" not in [one["pg_name"] for one in WORLD.pg_config_info]


def test_a_torch_without_the_table_of_names_makes_and_forgets_groups_all_the_same(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(type(WORLD), "pg_names")
    group = reduced(store)
    private_groups.forget(group)
    assert not private_groups.is_private(group)
    monkeypatch.undo()  # torch's own end asks for it


def test_whoever_finds_a_group_finds_all_that_belongs_to_it(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []

    class Map(dict):  # type: ignore[type-arg]
        def __setitem__(self, group: dist.ProcessGroup, value: object) -> None:
            super().__setitem__(group, value)
            found.append(group in WORLD.pg_group_ranks and group in WORLD.pg_backend_config)

    monkeypatch.setattr(dist.distributed_c10d, "_pg_map", Map(WORLD.pg_map))
    private_groups.forget(reduced(store))
    assert found == [True]


@pytest.mark.parametrize("fails", [True, False])
def test_a_rank_that_fails_ends_the_wait_of_one_that_connects_to_it(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    gloo, connecting, comes = dist.ProcessGroupGloo, threading.Event(), threading.Event()

    def connects(*args: object, **named: object) -> dist.ProcessGroupGloo:
        if fails:
            store.set("failed", "rank 1: it has failed")
        else:
            threading.Timer(2 * private_groups._LISTENS_EVERY_SECONDS, comes.set).start()
        connecting.set()
        comes.wait()  # in gloo, which reads no store
        return gloo(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "ProcessGroupGloo", connects)
    monkeypatch.setattr(private_groups, "_HEARS_WITHIN_SECONDS", 0.05)
    watched = WatchedStore(store, "failed")
    try:
        if fails:
            with pytest.raises(OthersGaveUp, match="rank 1: it has failed"):
                private_groups.make(watched, "a name", [0], 0, "gloo", timedelta(seconds=10), "a test's")
        else:
            group = private_groups.make(watched, "a name", [0], 0, "gloo", timedelta(seconds=10), "a test's")
            dist.all_reduce(torch.ones(1), group=group)
            private_groups.forget(group)
        assert connecting.is_set()
    finally:
        comes.set()
