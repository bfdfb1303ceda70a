"""Torch's Muon on the experts of a Megatron-Core model, which are matrices of their own, with every home moved after
each step; AdamW steps what is no matrix. 2 ranks that hold half of the experts each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import test_megatron as bare
import torch
from flat_settings import config_from_settings
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.planner.shuffle import plan_shuffle

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)
STEPS, EXPERTS, LAYERS = 3, 8, 2


class OneNorm(torch.optim.Muon):
    """Scales its step by a norm over all that it steps."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            parameter.grad /= norm
        super().step()


def made(move: bool, kind: type[torch.optim.Muon] = torch.optim.Muon) -> tuple[Any, list[Any], eplb.Balancer]:
    model = bare.example().model_of(bf16=False, moe_router_topk=3)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embedding" not in name]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    optimizers = [kind(matrices, lr=1e-2, nesterov=True), torch.optim.AdamW(others, lr=1e-2)]
    settings = config_from_settings({**vars(bare.config(move)), "dense_gradients": "allreduce"})
    balancer = eplb.attach(model, optimizers, config=settings)
    if move:
        balancer._wait_until_compiled()
        balancer._plan_with(plan_shuffle)
    return model, optimizers, balancer


def tensors(model: Any, muon: torch.optim.Optimizer, placement: eplb.Placement, rank: int) -> dict[Any, Tensor]:
    """Weights and momentum of this rank's experts by layer and logical number, and all other weights."""
    found: dict[Any, Tensor] = {}
    for layer, block in enumerate(model.decoder.layers):
        for slot, expert in enumerate(block.mlp.experts.local_experts, start=rank * EXPERTS // 2):
            number = int(placement.physical_to_logical[layer, slot])
            for name, parameter in expert.named_parameters():
                found[(layer, number, name, "weight")] = parameter
                found[(layer, number, name, "momentum")] = muon.state[parameter]["momentum_buffer"]
    found |= {name: tensor for name, tensor in model.named_parameters() if ".experts." not in name}
    return {key: tensor.detach().clone() for key, tensor in found.items()}


def trained(rank: int, move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None) -> dict[str, Any]:
    model, optimizers, balancer = made(move)
    spoil(balancer)
    seen = []
    for step in range(STEPS):
        loss = bare.example().loss_of(model, step)
        loss.backward()
        norm = balancer.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen.append((loss.item(), norm.item()))
    result = {
        "seen": seen,
        "tensors": tensors(model, optimizers[0], balancer.placement, rank),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def everything(rank: int) -> dict[str, Any]:
    bare.example()
    with pytest.raises(AttachError) as error:
        made(False, OneNorm)
    return {
        "static": trained(rank, move=False),
        "moving": trained(rank, move=True),
        "control": trained(rank, move=True, spoil=bare.forget_state),
        "said": str(error.value),
    }


def whole(of_ranks: list[dict[str, Any]], which: str) -> dict[Any, Tensor]:
    found: dict[Any, Tensor] = {}
    for of_rank in of_ranks:
        for key, tensor in of_rank[which]["tensors"].items():
            assert torch.equal(found.setdefault(key, tensor), tensor), key
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def test_moving_experts_changes_no_bit(results: list[dict[str, Any]]) -> None:
    static, moving, control = (whole(results, which) for which in ("static", "moving", "control"))
    for of_rank in results:
        assert of_rank["moving"]["seen"] == of_rank["static"]["seen"]
        assert of_rank["static"]["moved"] == 0 < of_rank["moving"]["moved"]
    experts = [key for key in static if isinstance(key, tuple)]
    print(f"{len(experts)} expert tensors, {len(static)} in all, {results[0]['moving']['moved']} moves")
    assert {key[:2] for key in experts} == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
    assert static.keys() == moving.keys() == control.keys()
    assert [key for key in static if not torch.equal(static[key], moving[key])] == []
    assert [key for key in static if not torch.equal(static[key], control[key])] != []


def test_a_norm_over_all_experts_of_a_rank_is_refused(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "OneNorm mixes the experts of a rank" in of_rank["said"]
