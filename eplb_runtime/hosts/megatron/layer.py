"""A Megatron MoE layer whose columns change places between its router and its dispatcher.

Everything before is in logical ids: the router, its bias, its losses, its counters, the capacity of an expert.
Everything after believes that slot p is expert p. Its distributed checkpoints are put right in `saved_state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...load.clock import ExpertClock
from ...moe.layer import HostDispatchedLayer
from ..attaching.expert_spans import ExpertCall, call_begins, call_ends
from .graphs import GraphedChoices, GraphedColumns, goes_on_after_graph, is_captured
from .order import RowsInLogicalOrder
from .saved_state import save_by_logical_expert
from .settings import reorders, sums_in_order

QUANTIZE_AGAIN = "is_first_microbatch"
"""The mark of a layer whose weights are to be quantized again."""


def keeps_every_bit(module: Any) -> bool:
    """Whether the layer gives the same bits wherever experts stand: a token's results are added in logical order."""
    return sums_in_order(module.config)


def install(module: Any, columns: HostDispatchedLayer) -> None:
    """Let a layer route by where experts are, and save by which they are."""
    in_order = RowsInLogicalOrder(module.token_dispatcher, columns) if reorders(module.config) else None
    own_route, own_preprocess, own_postprocess = module.route, module.preprocess, module.postprocess
    graphed, caches = GraphedColumns(columns), WeightCaches(module.experts, columns)
    num_experts = module.config.num_moe_experts
    weight = next(module.experts.parameters())
    was_wrapped = hasattr(weight, "main_grad")
    padding: list[Tensor | None] = [None]

    def route(hidden_states: Tensor, padding_mask: Tensor | None = None, *more: Any, **named: Any) -> Any:
        if hasattr(weight, "main_grad") != was_wrapped and module.training:
            raise RuntimeError(
                "Megatron's DistributedDataParallel was made after attach, and would scale gradients of experts once "
                "more: attach the wrapped model, with the optimizer that get_megatron_optimizer makes of it"
            )
        padding[0] = padding_mask  # the router's: True is padding
        # Newer versions give ids of tokens, too, for hash routing.
        return own_route(hidden_states, padding_mask, *more, **named)

    def preprocess(hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> tuple[Tensor, Tensor]:
        if goes_on_after_graph(module):
            rows, permuted = own_preprocess(hidden_states, probs, routing_map)
            graphed.begin(rows)
            caches.follow()
            return rows, permuted
        if routing_map.dtype is not torch.bool or routing_map.shape[-1] != num_experts or probs.ndim != 2:
            raise RuntimeError(
                f"the router gives a map {list(routing_map.shape)} of {routing_map.dtype} and weights "
                f"{list(probs.shape)}: bool [tokens, {num_experts}] and [tokens, {num_experts}] are expected"
            )
        mask, padding[0] = padding[0], None
        real_T = None if mask is None else ~mask.reshape(-1)
        if is_captured(module):
            return own_preprocess(hidden_states, *reversed(graphed.capture(routing_map, probs, real_T)))
        if in_order is not None:
            columns.begin(hidden_states, routing_map, real_T)
            caches.follow()
            return in_order.to_slots(*own_preprocess(hidden_states, probs, routing_map))
        chosen, weights = columns(hidden_states, routing_map, probs, real_T)
        caches.follow()
        return own_preprocess(hidden_states, weights, chosen)

    def postprocess(output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        if in_order is not None:
            output = in_order.from_slots(output)
        result: Tensor = own_postprocess(output, shared_expert_output)
        return result

    module.route, module.preprocess, module.postprocess = route, preprocess, postprocess
    mark_work(module, columns.expert_clock)
    save_by_logical_expert(module, lambda: columns.logical_of_slots)


class WeightCaches:
    """FP8 weights that TransformerEngine's layers keep of experts in bf16 or fp32. They are made again in the first
    micro-batch of a step, which Megatron marks; a forward outside of its schedules is marked here after a commit."""

    def __init__(self, experts: nn.Module, columns: HostDispatchedLayer) -> None:
        self._experts, self._columns = experts, columns
        self._followed = 0

    def follow(self) -> None:
        """Ahead of the experts of a forward: have weights quantized again if the placement has changed."""
        if self._followed != self._columns.changes:
            self._followed = self._columns.changes
            for part in self._experts.modules():
                if hasattr(part, QUANTIZE_AGAIN):
                    setattr(part, QUANTIZE_AGAIN, True)


def mark_work(module: Any, clock: ExpertClock) -> Callable[[], None]:
    """Let a clock measure a layer, unless another micro-batch goes backward in it; returns how to end it."""
    if module.config.overlap_moe_expert_parallel_comm:
        return lambda: None
    own_preprocess, own_postprocess = module.preprocess, module.postprocess
    running: list[tuple[ExpertCall | None, Tensor]] = []

    def preprocess(hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        running.clear()
        if clock.on and module.training and goes_on_after_graph(module):
            rows, permuted = own_preprocess(hidden_states, probs, routing_map)
            rows, call = call_begins(clock, rows)
            running.append((call, rows))
            return rows, permuted
        if clock.on and module.training and not is_captured(module):
            hidden_states, call = call_begins(clock, hidden_states)
            running.append((call, hidden_states))
        return own_preprocess(hidden_states, probs, routing_map)

    def postprocess(output: Tensor, shared_expert_output: Tensor | None) -> Any:
        result = own_postprocess(output, shared_expert_output)
        return call_ends(*running.pop(), result) if running else result

    def undo() -> None:
        del module.preprocess, module.postprocess

    module.preprocess, module.postprocess = preprocess, postprocess
    return undo


def watch(module: Any, see: Callable[[Tensor, int, int], None]) -> Callable[[], None]:
    """Show a layer's choices, bool ``[T, E]`` without padding, and change nothing; returns how to end it."""
    own_route, graphed = module.route, GraphedChoices()

    def route(hidden_states: Tensor, padding_mask: Tensor | None = None, *more: Any, **named: Any) -> Any:
        probs, chosen = own_route(hidden_states, padding_mask, *more, **named)
        if goes_on_after_graph(module):
            see(graphed.choices(), hidden_states.shape[-1], module.config.moe_router_topk)
            return probs, chosen
        chosen_TE = chosen if padding_mask is None else chosen & ~padding_mask.reshape(-1, 1)
        if is_captured(module):
            graphed.capture(chosen_TE)
            return probs, chosen
        see(chosen_TE, hidden_states.shape[-1], module.config.moe_router_topk)
        return probs, chosen

    module.route = route
    return lambda: delattr(module, "route")
