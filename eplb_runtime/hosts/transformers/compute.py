"""Run rows that lie sorted by local slot through an experts module of the library, with the module's own code.

The module reads whatever tensors stand for its parameters, so it computes the slots of this rank. Its forward wants one
choice for each row and sorts rows by expert once more; of ``grouped_mm``, the library's default, all steps but the
sorting are run here on the rows as they are, after a first batch has shown that the result is the same to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...experts.compute import SlotCounts

logger = logging.getLogger("eplb_runtime")


class RowCompute:
    """An `experts.compute.Compute`.

    Args:
        experts: the module, before its forward is replaced.
        names: of its parameters, in the order in which weights are given.
    """

    def __init__(self, experts: nn.Module, names: Sequence[str]) -> None:
        self._experts = experts
        self._names = names
        self._own_forward = experts.forward
        self._same_unsorted: bool | None = None

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, weights: Sequence[Tensor]) -> Tensor:
        with _reading(self._experts, self._names, weights):
            if _is_grouped_mm(self._experts) and self._sorting_changes_nothing(rows_MD, counts_S):
                return _grouped_mm(self._experts, rows_MD, counts_S)
            return self._sorted_again(rows_MD, counts_S)

    def _sorted_again(self, rows_MD: Tensor, counts_S: SlotCounts) -> Tensor:
        """The module's own forward: each row a token with one choice, of weight 1."""
        slot_M1 = counts_S.slot_of_rows(rows_MD.shape[0]).unsqueeze(1)
        one_M1 = rows_MD.new_ones(rows_MD.shape[0], 1)
        with _StableSort():
            result: Tensor = self._own_forward(rows_MD, slot_M1, one_M1)
        return result

    @torch.no_grad()
    def _sorting_changes_nothing(self, rows_MD: Tensor, counts_S: SlotCounts) -> bool:
        """Found out with the first rows that come: another version of the library may do another thing."""
        if self._same_unsorted is None:
            own_MD = self._sorted_again(rows_MD, counts_S)
            try:
                ours_MD = _grouped_mm(self._experts, rows_MD, counts_S)
            except (AttributeError, ImportError, TypeError) as error:
                ours_MD, why = None, f"{type(error).__name__}: {error}"
            else:
                why = "the results differ"
            # Not a number is as good as any other value here.
            self._same_unsorted = ours_MD is not None and torch.allclose(own_MD, ours_MD, 0, 0, equal_nan=True)
            if not self._same_unsorted:
                logger.info("%s sorts rows that are sorted already: %s", type(self._experts).__name__, why)
        return self._same_unsorted


def _is_grouped_mm(experts: nn.Module) -> bool:
    """Whether the module's forward is the library's ``grouped_mm`` as it comes."""
    from transformers.integrations import moe

    chosen = getattr(experts.config, "_experts_implementation", None)
    return chosen == "grouped_mm" and moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm") is moe.grouped_mm_experts_forward


def _grouped_mm(experts: Any, rows_MD: Tensor, counts_S: SlotCounts) -> Tensor:
    """The steps of the library's ``grouped_mm`` for rows in order: no sorting, no gathering, no weights."""
    from transformers.integrations.moe import _grouped_linear

    slot_M = counts_S.slot_of_rows(rows_MD.shape[0]) if experts.has_bias else None

    def linear(inner: Tensor, name: str) -> Tensor:
        bias = None if slot_M is None else getattr(experts, f"{name}_bias")[slot_M]
        out: Tensor = _grouped_linear(
            inner, getattr(experts, name), counts_S.offsets_S, bias=bias, is_transposed=experts.is_transposed
        )
        return out

    if experts.has_gate:
        inner = experts._apply_gate(linear(rows_MD, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows_MD, "up_proj"))
    out_MD = linear(inner, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        out_MD = experts.post_expert_norm(out_MD)
    return out_MD.to(rows_MD.dtype)


@contextmanager
def _reading(experts: nn.Module, names: Sequence[str], weights: Sequence[Tensor]) -> Iterator[None]:
    """Let the module's code take these tensors for its parameters, and their rows for its experts."""
    own, num_experts = {name: experts._parameters[name] for name in names}, experts.num_experts
    experts._parameters.update(zip(names, weights, strict=True))  # type: ignore[arg-type]
    experts.num_experts = weights[0].shape[0]  # type: ignore[assignment]
    try:
        yield
    finally:
        experts._parameters.update(own)
        experts.num_experts = num_experts


class _StableSort(TorchFunctionMode):
    """Makes sorting stable while the library computes: its grouped_mm sorts rows by expert with a sort that may put
    equal keys in any order, and does on CPUs; then an expert's rows would be summed in an order that depends on
    which experts stand beside it."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SORTS and len(args) == 1:
            kwargs = {**kwargs, "stable": True}
        return func(*args, **kwargs)


_SORTS = (torch.sort, torch.argsort, Tensor.sort, Tensor.argsort)
