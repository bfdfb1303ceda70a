"""``transport="auto"``: one choice for all ranks, and the way back to torch's."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import exchange_with_all, soon

from eplb_runtime.distributed.transports import nixl, windows
from eplb_runtime.distributed.transports.automatic import TransportChoice, choose, choose_together, why_not
from eplb_runtime.distributed.transports.base import TransportError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("nodes", "lacking", "name", "why"),
    [
        ("aaaa", {}, "cuda_ipc", "one node"),
        ("aabb", {}, "nixl", "several nodes"),
        ("aaaa", {"cuda_ipc": {2: "a CPU"}}, "torch", "one node; no cuda_ipc: rank 2: a CPU"),
        ("aabb", {"nixl": {1: "no RDMA"}}, "torch", "several nodes; no nixl: rank 1: no RDMA"),
    ],
)
def test_the_choice(nodes: str, lacking: dict[str, dict[int, str]], name: str, why: str) -> None:
    said = [{each: lacking.get(each, {}).get(rank, "") for each in ("cuda_ipc", "nixl")} for rank in range(4)]
    assert choose(nodes, said) == TransportChoice(name, why)


def test_every_transport_says_whether_it_can_be_used() -> None:
    assert why_not("torch", CPU) == "" and "not on cpu" in why_not("cuda_ipc", CPU)
    assert all("GPU" in why_not(name, CPU) for name in ("nvshmem", "deepep"))


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "PACKAGES", ("a_package_that_is_not_there",))
    assert "pip install" in nixl.why_not()


def test_what_ucx_may_use_is_not_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may read it at that moment. The user's own choice stands."""
    told: list[tuple[str, dict[str, str]]] = []

    def agent(*_: object) -> SimpleNamespace:
        assert os.environ.get("UCX_TLS") == before
        return SimpleNamespace(create_backend=lambda *of: told.append(of))

    api = SimpleNamespace(logger=logging.getLogger("a test's"), nixl_agent=agent, nixl_agent_config=dict)
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nixl.importlib, "import_module", lambda name: api)
    for before in (None, "tcp"):
        monkeypatch.delenv("UCX_TLS", raising=False) if before is None else monkeypatch.setenv("UCX_TLS", before)
        nixl.new_agent("a name")
    assert told == [("UCX", {"engine_config": "TLS=^sm"}), ("UCX", {})]


def in_three_places(rank: int) -> list[tuple[str, TransportChoice]]:
    """One node; two nodes that are believed to have RDMA, where UCX takes TCP; the same, and rank 2 fails."""

    def refuse(*_: object) -> None:
        raise TransportError("the first bytes did not arrive")

    seen = []
    for node, devices, broken in ((0, [], False), (rank // 2, ["mlx5_0"], False), (rank // 2, ["mlx5_0"], True)):
        os.environ["GROUP_RANK"] = str(node)
        nixl.rdma_devices = lambda devices=devices: devices
        if broken:
            windows.try_out = refuse if rank == 2 else lambda *_: None
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
        transport, choice = choose_together(group, "gloo", CPU, 60.0)
        transport.warm_up(soon())
        exchange_with_all(rank, transport, range(3), [100, 0, 2 << 20])
        seen.append((type(transport).__name__, choice))
        transport.close()
    return seen


def test_all_ranks_choose_alike_and_fall_back_together() -> None:
    if nixl.why_not():
        pytest.skip(nixl.why_not())
    results = run_ranks(3, in_three_places)
    assert results[0] == results[1] == results[2]
    (one, chosen), (two, over_nixl), (back, at_last) = results[0]
    assert (one, two, back) == ("TorchPointToPoint", "Nixl", "TorchPointToPoint")
    assert chosen.name == "torch" and over_nixl.name == "nixl"
    assert at_last.name == "torch" and "nixl failed: the first bytes did not arrive" in at_last.why
