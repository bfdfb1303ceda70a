"""One expert-parallel MoE layer: count, pick slots, dispatch, compute, combine - for experts of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..load.recorder import LoadRecorder, in_recompute
from ..routing.lookup import SlotTable
from .all_to_all import AllToAllDispatcher, Compute


class ExpertParallelLayer:
    """The way of a batch through one MoE layer.

    Args:
        index: the layer's index among the model's MoE layers.
        experts: the host's experts module, cut to the local slots; its ``training`` flag decides what counts as load.
        compute: runs rows through local slots (see `Compute`).
        parameters: the parameters that ``compute`` reads.
        counts_in_evaluation: whether load counts outside training (inference has nothing else).
        real_tokens: bool ``[T]`` mask of the running batch, or None; asked once a forward.
    """

    def __init__(
        self,
        index: int,
        experts: nn.Module,
        compute: Compute,
        parameters: Sequence[Tensor],
        *,
        recorder: LoadRecorder,
        table: SlotTable,
        dispatcher: AllToAllDispatcher,
        counts_in_evaluation: bool,
        real_tokens: Callable[[int], Tensor | None],
    ) -> None:
        self.index = index
        self.experts = experts
        self.parameters = parameters
        self._compute = compute
        self._recorder = recorder
        self._table = table
        self._dispatcher = dispatcher
        self._counts_in_evaluation = counts_in_evaluation
        self._real_tokens = real_tokens

    @torch.compiler.disable
    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """``[T, D]`` -> ``[T, D]``; ids are logical."""
        if (self.experts.training or self._counts_in_evaluation) and not in_recompute():
            self._recorder.count(self.index, topk_ids_TK, self._real_tokens(hidden_TD.shape[0]))
        slots_TK = self._table.slots(self.index, topk_ids_TK)
        return self._dispatcher(hidden_TD, slots_TK, topk_weights_TK, self._compute, self.parameters)
