"""The loop of `test_megatron_actor` as verl runs it: an actor in bfloat16 on 2 pipeline stages x 2 expert-parallel
ranks, with half of the optimizer's state in host memory (HybridDeviceOptimizer, precision-aware), freed and loaded
around each rollout by verl's own functions. Fixed and balanced, to the bit.

What is on a device is made up, as in `test_megatron_offload`; what verl's functions do here, `test_verl_offload` says.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import test_megatron_actor as actor
import torch
from ranks import run_ranks
from torch import Tensor

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed: pip install {name}")
    for name in ("verl", "peft", "megatron")
]
OFFLOADED = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 0.5,
    "use_precision_aware_optimizer": True,
    "pin_cpu_grads": False,
}


class VerlPhases:
    """verl's functions around a rollout."""

    def __init__(self, functions: Any, model: Any, optimizer: Any) -> None:
        self._functions, self._model, self._optimizer = functions, model, optimizer

    def free(self) -> None:
        self._functions.offload_megatron_model_to_cpu([self._model])
        self._functions.offload_megatron_optimizer(self._optimizer)

    def load(self) -> None:
        self._functions.load_megatron_model_to_gpu([self._model])
        self._functions.load_megatron_optimizer(self._optimizer)


def everything(rank: int) -> dict[str, Any]:
    import megatron_jobs as jobs
    import test_megatron_offload as offload
    from megatron.core.optimizer import optimizer_config
    from test_verl_offload import verls

    jobs.prepare(pipeline_model_parallel_size=2)
    optimizer_config.is_te_min_version = lambda *_: True  # it compares the version of a TransformerEngine that is none
    offload.FakeDevice().install()
    functions = verls()
    options = {
        "phases_of": lambda model, optimizer: VerlPhases(functions, model, optimizer),
        "bf16": True,
        "stepped": OFFLOADED,
    }
    return {
        "static": actor.loop("static", **options),
        "balanced": actor.loop("incremental", **options),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


def whole(results: list[dict[str, Any]], run: str) -> dict[Any, Tensor]:
    return {key: tensor for found in results for key, tensor in found[run]["tensors"].items()}


def test_the_whole_loop_gives_the_same_bits_wherever_experts_are(results: list[dict[str, Any]]) -> None:
    for found in results:
        static, balanced = found["static"], found["balanced"]
        assert static["moved"] == 0 < balanced["moved"] and min(balanced["freed"]) > 0
        assert all(map(torch.equal, static["tokens"], balanced["tokens"])), "rollouts"
        assert static["seen"] == balanced["seen"] and static["exports"] == balanced["exports"]
        assert "are equal to the model's" in balanced["checked"]
    static, balanced = whole(results, "static"), whole(results, "balanced")
    assert static.keys() == balanced.keys() and len(static) > 100
    assert [key for key in static if not torch.equal(static[key], balanced[key])] == []
