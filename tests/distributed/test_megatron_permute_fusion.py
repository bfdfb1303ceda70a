"""Megatron-Core's ``moe_permute_fusion`` and latent experts, with every home moved after each step: three experts a
token, 2 ranks that hold half of the experts each.

TransformerEngine's fused permutations have a stand-in, `fused_permutation_double`, and so has its linear layer.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import fused_permutation_double
import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import forget_state
from ranks import run_ranks
from test_megatron_parallelisms import SmallJob
from torch import Tensor

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
FUSED = {"moe_permute_fusion": True, "moe_router_topk": 3}
CASES: dict[str, dict[str, Any]] = {
    "fused": {**FUSED, "bf16": False},  # sums in float32 of numbers in bfloat16 seldom show their order
    "fused, tokens over the capacity dropped, full recompute": {
        **FUSED,
        "moe_expert_capacity_factor": 1.0,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "distributed": False,
    },
    "fused, overlapped shared experts": {
        **FUSED,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_overlap": True,
    },
    "latent experts": {"moe_latent_size": 16, "moe_router_topk": 3},
}


class Linear(torch.nn.Linear):
    """TransformerEngine's of a whole weight on each rank; returns a bias beside."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(rows), None


def prepare() -> None:
    parallelisms.prepare()
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def in_order_of_slots() -> Callable[[], None]:
    """Undo what puts rows in logical order; returns how to end it."""
    from eplb_runtime.hosts.megatron import layer

    own, layer.reorders = layer.reorders, lambda config: False

    def end() -> None:
        layer.reorders = own

    return end


def everything(rank: int) -> dict[str, Any]:
    prepare()
    parallelisms.CASES.update(CASES)
    results: dict[str, Any] = {"rank": rank}
    for case in CASES:
        results[case] = {
            "static": parallelisms.trained(case, move=False),
            "moving": parallelisms.trained(case, move=True),
            "control": parallelisms.trained(case, move=True, spoil=forget_state),
        }
    end = in_order_of_slots()
    results["order of slots"] = parallelisms.trained("fused", move=True)
    end()
    results["alone"] = SmallJob(**CASES["fused"]).train(range(1))
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    parallelisms.assert_moved_without_a_change(results, case)


def test_control_sums_in_the_order_of_slots_show(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["order of slots"]["seen"] != of_rank["fused"]["static"]["seen"]


def test_each_choice_is_counted_once(results: list[dict[str, Any]]) -> None:
    parallelisms.assert_counted(results, "fused")
    parallelisms.assert_counted(results, "latent experts")


def test_the_first_step_is_that_of_megatron_alone(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["fused"]["moving"]["seen"][0] == pytest.approx(of_rank["alone"][0], rel=1e-5)
