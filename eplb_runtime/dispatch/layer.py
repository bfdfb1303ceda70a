"""One expert-parallel MoE layer: count, pick slots, dispatch, compute, combine - for experts of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..load.recorder import LoadRecorder, in_recompute
from ..routing.lookup import SlotTable
from ..routing.splitter import BatchSplitter
from .all_to_all import AllToAllDispatcher

Compute = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]
"""(rows ``[M, D]`` ordered by local slot, local slot of each row int64 ``[M]``, weights of all slots) -> ``[M, D]``."""


class ExpertParallelLayer:
    """The way of a batch through one MoE layer.

    Args:
        index: the layer's index among the model's MoE layers.
        experts: the host's experts module, cut to the local slots; its ``training`` flag decides what counts as load.
        compute: runs rows through local slots (see `Compute`).
        weights: the weights of all local slots, asked for once a forward (waits for copies on their way).
        splitter: shares tokens out over copies; None: there are no replica slots, a table look-up does.
        counts_in_evaluation: whether load counts outside training (inference has nothing else).
        real_tokens: bool ``[T]`` mask of the running batch, or None; asked once a forward.
    """

    def __init__(
        self,
        index: int,
        experts: nn.Module,
        compute: Compute,
        weights: Callable[[], Sequence[Tensor]],
        *,
        recorder: LoadRecorder,
        table: SlotTable,
        splitter: BatchSplitter | None,
        dispatcher: AllToAllDispatcher,
        counts_in_evaluation: bool,
        real_tokens: Callable[[int], Tensor | None],
    ) -> None:
        self.index = index
        self.experts = experts
        self._compute = compute
        self._weights = weights
        self._recorder = recorder
        self._table = table
        self._splitter = splitter
        self._dispatcher = dispatcher
        self._counts_in_evaluation = counts_in_evaluation
        self._real_tokens = real_tokens

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``; ids are logical."""
        if (self.experts.training or self._counts_in_evaluation) and not in_recompute():
            self._recorder.count(self.index, topk_ids_TK, self._real_tokens(hidden_TD.shape[0]))
        slots_TK, row_counts = self._route(topk_ids_TK)
        weights = self._weights()

        def compute(rows_MD: Tensor, slot_M: Tensor) -> Tensor:
            return self._compute(rows_MD, slot_M, weights)

        return self._dispatcher(hidden_TD, slots_TK, topk_weights_TK, compute, weights, row_counts)

    def _route(self, topk_ids_TK: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Slots of this batch, and how many rows go where if the split has told that already."""
        if self._splitter is None or not self._splitter.splits(self.index):
            return self._table.slots(self.index, topk_ids_TK), None
        counts_RE = self._dispatcher.gather_counts(self._splitter.counts(topk_ids_TK))
        route = self._splitter.route(self.index, topk_ids_TK, counts_RE)
        return route.slots_TK, (route.sent_P, route.received_P)
