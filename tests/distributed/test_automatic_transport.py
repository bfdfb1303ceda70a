"""``transport="auto"``: one choice for all ranks, the carrier of each pair of ranks, and the way back to torch's."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import exchange_with_all, soon

from eplb_runtime.distributed.transports import neighbours, nixl_agent
from eplb_runtime.distributed.transports.automatic import Automatic, Mixed, TransportChoice, choose, probe, why_not_each
from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.distributed.transports.shm import SharedMemory
from eplb_runtime.distributed.transports.torch_p2p import TorchPointToPoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("nodes", "lacking", "within", "across", "why"),
    [
        ("aaaa", {}, "shm", "torch", "no nixl: one node"),
        ("aabb", {}, "shm", "nixl", ""),
        ("abcd", {}, "torch", "nixl", "no shm: each rank has a node of its own"),
        ("aabb", {"nixl": {1: "no RDMA"}}, "shm", "torch", "no nixl: rank 1: no RDMA"),
        ("aabb", {"shm": {3: "no memfd"}, "nixl": {0: "not installed"}}, "torch", "torch", "no shm: rank 3: no memfd"),
        (
            "aabb",
            {"shm": {0: "a GPU"}, "cuda_ipc": {}, "nixl": {0: "a GPU"}},
            "cuda_ipc",
            "torch",
            "no shm: rank 0: a GPU",
        ),
        (
            "abcd",
            {"shm": {0: "a GPU"}, "cuda_ipc": {}},
            "torch",
            "nixl",
            "no cuda_ipc: each rank has a node of its own",
        ),
    ],
)
def test_the_choice(nodes: str, lacking: dict[str, dict[int, str]], within: str, across: str, why: str) -> None:
    lacking = {"cuda_ipc": dict.fromkeys(range(4), "a CPU"), **lacking}
    said = [{name: lacking.get(name, {}).get(rank, "") for name in ("shm", "cuda_ipc", "nixl")} for rank in range(4)]
    choice = choose(nodes, said)
    assert (choice.within, choice.across) == (within, across)
    assert why in choice.why and bool(why) == bool(choice.why)


def test_every_transport_says_whether_it_can_be_used() -> None:
    found = {finding.name: finding for finding in probe(CPU)}
    assert set(found) == {"torch", "shm", "cuda_ipc", "nixl", "nvshmem", "deepep"}
    assert found["torch"].usable and found["shm"].usable and all(finding.why for finding in found.values())
    on_gpu = {finding.name: finding for finding in probe(torch.device("cuda"))}
    assert on_gpu["torch"].usable and not on_gpu["shm"].usable
    assert "not on cuda" in on_gpu["shm"].why
    assert on_gpu["cuda_ipc"].usable and "not on cpu" in found["cuda_ipc"].why


def test_memory_of_gpus_is_read_only_where_messages_to_other_nodes_are_on_gpus_too() -> None:
    assert why_not_each(torch.device("cuda"), "nccl")["cuda_ipc"] == ""
    assert "gloo carries through host memory" in why_not_each(torch.device("cuda"), "gloo")["cuda_ipc"]


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "PACKAGES", ("a_package_that_is_not_there",))
    assert "pip install" in nixl_agent.why_not()


def warmed_up() -> Automatic:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    transport = Automatic(group, "gloo", CPU, 60.0)
    transport.warm_up(soon())
    return transport


def in_three_places(rank: int) -> list[tuple[str, TransportChoice | None]]:
    """One node; two nodes; one node where rank 2 cannot open the others' memory."""

    def refuse(*_: object) -> None:
        raise TransportError("another container")

    seen = []
    for node, broken in ((0, False), (rank // 2, False), (0, rank == 2)):
        os.environ["GROUP_RANK"] = str(node)
        if broken:
            neighbours.neighbour_of = refuse
        transport = warmed_up()
        exchange_with_all(rank, transport, range(3), [100, 0, 2 << 20])
        seen.append((type(transport._inner).__name__, transport.choice))
        transport.close()
    return seen


def test_all_ranks_choose_alike_and_fall_back_together() -> None:
    results = run_ranks(3, in_three_places)
    assert results[0] == results[1] == results[2]
    (one, chosen), (two, _), (back, at_last) = results[0]
    assert (one, two, back) == (SharedMemory.__name__, Mixed.__name__, TorchPointToPoint.__name__)
    assert chosen is not None and chosen.within == "shm"
    assert at_last is not None and at_last.within == "torch" and "EP rank 2: another container" in at_last.why


def over_nixl(rank: int) -> tuple[str, str]:
    """Two nodes that are believed to have RDMA: UCX takes TCP."""
    os.environ["GROUP_RANK"] = str(rank // 2)
    nixl_agent.rdma_devices = lambda: ["mlx5_0"]
    transport = warmed_up()
    exchange_with_all(rank, transport, range(3), [100, 0, 2 << 20])
    transport.close()
    assert transport.choice is not None
    return transport.choice.within, transport.choice.across


def test_nixl_across_nodes_and_shared_memory_within() -> None:
    if nixl_agent.why_not():
        pytest.skip(nixl_agent.why_not())
    assert run_ranks(3, over_nixl) == [("shm", "nixl")] * 3
