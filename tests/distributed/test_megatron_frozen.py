"""Megatron-Core jobs that train adapters of attention alone, as Megatron-Bridge's LoRA for ``linear_qkv`` and
``linear_proj`` does: frozen experts move after each step. 4 ranks, EP 2, of which 2 hold the same experts.

Bridge needs TransformerEngine, so adapters are put in here, ahead of Megatron's DistributedDataParallel as by Bridge.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import test_megatron_parallelisms as parallelisms
import torch
from megatron_jobs import EXPERTS, attached, differing, whole
from ranks import run_ranks
from test_megatron_parallelisms import LAYERS, STEPS, SmallJob
from torch import Tensor, nn

import eplb_runtime as eplb

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
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

    def tensors(self, placement: eplb.Placement | None) -> dict[Any, Tensor]:
        from megatron.core import parallel_state

        if self.models[0].ddp_config.overlap_param_gather:
            self.models[0].start_param_sync(force_sync=True)
        first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
        found: dict[Any, Tensor] = {}
        for row, module in enumerate(part for part in self.models[0].modules() if type(part).__name__ == "MoELayer"):
            for slot, expert in enumerate(module.experts.local_experts, start=first):
                number = slot if placement is None else int(placement.physical_to_logical[row, slot])
                for name, parameter in expert.named_parameters():
                    assert not parameter.requires_grad
                    found[(row, number, name, "weight")] = parameter
        found |= self.dense()
        return {key: tensor.detach().clone() for key, tensor in found.items() if torch.is_tensor(tensor)}


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


def forget_columns(balancer: eplb.Balancer) -> None:
    """Tokens go where experts once stood."""
    for layer in balancer._runtime.layers:
        stale = {"logical_of_slots": lambda *_: torch.arange(EXPERTS), "epoch": 0, "changes_L": [0] * LAYERS}
        layer._table = type("", (), stale)()


def trained(case: str, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    job = AdaptedJob(moe_router_topk=3, **CASES[case])
    balancer = attached(job, move)
    spoil(balancer)
    before = job.tensors(balancer.placement)
    result = {
        "seen": job.train(range(STEPS)),
        "before": {"tensors": before},
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def everything(rank: int) -> dict[str, Any]:
    parallelisms.prepare()
    results: dict[str, Any] = {
        case: {"static": trained(case, move=False), "moving": trained(case, move=True)} for case in CASES
    }
    results["columns stay"] = trained("optimizer of float16", move=True, spoil=forget_columns)
    return results


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("case", CASES)
def test_frozen_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static, moving = ([of_rank[case][which] for of_rank in results] for which in ("static", "moving"))
    assert [one["seen"] for one in static] == [one["seen"] for one in moving]
    assert static[0]["moved"] == 0 < moving[0]["moved"]
    all_static = whole(static)
    assert {key[:2] for key in all_static if key[0] != "dense"} == {
        (layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)
    }
    assert differing(all_static, whole(moving)) == []
    changed = differing(whole([one["before"] for one in static]), all_static)
    assert changed and all(key[0] == "dense" and "linear_" in key[2] for key in changed), "adapters alone are trained"


def test_control_tokens_that_go_where_experts_were_show(results: list[dict[str, Any]]) -> None:
    assert results[0]["columns stay"]["seen"] != results[0]["optimizer of float16"]["static"]["seen"]
