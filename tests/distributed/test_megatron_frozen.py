"""Megatron-Core jobs that train adapters of attention alone, as Megatron-Bridge's LoRA for ``linear_qkv`` and
``linear_proj`` does: frozen experts move after each step. 4 ranks, EP 2, of which 2 hold the same experts.

Bridge needs TransformerEngine, so adapters are put in here, ahead of Megatron's DistributedDataParallel as by Bridge.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import torch
from megatron_jobs import SmallJob, assert_moved_without_a_change, both, differing, whole
from ranks import run_ranks
from torch import Tensor, nn

pytestmark = jobs.long_megatron
RANK = 4
CASES: dict[str, dict[str, Any]] = {
    "distributed optimizer": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer of float16": {"distributed": False},
}


class AdaptedJob(SmallJob):
    """Only adapters of attention are trained."""

    def _chunk(self, number: int, chunks: int, ddp: Any, share: bool) -> Any:
        from megatron.core.models.gpt import GPTModel

        own = GPTModel.__init__

        def init(model: Any, *args: Any, **kwargs: Any) -> None:
            own(model, *args, **kwargs)
            adapt(model)

        GPTModel.__init__ = init
        try:
            return super()._chunk(number, chunks, ddp, share)
        finally:
            GPTModel.__init__ = own


def adapt(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for name, part in list(model.named_modules()):
        if name.endswith(("linear_qkv", "linear_proj")):
            out, into = part.weight.shape
            part.linear_in = nn.Parameter(torch.randn(RANK, into, generator=generator).to(part.weight.dtype))
            part.linear_out = nn.Parameter(torch.zeros(out, RANK, dtype=part.weight.dtype))
            part.forward = adapted(part, part.forward)


def adapted(part: nn.Module, own: Callable[..., Any]) -> Callable[..., Any]:
    def forward(rows: Tensor, *args: Any, **kwargs: Any) -> Any:
        result, bias = own(rows, *args, **kwargs)
        return result + (rows @ part.linear_in.T) @ part.linear_out.T, bias

    return forward


def everything(rank: int) -> dict[str, Any]:
    jobs.prepare_small()
    results: dict[str, Any] = {}
    for case, options in CASES.items():
        make = partial(AdaptedJob, moe_router_topk=3, **options)
        results[case] = {**both(make), "before": {"tensors": make().tensors(None)}}
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("case", CASES)
def test_frozen_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) == {"weight"}
    before, after = (whole([of_rank[case][when] for of_rank in results]) for when in ("before", "static"))
    changed = differing(before, after)
    assert changed and all(key[0] == "dense" and "linear_" in key[2] for key in changed), "adapters alone are trained"
