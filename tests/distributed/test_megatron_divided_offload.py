"""Megatron-Core's distributed optimizer over several ranks that hold the same experts, with state in host memory: 4
ranks, EP 2 x EDP 2, with every home moved after each step.

What is on a device is made up, as in `test_megatron_offload`.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import test_megatron_divided as divided
import test_megatron_offload as offload
import torch
from ranks import run_ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
EXPERTS, LAYERS = 6, 1
CASES: dict[str, dict[str, Any]] = {
    "masters, half in host memory": {"fraction": 0.5},
    "precision-aware, half in host memory": {"fraction": 0.5, **offload.AWARE},
    "precision-aware, all in host memory": {"fraction": 1.0, "overlap": True, **offload.AWARE},
}
HALF = "masters, half in host memory"


def model() -> dict[str, Any]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return {
        "spec": get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False, normalization="LayerNorm"),
        "num_layers": LAYERS,
        "hidden_size": 32,
        "ffn_hidden_size": 32,
        "moe_ffn_hidden_size": 40,
        "num_moe_experts": EXPERTS,
    }


class Leaf:
    """An optimizer of experts, with all that Megatron's objects have of what it steps here."""

    def __init__(self, job: offload.Job) -> None:
        (self._leaf,) = [
            leaf
            for leaf in job.optimizer.chained_optimizers
            if all(group["is_expert_parallel"] for group in leaf.optimizer.param_groups)
        ]
        self.model_param_group_index_map = self._leaf.model_param_group_index_map
        self._get_model_param_range_map = self._leaf._get_model_param_range_map
        self._job = job

    def _get_main_param_and_optimizer_states(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = self._job.kept(parameter)
        del kept["weight"]
        return kept


def trained(case: str, move: bool, spoiled: bool = False) -> dict[str, Any]:
    from megatron.core import parallel_state

    job = offload.Job(**CASES[case], model=model())
    balancer = offload.attached(job, move)
    if spoiled:
        offload.finding(offload.only_inner_moves)(balancer)
    seen = job.train(range(offload.STEPS))
    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
    dense = {
        ("dense", name): tensor
        for name, tensor in [*job.model.named_parameters(), *job.model.named_buffers()]
        if ".experts." not in name and torch.is_tensor(tensor)
    }
    result = {
        "seen": seen,
        "tensors": divided.tensors_of(
            dict(enumerate(offload.layers_of(job.model))), dense, [Leaf(job)], first, balancer.placement
        ),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def everything(rank: int, _: str = "") -> dict[str, Any]:
    offload.prepare()
    torch.cuda.is_current_stream_capturing = lambda: False  # asked of parameters that are said to be on a device
    results: dict[str, Any] = {
        case: {"static": trained(case, move=False), "moving": trained(case, move=True)} for case in CASES
    }
    results["control"] = trained(HALF, move=True, spoiled=True)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("case", CASES)
def test_divided_experts_with_state_in_host_memory_move_and_no_bit_changes(
    results: list[dict[str, Any]], case: str
) -> None:
    static = divided.whole([of_rank[case]["static"] for of_rank in results])
    moving = divided.whole([of_rank[case]["moving"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
    experts = [key for key in static if key[0] != "dense"]
    moved = results[0][case]["moving"]["moved"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert len(experts) == LAYERS * EXPERTS * 2 * 6
    assert results[0][case]["static"]["moved"] == 0 < moved
    assert divided.differing(static, moving) == []


def test_control_copies_in_other_memory_that_stay_show(results: list[dict[str, Any]]) -> None:
    static = divided.whole([of_rank[HALF]["static"] for of_rank in results])
    assert divided.differing(static, divided.whole([of_rank["control"] for of_rank in results])) != []
