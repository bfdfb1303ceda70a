"""Run rows that lie sorted by local slot through an experts module of the library, with the module's own code.

The module reads whatever tensors stand for its parameters, so it computes the slots of this rank. Its forward wants one
choice for each row and sorts rows by expert once more; of ``grouped_mm``, the library's default, all steps but the
sorting are run here on the rows as they are. `attaching.checks` compares both ways when a model is attached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations import moe

from ...moe.experts.compute import SlotCounts
from ..module import StableSort
from .adapters import LowRank


class RowCompute:
    """A `moe.experts.compute.Compute` of a module whose forward is not replaced yet. With LoRA, two weights follow the
    module's own for each matrix, ``[S, r, in]`` and ``[S, out, r]``, and are added to the matrix, as PEFT does."""

    def __init__(self, experts: nn.Module, names: Sequence[str], low_rank: Sequence[LowRank] = ()) -> None:
        self._experts = experts
        self._names = names
        self._low_rank = low_rank
        self._own_forward = experts.forward
        # One that was put in its place may do another thing; the library's decorator is of this module.
        in_library = getattr(experts.forward, "__globals__", {}).get("__name__") == "transformers.integrations.moe"
        self._forward_is_the_librarys = in_library and "forward" not in vars(experts)

    def __call__(self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        experts, own = self._experts, moe.grouped_mm_experts_forward
        is_grouped_mm = getattr(experts.config, "_experts_implementation", None) == "grouped_mm"
        with _reading(experts, self._names, self._with_low_rank(parameters)):
            if self._forward_is_the_librarys and is_grouped_mm and moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm") is own:
                return _grouped_mm(experts, rows_MD, counts_S)
            # The module's own forward: each row a token with one choice, of weight 1.
            slot_M1 = counts_S.slot_of_rows(rows_MD.shape[0]).unsqueeze(1)
            with StableSort():
                result: Tensor = self._own_forward(rows_MD, slot_M1, rows_MD.new_ones(rows_MD.shape[0], 1))
            return result

    def _with_low_rank(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        own, pairs = list(parameters[: len(self._names)]), parameters[len(self._names) :]
        for number, one in enumerate(self._low_rank):
            wrapper = one.wrapper
            if not wrapper.disable_adapters and one.adapter in wrapper.active_adapters:
                place = self._names.index(wrapper.parameter_name)
                matrix, (a_SRI, b_SOR) = own[place], pairs[2 * number : 2 * number + 2]
                left, right = (a_SRI.mT, b_SOR.mT) if self._experts.is_transposed else (b_SOR, a_SRI)
                scaling = float(wrapper.scaling[one.adapter])  # also rank-stabilised
                with torch.autocast(matrix.device.type, enabled=False):
                    own[place] = torch.baddbmm(matrix, left.to(matrix.dtype), right.to(matrix.dtype), alpha=scaling)
        return own


def _grouped_mm(experts: Any, rows_MD: Tensor, counts_S: SlotCounts) -> Tensor:
    """Return the library's ``grouped_mm`` for rows in order: no sorting, no gathering, no multiplying."""
    slot_M = counts_S.slot_of_rows(rows_MD.shape[0]) if experts.has_bias else None

    def linear(rows_MI: Tensor, name: str) -> Tensor:
        matrix_SDI, ends_S = getattr(experts, name), counts_S.offsets_S
        bias_MD = None if slot_M is None else getattr(experts, f"{name}_bias")[slot_M]
        options = {"bias": bias_MD, "is_transposed": experts.is_transposed}
        out: Tensor = moe._grouped_linear(rows_MI, matrix_SDI, ends_S, **options)
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
