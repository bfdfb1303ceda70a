"""Megatron-Core's ``moe_permute_fusion`` and latent experts, with every home moved after each step: three experts a
token, 2 ranks that hold half of the experts each.

TransformerEngine's fused permutations have a stand-in, `fused_permutation_double`, and so has its linear layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import fused_permutation_double
import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import LENGTH, MICRO_BATCHES, SmallJob, assert_counted, assert_moved_without_a_change, both
from ranks import run_ranks
from torch import Tensor

pytestmark = jobs.long_megatron
FUSED = {"moe_permute_fusion": True}
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
    "latent experts": {"moe_latent_size": 16},
}
MAKE = {case: partial(SmallJob, moe_router_topk=3, **options) for case, options in CASES.items()}


class Linear(torch.nn.Linear):
    """TransformerEngine's of a whole weight on each rank; returns a bias beside."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **_: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)

    def forward(self, rows: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(rows), None


def prepare() -> None:
    jobs.prepare_small()
    import megatron.core.transformer.moe.moe_layer as moe_layer
    import megatron_cpu

    torch.arange = megatron_cpu._on_cpu(torch.arange)
    fused_permutation_double.use()
    moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def everything(rank: int) -> dict[str, Any]:
    prepare()
    results: dict[str, Any] = {case: both(make) for case, make in MAKE.items()}
    results["alone"] = MAKE["fused"]().train(range(1))
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", CASES)
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert_moved_without_a_change(results, case)
    if "moe_expert_capacity_factor" not in CASES[case]:
        assert_counted(results, case, 3 * MICRO_BATCHES * 2 * LENGTH)


def test_the_first_step_is_that_of_megatron_alone(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert of_rank["fused"]["moving"]["seen"][0] == pytest.approx(of_rank["alone"][0], rel=1e-5)
