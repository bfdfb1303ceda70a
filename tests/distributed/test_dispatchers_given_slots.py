"""What gives torchtitan's own dispatchers slots in the place of experts, and what looks at them before: without
torchtitan, on layers of the same form over the buffers of `titan_dispatch_double`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from titan_dispatch_double import ElasticBuffer, HybridEPBuffer, indices_to_map
from torch import Tensor, nn

from eplb_runtime.hosts.torchtitan.dispatchers import (
    MADE_IN,
    forward_by_slots,
    why_not_renamed,
)
from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.load.expert_clock import ExpertClock
from eplb_runtime.moe.layer import HostDispatchedLayer
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.placement import Placement

RANKS, EXPERTS, TOP_K, TOKENS, WIDTH = 2, 8, 2, 24, 16
MOVED = np.array([[5, 0, 7, 2, 1, 6, 3, 4]], dtype=np.int32)
"""The expert in each slot."""


class Dispatcher:
    """Of torchtitan's form: what `dispatch` takes and gives, and where the buffer's own calls are."""

    __module__ = MADE_IN
    num_experts, top_k, num_max_tokens_per_rank = EXPERTS, TOP_K, 64

    def __init__(self) -> None:
        group = dist.group.WORLD
        self.ep_mesh = SimpleNamespace(get_group=lambda: group)
        self.buffer = self.made(group)

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        assert num_local_tokens_per_expert_E.equal(topk_expert_ids_TK.flatten().bincount(minlength=EXPERTS))
        return self.sent(x_TD, topk_scores_TK, topk_expert_ids_TK)

    def made(self, group: Any) -> Any: ...

    def sent(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Any]: ...


class DeepEPTokenDispatcher(Dispatcher):
    __module__ = MADE_IN

    def made(self, group: Any) -> Any:
        return ElasticBuffer(group, 1, 64, WIDTH, TOP_K, deterministic=True, explicitly_destroy=True)

    def sent(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows, chosen, weights, handle = _There.apply(x, scores, self.buffer, ids)
        token, column = (chosen >= 0).nonzero(as_tuple=True)
        order = chosen[token, column].argsort(stable=True)
        token, column = token[order], column[order]
        counts = torch.tensor(handle.num_recv_tokens_per_expert_list)
        return rows[token], counts, (handle, token, weights[token, column], len(rows))

    def combine(self, out: Tensor, metadata: Any, x: Tensor) -> Tensor:
        handle, token, weights, count = metadata
        summed = torch.zeros(count, WIDTH, dtype=out.dtype).index_add(0, token, out * weights[:, None].to(out.dtype))
        return _Back.apply(summed, self.buffer, handle)


class HybridEPTokenDispatcher(Dispatcher):
    __module__ = MADE_IN

    def made(self, group: Any) -> Any:
        return HybridEPBuffer(group, WIDTH, 64, EXPERTS // RANKS)

    def sent(self, x: Tensor, scores: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows, weights, counts, handle = _There.apply(x, scores, self.buffer, ids)
        return rows, counts, (handle, weights)

    def combine(self, out: Tensor, metadata: Any, x: Tensor) -> Tensor:
        handle, weights = metadata
        return _Back.apply(out * weights[:, None].to(out.dtype), self.buffer, handle)


class _There(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scores: Tensor, buffer: Any, ids: Tensor) -> Any:
        ctx.buffer, ctx.ids = buffer, ids
        if isinstance(buffer, ElasticBuffer):
            rows, chosen, weights, ctx.handle, _ = buffer.dispatch(
                x, ids, scores, EXPERTS, len(x), num_sms=24, do_cpu_sync=True
            )
            return rows, chosen, weights, ctx.handle
        routing, probs = indices_to_map(ids, scores, len(x), EXPERTS)
        rows, weights, _, counts, ctx.handle = buffer.dispatch_with_permute(
            hidden=x, routing_map=routing, probs=probs, num_of_experts_per_rank=EXPERTS // RANKS
        )
        return rows, weights, counts, ctx.handle

    @staticmethod
    def backward(ctx: Any, of_rows: Tensor, *more: Any) -> Any:  # type: ignore[override]
        if isinstance(ctx.buffer, ElasticBuffer):
            gradient, of_scores, _ = ctx.buffer.combine(of_rows, ctx.handle, more[1])
            return gradient, of_scores, None, None
        gradient, dense = ctx.buffer.combine_with_unpermute(hidden=of_rows, probs=more[0], handle=ctx.handle)
        return gradient, dense.gather(1, ctx.ids), None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        if isinstance(buffer, ElasticBuffer):
            combined, _, event = buffer.combine(rows, handle, async_with_compute_stream=True)
            event.current_stream_wait()
            return combined
        return buffer.combine_with_unpermute(hidden=rows, handle=handle)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        if isinstance(ctx.buffer, ElasticBuffer):
            rows, *_ = ctx.buffer.dispatch(gradient.contiguous(), handle=ctx.handle, num_sms=24, do_cpu_sync=False)
        else:
            rows, *_ = ctx.buffer.dispatch_with_permute(hidden=gradient.contiguous(), handle=ctx.handle)
        return rows, None, None


class Routed(nn.Module):
    """Of the form of torchtitan's `RoutedExperts`, with the experts in these slots.

    Args:
        experts: of this rank, in the order of its slots.
    """

    def __init__(self, dispatcher: Dispatcher, experts: list[int]) -> None:
        super().__init__()
        self.token_dispatcher = dispatcher
        whole = torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)).bfloat16()
        self.weights = nn.ParameterList(whole[expert].clone() for expert in experts)

    def inner_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        parts = rows[: int(counts.sum())].split(counts.tolist())
        return torch.cat([*(part @ weight for part, weight in zip(parts, self.weights, strict=True))])

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        x_TD = x_BLD.flatten(0, 1)
        rows, counts, metadata = self.token_dispatcher.dispatch(
            x_TD,
            topk_scores_BLK.flatten(0, 1),
            topk_expert_ids_BLK.flatten(0, 1),
            num_local_tokens_per_expert_E,
        )
        return self.token_dispatcher.combine(self.inner_experts(rows, counts), metadata, x_TD).view_as(x_BLD)


KINDS = {"deepep": DeepEPTokenDispatcher, "hybridep": HybridEPTokenDispatcher}


def layer_of(routed: Routed, placement: Placement) -> HostDispatchedLayer:
    device = torch.device("cpu")
    return HostDispatchedLayer(
        0,
        routed,
        counter=LoadCounter(1, EXPERTS, 1, device),
        table=SlotTable(placement, device),
        forward_tag=SimpleNamespace(enter=lambda *said: None),  # type: ignore[arg-type]
        expert_clock=ExpertClock(),
    )


def computed(kind: type[Dispatcher], slots: np.ndarray, sampled: bool, batch: tuple[Tensor, ...]) -> dict[str, Any]:
    """Result, gradients by logical expert, and load, where experts stand so."""
    here = slots[0].reshape(RANKS, -1)[dist.get_rank()].tolist()
    routed = Routed(kind(), here)
    layer = layer_of(routed, Placement(slots, EXPERTS, RANKS, slots.argsort(axis=1).astype(np.int32)))
    if sampled:
        layer.expert_clock.begin_step()
    hidden, scores, ids = batch
    hidden, scores = hidden.clone().requires_grad_(), scores.clone().requires_grad_()
    counts = ids.flatten().bincount(minlength=EXPERTS)
    out = forward_by_slots(routed, layer, routed.forward, hidden, scores, ids, counts)
    (out.float() ** 2).sum().backward()
    layer.expert_clock.end_step()
    return {
        "out": out.detach(),
        "gradients": (hidden.grad, scores.grad),
        "of experts": {expert: weight.grad for expert, weight in zip(here, routed.weights, strict=True)},
        "load": layer._counter.counts[0].clone(),
        "calls": layer.calls,
        "sampled": len(layer.expert_clock._steps),
    }


def everything(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(2, TOKENS // 2, WIDTH, generator=generator).bfloat16()
    scores = torch.rand(2, TOKENS // 2, TOP_K, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    batch = (hidden, scores, ids.view(2, -1, TOP_K))
    found: dict[str, Any] = {"ids": ids}
    at_home = np.arange(EXPERTS, dtype=np.int32)[None]
    for name, kind in KINDS.items():
        found[name] = [computed(kind, slots, slots is MOVED, batch) for slots in (at_home, MOVED)]
        routed = Routed(kind(), at_home.reshape(RANKS, -1)[rank].tolist())
        found[f"{name} looked at"] = why_not_renamed("layer", routed, name)
        found[f"{name} of another"] = why_not_renamed("layer", routed, "minimal_async_ep")
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


@pytest.mark.parametrize("name", KINDS)
def test_no_bit_follows_the_place_of_an_expert(ranks: list[dict[str, Any]], name: str) -> None:
    of_experts: list[dict[int, Tensor]] = [{}, {}]
    for found in ranks:
        home, moved = found[name]
        assert torch.equal(home["out"], moved["out"])
        assert all(map(torch.equal, home["gradients"], moved["gradients"]))
        for gradients, one in zip(of_experts, (home, moved), strict=True):
            gradients |= one["of experts"]
    assert of_experts[0].keys() == of_experts[1].keys() == set(range(EXPERTS))
    assert all(torch.equal(of_experts[0][expert], of_experts[1][expert]) for expert in range(EXPERTS))


@pytest.mark.parametrize("name", KINDS)
def test_load_is_counted_by_logical_expert_and_work_is_marked(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        for one, sampled in zip(found[name], (0, 1), strict=True):
            assert one["load"].equal(found["ids"].flatten().bincount(minlength=EXPERTS))
            assert (one["calls"], one["sampled"]) == (1, sampled)


@pytest.mark.parametrize("name", KINDS)
def test_a_dispatcher_as_it_is_known_passes_and_another_is_named_in_a_line(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for found in ranks:
        assert found[f"{name} looked at"] == ""
        assert "the model's config says minimal_async_ep" in found[f"{name} of another"]
