"""``transport="auto"``: one choice for all ranks, and the way back to torch's."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import exchange_with_all, soon

from eplb_runtime.distributed.transports import nixl_agent, windows
from eplb_runtime.distributed.transports.automatic import TransportChoice, choose, choose_together, probe
from eplb_runtime.distributed.transports.base import TransportError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("nodes", "lacking", "name", "why"),
    [
        ("aaaa", {}, "cuda_ipc", "no nixl: one node"),
        ("aabb", {}, "nixl", "no cuda_ipc: several nodes"),
        ("aaaa", {"cuda_ipc": {2: "a CPU"}}, "torch", "no cuda_ipc: rank 2: a CPU; no nixl: one node"),
        ("aabb", {"nixl": {1: "no RDMA"}}, "torch", "no cuda_ipc: several nodes; no nixl: rank 1: no RDMA"),
    ],
)
def test_the_choice(nodes: str, lacking: dict[str, dict[int, str]], name: str, why: str) -> None:
    said = [{each: lacking.get(each, {}).get(rank, "") for each in ("cuda_ipc", "nixl")} for rank in range(4)]
    assert choose(nodes, said) == TransportChoice(name, why)


def test_every_transport_says_whether_it_can_be_used() -> None:
    found = {finding.name: finding for finding in probe(CPU)}
    assert set(found) == {"torch", "cuda_ipc", "nixl", "nvshmem", "deepep"}
    assert found["torch"].usable and all(finding.why for finding in found.values())
    assert "not on cpu" in found["cuda_ipc"].why


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("a_package_that_is_not_there",))
    assert "pip install" in nixl_agent.why_not()


def in_three_places(rank: int) -> list[tuple[str, TransportChoice]]:
    """One node; two nodes that are believed to have RDMA, where UCX takes TCP; the same, and rank 2 fails."""

    def refuse(*_: object) -> None:
        raise TransportError("the first bytes did not arrive")

    seen = []
    for node, devices, broken in ((0, [], False), (rank // 2, ["mlx5_0"], False), (rank // 2, ["mlx5_0"], True)):
        os.environ["GROUP_RANK"] = str(node)
        nixl_agent.rdma_devices = lambda devices=devices: devices
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
    if nixl_agent.why_not():
        pytest.skip(nixl_agent.why_not())
    results = run_ranks(3, in_three_places)
    assert results[0] == results[1] == results[2]
    (one, chosen), (two, over_nixl), (back, at_last) = results[0]
    assert (one, two, back) == ("TorchPointToPoint", "Nixl", "TorchPointToPoint")
    assert chosen.name == "torch" and over_nixl.name == "nixl"
    assert at_last.name == "torch" and "nixl failed: the first bytes did not arrive" in at_last.why
