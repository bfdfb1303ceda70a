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


def meet(monkeypatch: pytest.MonkeyPatch, others: tuple[int, str], shares: bool) -> None:
    """Ranks of one node meet, as far as they get without torch's symmetric memory."""

    def gather(word: bytes, group: Any, device: Any, deadline: float) -> list[bytes]:
        node, pad, _, _, shares = json.loads(word)
        return [word, json.dumps([node, pad, *others, shares]).encode()]

    class Package:
        def get_signal_pad_size(self) -> int:
            return 0  # too small: refused, after GPUs were compared

    memory = NodeMemory.__new__(NodeMemory)
    memory.size, memory._package, memory._group = 2, Package(), None  # type: ignore[assignment]
    memory._device, memory._group_device = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(node_memory, "gather_bytes", gather)
    monkeypatch.setattr(node_memory, "launcher_environment", lambda: {SHARING: "1"} if shares else {})
    memory.connect(0.0)


def test_symmetric_memory_takes_two_gpus_of_one_number_for_one_unless_it_is_told(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    room = "signal pad has room for 0 signals"
    for others, shares, said in (
        ((0, "GPU-b"), False, f"a GPU of its own, and several call theirs .* or set {SHARING}=1 on all"),
        ((0, "GPU-b"), True, room),
        ((1, "GPU-b"), False, room),
        ((0, "GPU-a"), False, "ranks of one node share a GPU"),
        ((0, "GPU-a"), True, room),
    ):
        with pytest.raises(RuntimeError, match=said) as error:
            meet(monkeypatch, others, shares)
        assert "\n" not in str(error.value)
