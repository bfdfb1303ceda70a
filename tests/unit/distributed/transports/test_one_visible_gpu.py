"""Launchers may show each rank one GPU, which is cuda:0 on all of them: GPUs are compared by what they are."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eplb_runtime.distributed import node_memory
from eplb_runtime.distributed.node_memory import SHARING, NodeMemory
from eplb_runtime.tools import launch


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the GPUs that this process sees."""
    seen = ["GPU-a"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=seen[device.index]), raising=False
    )
    return seen


def test_the_only_gpu_that_a_rank_sees_is_its_own(gpus: list[str]) -> None:
    assert launch._gpu(3) == torch.device("cuda", 0)
    gpus.extend("bcd")
    assert launch._gpu(3) == torch.device("cuda", 3)
    with pytest.raises(launch.LaunchError, match="4 GPUs and a rank 4"):
        launch._gpu(4)
    gpus.clear()
    with pytest.raises(launch.LaunchError, match="0 GPUs"):
        launch._gpu(0)


@pytest.mark.parametrize(
    ("said", "refused"),
    [
        ([("node 0", "GPU-a"), ("node 0", "GPU-b")], ""),
        ([("node 0", "GPU-a"), ("node 0", "GPU-b"), ("node 0", "GPU-a")], "ranks 0 and 2 have the same GPU: start as"),
        ([("node 0", "GPU-a"), ("node 1", "GPU-a")], ""),
        ([("node 0", ""), ("node 0", "")], ""),
    ],
)
def test_ranks_that_share_a_gpu_are_refused_and_equal_numbers_are_not(
    monkeypatch: pytest.MonkeyPatch, said: list[tuple[str, str]], refused: str
) -> None:
    monkeypatch.setattr(launch, "gather_bytes", lambda *arguments: [json.dumps(one).encode() for one in said])
    monkeypatch.setattr(launch.dist.distributed_c10d, "_get_default_group", lambda: None)
    if not refused:
        launch.refuse_shared_gpus("GPU-a")
        return
    with pytest.raises(launch.LaunchError, match=refused) as error:
        launch.refuse_shared_gpus("GPU-a")
    assert "\n" not in str(error.value)


def test_torchs_refusal_of_gpus_of_one_number_says_what_to_set() -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDASymmetricMemoryAllocator::rendezvous: detected allocations from overlapping devices")

    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    package = SimpleNamespace(empty=torch.empty, rendezvous=refuse)
    memory = NodeMemory(group, torch.device("cpu"), 1.0, package)  # type: ignore[arg-type]
    memory.zeros((2,), torch.float32, torch.device("cpu"))
    with pytest.MonkeyPatch.context() as alone, pytest.raises(RuntimeError, match=f"overlapping .*set {SHARING}=1"):
        alone.setattr(node_memory, "gather_bytes", lambda word, *_: [word])
        memory.open()
