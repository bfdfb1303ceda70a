"""What gives torchtitan's own dispatchers slots in the place of experts, and what looks at them before: without
torchtitan, on layers of the same form over HybridEP's buffer of `titan_dispatch_double`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from titan_dispatch_double import HybridEPBuffer, indices_to_map
from torch import Tensor, nn

from eplb_runtime.hosts.torchtitan.dispatchers import MADE_IN, forward_by_slots, why_not_renamed
from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.load.expert_clock import ExpertClock
from eplb_runtime.moe.layer import HostDispatchedLayer
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.placement import Placement

RANKS, EXPERTS, TOP_K, TOKENS, WIDTH = 2, 8, 2, 24, 16
HOME = np.arange(EXPERTS, dtype=np.int32)[None]
MOVED = np.array([[5, 0, 7, 2, 1, 6, 3, 4]], dtype=np.int32)
"""The expert in each slot."""


class HybridEPTokenDispatcher:
    """Of torchtitan's form: what `dispatch` takes and gives, and where the buffer's own calls are."""

    __module__ = MADE_IN
    num_experts, top_k, num_max_tokens_per_rank = EXPERTS, TOP_K, 64

    def __init__(self) -> None:
        group = dist.group.WORLD
        self.ep_mesh = SimpleNamespace(get_group=lambda: group)
        self.buffer = HybridEPBuffer(group, WIDTH, 64, EXPERTS // RANKS)

    def dispatch(
        self, x_TD: Tensor, topk_scores_TK: Tensor, topk_expert_ids_TK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> tuple[Tensor, Tensor, Any]:
        assert num_local_tokens_per_expert_E.equal(topk_expert_ids_TK.flatten().bincount(minlength=EXPERTS))
        rows, weights, counts, handle = There.apply(x_TD, topk_scores_TK, self.buffer, topk_expert_ids_TK)
        return rows, counts, (handle, weights)

    def combine(self, out: Tensor, metadata: Any, x: Tensor) -> Tensor:
        handle, weights = metadata
        return Back.apply(out * weights[:, None].to(out.dtype), self.buffer, handle)


class There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, buffer: Any, ids: Tensor) -> Any:
        ctx.buffer, ctx.ids = buffer, ids
        routing, probs = indices_to_map(ids, scores, len(x), EXPERTS)
        rows, weights, _, counts, ctx.handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing, probs=probs, num_of_experts_per_rank=EXPERTS // RANKS
        )
        return rows, weights, counts, ctx.handle

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, of_weights: Tensor, *_: Any) -> Any:  # type: ignore[override]
        gradient, dense = ctx.buffer.combine_with_unpermute(hidden=of_rows, probs=of_weights, handle=ctx.handle)
        return gradient, dense.gather(1, ctx.ids), None, None


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        rows, *_ = ctx.buffer.dispatch_with_permute(hidden=gradient.contiguous(), handle=ctx.handle)
        return rows, None, None


class Routed(nn.Module):
    """Of the form of torchtitan's `RoutedExperts`, with these experts in the slots of this rank."""

    def __init__(self, experts: list[int]) -> None:
        super().__init__()
        self.token_dispatcher = HybridEPTokenDispatcher()
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
        self.weights = nn.ParameterList(whole[expert].clone() for expert in experts)

    def inner_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows[: int(counts.sum())].split(counts.tolist())
        return torch.cat([*(part @ weight for part, weight in zip(parts, self.weights, strict=True))])

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        x_TD, scores, ids = (one.flatten(0, 1) for one in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
        rows, counts, metadata = self.token_dispatcher.dispatch(x_TD, scores, ids, num_local_tokens_per_expert_E)
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x_TD).view_as(x_BLD)


def computed(slots: np.ndarray, sampled: bool, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Result, gradients by logical expert, and load, where experts stand so."""
    here, device = slots[0].reshape(RANKS, -1)[dist.get_rank()].tolist(), torch.device("cpu")
    routed = Routed(here)
    layer = HostDispatchedLayer(
        0,
        routed,
        counter=LoadCounter(1, EXPERTS, 1, device),
        table=SlotTable(Placement(slots, EXPERTS, RANKS, slots.argsort(axis=1).astype(np.int32)), device),
        forward_tag=SimpleNamespace(enter=lambda *said: None),  # type: ignore[arg-type]
        expert_clock=ExpertClock(),
    )
    if sampled:
        layer.expert_clock.begin_step()
    hidden, scores, ids = (one.clone() for one in batch)
    counts = ids.flatten().bincount(minlength=EXPERTS)
    out = forward_by_slots(routed, layer, routed.forward, hidden.requires_grad_(), scores.requires_grad_(), ids, counts)
    (out.float() ** 2).sum().backward()
    layer.expert_clock.end_step()
    return {
        "tensors": (out.detach(), hidden.grad, scores.grad),
        "of experts": {expert: weight.grad for expert, weight in zip(here, routed.weights, strict=True)},
        "counted": layer._counter.counts[0].equal(counts) and layer.calls == 1,
        "sampled": len(layer.expert_clock._steps),
        "said": [why_not_renamed("layer", routed, backend) for backend in ("hybridep", "minimal_async_ep")],
    }


def everything(rank: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).bfloat16()
    scores = torch.rand(2, TOKENS // 2, TOP_K, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    return [computed(slots, slots is MOVED, (hidden, scores, ids.view(2, -1, TOP_K))) for slots in (HOME, MOVED)]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_ranks(RANKS, everything)


def test_no_bit_follows_the_place_of_an_expert(ranks: list[list[dict[str, Any]]]) -> None:
    of_experts: list[dict[int, Tensor]] = [{}, {}]
    for home, moved in ranks:
        assert all(map(torch.equal, home["tensors"], moved["tensors"]))
        for gradients, one in zip(of_experts, (home, moved), strict=True):
            gradients |= one["of experts"]
    assert of_experts[0].keys() == of_experts[1].keys() == set(range(EXPERTS))
    assert all(torch.equal(of_experts[0][expert], of_experts[1][expert]) for expert in range(EXPERTS))


def test_load_is_counted_by_logical_expert_and_work_is_marked(ranks: list[list[dict[str, Any]]]) -> None:
    for of_rank in ranks:
        assert [(found["counted"], found["sampled"]) for found in of_rank] == [(True, 0), (True, 1)]


def test_a_dispatcher_as_it_is_known_passes_and_another_is_named_in_a_line(ranks: list[list[dict[str, Any]]]) -> None:
    for found in (found for of_rank in ranks for found in of_rank):
        known, other = found["said"]
        assert known == "" and "the model's config says minimal_async_ep" in other
