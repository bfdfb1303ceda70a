"""A Megatron actor in bfloat16 whose weights, gradients and optimizer state are freed and loaded between steps by
verl's own functions, with a half of the state in host memory (HybridDeviceOptimizer): 2 ranks, EP 2, every home moved
after each step, the balancer suspended meanwhile. Jobs are those of `test_megatron_offload`.

On a CPU ``to("cpu")`` moves nothing, so verl's functions leave state where it is; weights and gradients they do free.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed: pip install {name}")
    for name in ("verl", "peft", "megatron")
]
CASES = ("masters, half in host memory", "precision-aware, half in host memory")
STEPS = 3


class Unpinned:
    """torch, whose memory cannot be pinned without a device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def empty(*size: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)


def verls() -> Any:
    from test_walks_of_frameworks import Answered

    importlib.import_module("transformers.trainer_pt_utils")
    sys.meta_path.append(Answered())
    functions = importlib.import_module("verl.utils.megatron_utils")
    functions.torch = Unpinned()
    functions.get_device_id = lambda: torch.device("cpu")
    functions.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)
    functions.get_global_memory_buffer = lambda: SimpleNamespace(buffer={})
    return functions


def trained(functions: Any, case: str, move: bool, phases: bool = True, forgets: bool = False) -> dict[str, Any]:
    import megatron_jobs as jobs
    import test_megatron_offload as offload

    job = offload.OffloadedJob(**offload.CASES[case])
    balancer = jobs.attached(job, move)
    if forgets:
        jobs.forget_state(balancer)
    seen, freed, exports = [], [], []
    for step in range(STEPS):
        seen += job.train(range(step, step + 1))
        exports.append(dict(balancer.named_logical_tensors()))
        if not phases:
            continue
        balancer.suspend()
        functions.offload_megatron_model_to_cpu(job.models)
        functions.offload_megatron_optimizer(job.optimizer)
        freed.append(balancer._why_freed())
        functions.load_megatron_model_to_gpu(job.models)
        functions.load_megatron_optimizer(job.optimizer)
        balancer.resume()
    found = {
        "seen": seen,
        "tensors": job.tensors(balancer.placement),
        "exports": exports,
        "freed": freed,
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
        "in host memory": job.in_host_memory(),
    }
    balancer.close()
    return found


def everything(rank: int) -> dict[str, Any]:
    import test_megatron_offload as offload

    offload.prepare()
    functions = verls()
    found: dict[str, Any] = {}
    for case in CASES:
        found[case, "static"] = trained(functions, case, move=False, phases=False)
        found[case, "moved"] = trained(functions, case, move=True)
    found["control"] = trained(functions, CASES[1], move=True, forgets=True)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def differing(one: dict[Any, torch.Tensor], other: dict[Any, torch.Tensor]) -> list[Any]:
    return [key for key in one.keys() & other.keys() if not torch.equal(one[key], other[key])]


def whole(results: list[dict[str, Any]], run: Any) -> dict[Any, torch.Tensor]:
    return {key: tensor for found in results for key, tensor in found[run]["tensors"].items()}


@pytest.mark.parametrize("case", CASES)
def test_what_verl_frees_and_loads_changes_no_bit_wherever_experts_are(
    results: list[dict[str, Any]], case: str
) -> None:
    static, moved = whole(results, (case, "static")), whole(results, (case, "moved"))
    assert static.keys() == moved.keys() and differing(static, moved) == []
    for found in results:
        static, moved = found[case, "static"], found[case, "moved"]
        assert moved["moved"] > 0 == static["moved"] and 0 < moved["in host memory"][0] < moved["in host memory"][1]
        assert all("memory is freed" in said for said in moved["freed"]) and len(moved["freed"]) == STEPS
        assert moved["seen"] == static["seen"]
        for one, other in zip(static["exports"], moved["exports"], strict=True):
            assert one.keys() == other.keys() and differing(one, other) == []
