"""A Megatron MoE layer whose columns change places between its router and its dispatcher.

Everything before is in logical ids: the router, its bias, its losses, its counters, the capacity of an expert.
Everything after believes that slot p is expert p. Its distributed checkpoints are put right in `saved_state.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor, nn

from ...load.clock import ExpertClock
from ...moe.layer import HostDispatchedLayer
from ..attaching.expert_spans import ExpertCall, call_begins, call_ends
from .saved_state import save_by_logical_expert
from .settings import reorders

QUANTIZE_AGAIN = "is_first_microbatch"
"""The mark of a layer whose weights are to be quantized again."""


def install(module: Any, columns: HostDispatchedLayer) -> None:
    """Replace methods of a MoE layer: tokens are counted by ``columns`` and sent to where experts are, FP8 weights
    follow moves, ``columns``' clock times expert work, and sharded state names experts by logical number."""
    in_order = RowsInLogicalOrder(module.token_dispatcher, columns) if reorders(module.config) else None
    own_route, own_preprocess, own_postprocess = module.route, module.preprocess, module.postprocess
    caches = WeightCaches(module.experts, columns)
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
        if routing_map.dtype is not torch.bool or routing_map.shape[-1] != num_experts or probs.ndim != 2:
            raise RuntimeError(
                f"the router gives a map {list(routing_map.shape)} of {routing_map.dtype} and weights "
                f"{list(probs.shape)}: bool [tokens, {num_experts}] and [tokens, {num_experts}] are expected"
            )
        mask, padding[0] = padding[0], None
        real_T = None if mask is None else ~mask.reshape(-1)
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
        """If the placement has changed since the last call, set `QUANTIZE_AGAIN` on the experts' modules that have it:
        they quantize their weights again."""
        if self._followed != self._columns.changes:
            self._followed = self._columns.changes
            for part in self._experts.modules():
                if hasattr(part, QUANTIZE_AGAIN):
                    setattr(part, QUANTIZE_AGAIN, True)


def mark_work(module: Any, clock: ExpertClock) -> Callable[[], None]:
    """Replace two methods of a layer so that ``clock``, while on, times its expert work in training; return how to undo
    it. With ``overlap_moe_expert_parallel_comm``, where other work runs in between, nothing is replaced."""
    if module.config.overlap_moe_expert_parallel_comm:
        return lambda: None
    own_preprocess, own_postprocess = module.preprocess, module.postprocess
    running: list[tuple[ExpertCall | None, Tensor]] = []

    def preprocess(hidden_states: Tensor, probs: Tensor, routing_map: Tensor) -> Any:
        running.clear()
        if clock.on and module.training:
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


def watch(module: Any, see: Callable[[Tensor, int, int], None], clock: ExpertClock) -> Callable[[], None]:
    """Replace methods of a layer so that ``see`` is given its choices, bool ``[T, E]`` without padding, and ``clock``
    times its expert work. Results stay the same. Return how to undo it."""
    own_route, end = module.route, mark_work(module, clock)

    def route(hidden_states: Tensor, padding_mask: Tensor | None = None, *more: Any, **named: Any) -> Any:
        probs, chosen = own_route(hidden_states, padding_mask, *more, **named)
        if not is_graph_capturing():  # that is of no step
            chosen_TE = chosen if padding_mask is None else chosen & ~padding_mask.reshape(-1, 1)
            see(chosen_TE, hidden_states.shape[-1], module.config.moe_router_topk)
        return probs, chosen

    def undo() -> None:
        del module.route
        end()

    module.route = route
    return undo


class RowsInLogicalOrder:
    """One layer's rows of the all-to-all dispatcher: by logical expert where a token's results are added up, by slot
    where they travel. Megatron permutes, and later adds, in the order of the columns that it is given (with
    ``moe_permute_fusion`` or without): logical order. Whole chunks, one for each expert, change places in between."""

    def __init__(self, dispatcher: Any, columns: HostDispatchedLayer) -> None:
        self._columns = columns
        self._counts_E: Tensor | None = None
        self._places: tuple[Tensor, Tensor] | None = None
        own_preprocess = dispatcher.preprocess

        def preprocess(logical_TE: Tensor) -> Any:
            """Keep each expert's number of rows, and return Megatron's own result for columns in slot order."""
            self._counts_E = logical_TE.sum(dim=0)
            return own_preprocess(logical_TE.index_select(1, columns.logical_of_slots))

        dispatcher.preprocess = preprocess

    def to_slots(self, rows_ND: Tensor, weights_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows and their weights, given by logical expert, in slot order. Keep the order for `from_slots`."""
        assert self._counts_E is not None
        there_N, back_N = _places(self._counts_E, self._columns.logical_of_slots, len(rows_ND))
        self._counts_E, self._places = None, (there_N, back_N)
        return _Moved.apply(rows_ND, there_N, back_N), _Moved.apply(weights_N, there_N, back_N)

    def from_slots(self, rows_ND: Tensor) -> Tensor:
        """Return rows, given in slot order, by logical expert again. Forget the order that `to_slots` kept."""
        assert self._places is not None
        there_N, back_N = self._places
        self._places = None
        moved: Tensor = _Moved.apply(rows_ND, back_N, there_N)
        return moved


def _places(counts_E: Tensor, logical_of_slots: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return where each row in the order of slots is in logical order, and the other way round; no host sync."""
    counts_P = counts_E.index_select(0, logical_of_slots)
    first_E, first_P = counts_E.cumsum(0) - counts_E, counts_P.cumsum(0) - counts_P
    shift_P = first_E.index_select(0, logical_of_slots) - first_P
    numbers_N = torch.arange(rows, device=counts_E.device)
    there_N = numbers_N + shift_P.repeat_interleave(counts_P, output_size=rows)
    return there_N, torch.empty_like(there_N).scatter_(0, there_N, numbers_N)


class _Moved(torch.autograd.Function):
    """Rows in another order. Each is read once, so their gradients are moved back, and none is added to another."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there_N: Tensor, back_N: Tensor) -> Tensor:
        ctx.save_for_backward(back_N)
        return rows.index_select(0, there_N)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (back_N,) = ctx.saved_tensors
        return gradient.index_select(0, back_N), None, None
