"""Run rows that lie sorted by local slot through an experts module of the library, with the module's own code.

The module reads whatever tensors stand for its parameters, so it computes the slots of this rank. Its forward wants one
choice for each row and sorts rows by expert once more; of ``grouped_mm``, the library's default, all steps but the
sorting are run here on the rows as they are. `attaching.self_test` compares both ways when a model is attached.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...moe.experts.compute import SlotCounts, weigh_gradients
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
        return self.weighing(rows_MD, counts_S, parameters, None)

    def weighing(
        self, rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor], weights_M: Tensor | None
    ) -> Tensor:
        """As `moe.experts.compute.Compute` says; ``grouped_mm`` keeps no results for the weights' gradient. None: no
        gradient comes unweighted."""
        with _reading(self._experts, self._names, self._with_low_rank(parameters)):
            if not (self._forward_is_the_librarys and _is_grouped_mm(self._experts)):
                out_MD = self._sorted_again(rows_MD, counts_S)
            elif weights_M is not None and _ends_with_torchs_grouped_mm(self._experts, rows_MD, counts_S):
                return _grouped_mm(self._experts, rows_MD, counts_S, weights_M)
            else:
                out_MD = _grouped_mm(self._experts, rows_MD, counts_S, None)
        return out_MD if weights_M is None else weigh_gradients(out_MD, weights_M)

    def _with_low_rank(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the module's own weights, with the products of LoRA added to them."""
        own, pairs = list(parameters[: len(self._names)]), parameters[len(self._names) :]
        for number, one in enumerate(self._low_rank):
            if one.is_on:
                place = self._names.index(one.matrix)
                matrix, (a_SRI, b_SOR) = own[place], pairs[2 * number : 2 * number + 2]
                left, right = (a_SRI.mT, b_SOR.mT) if self._experts.is_transposed else (b_SOR, a_SRI)
                scaling = float(one.wrapper.scaling[one.adapter])  # also rank-stabilised
                with torch.autocast(matrix.device.type, enabled=False):
                    own[place] = torch.baddbmm(matrix, left.to(matrix.dtype), right.to(matrix.dtype), alpha=scaling)
        return own

    def _sorted_again(self, rows_MD: Tensor, counts_S: SlotCounts) -> Tensor:
        """The module's own forward: each row a token with one choice, of weight 1."""
        slot_M1 = counts_S.slot_of_rows(rows_MD.shape[0]).unsqueeze(1)
        one_M1 = rows_MD.new_ones(rows_MD.shape[0], 1)
        with StableSort():
            result: Tensor = self._own_forward(rows_MD, slot_M1, one_M1)
        return result


def _is_grouped_mm(experts: nn.Module) -> bool:
    """Return whether the module's forward is the library's ``grouped_mm`` as it comes."""
    from transformers.integrations import moe

    chosen = getattr(experts.config, "_experts_implementation", None)
    return chosen == "grouped_mm" and moe.ALL_EXPERTS_FUNCTIONS.get("grouped_mm") is moe.grouped_mm_experts_forward


def _ends_with_torchs_grouped_mm(experts: Any, rows_MD: Tensor, counts_S: SlotCounts) -> bool:
    """Return whether the last step is a linear one, in a kernel whose backward is known."""
    from transformers.integrations.moe import _can_use_grouped_mm

    return not _norm_follows(experts) and _can_use_grouped_mm(rows_MD, experts.down_proj, counts_S.offsets_S)


def _norm_follows(experts: nn.Module) -> bool:
    return getattr(experts, "has_post_expert_norm", False)


def _grouped_mm(experts: Any, rows_MD: Tensor, counts_S: SlotCounts, weights_M: Tensor | None) -> Tensor:
    """Return the library's ``grouped_mm`` for rows in order: no sorting, no gathering, no multiplying. With
    ``weights_M`` gradients come unweighted (`_LastLinear`)."""
    slot_M = counts_S.slot_of_rows(rows_MD.shape[0]) if experts.has_bias else None
    linear = partial(_linear, experts, counts_S.offsets_S, slot_M)
    if experts.has_gate:
        inner = experts._apply_gate(linear(rows_MD, "gate_up_proj"))
    else:
        inner = experts.act_fn(linear(rows_MD, "up_proj"))
    out_MD = linear(inner, "down_proj", weights_M)
    if _norm_follows(experts):
        out_MD = experts.post_expert_norm(out_MD)
    return out_MD.to(rows_MD.dtype)


def _linear(
    experts: Any,
    offsets_S: Tensor,
    slot_M: Tensor | None,
    rows_MI: Tensor,
    name: str,
    weights_M: Tensor | None = None,
) -> Tensor:
    from transformers.integrations.moe import _grouped_linear

    matrix_SDI = getattr(experts, name)
    bias_SD = None if slot_M is None else getattr(experts, f"{name}_bias")
    bias_MD = None if bias_SD is None else bias_SD[slot_M]
    if weights_M is None:
        out_MD: Tensor = _grouped_linear(
            rows_MI, matrix_SDI, offsets_S, bias=bias_MD, is_transposed=experts.is_transposed
        )
        return out_MD
    rows_MI = rows_MI.to(matrix_SDI.dtype)
    bias = None if bias_SD is None else (bias_SD.detach(), slot_M)
    weighed: Tensor = _LastLinear.apply(rows_MI, matrix_SDI, bias_MD, weights_M, offsets_S, bias, experts.is_transposed)
    return weighed


class _LastLinear(torch.autograd.Function):
    """The library's grouped linear as an experts module's last step, for gradients that come unweighted.

    With g the gradient of the sum of rows, w a row's router weight, x the row that comes in and y = A x + b:
    the weight's gradient is <g, y> = <A' g, x> + <g, b>, and A' g is wanted anyway. So y need not be kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows_MI: Tensor,
        matrix: Tensor,
        bias_MD: Tensor | None,
        weights_M: Tensor,
        offsets_S: Tensor,
        bias: tuple[Tensor, Tensor] | None,
        transposed: bool,
    ) -> Tensor:
        from transformers.integrations.moe import _grouped_linear

        ctx.save_for_backward(rows_MI, matrix, weights_M)
        ctx.offsets_S, ctx.bias, ctx.transposed = offsets_S, bias, transposed
        out_MD: Tensor = _grouped_linear(rows_MI, matrix, offsets_S, bias=bias_MD, is_transposed=transposed)
        return out_MD

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor | None, ...]:
        rows_MI, matrix, weights_M = ctx.saved_tensors
        rows_need, matrix_need, bias_need, weights_need, *_ = ctx.needs_input_grad
        grad_MD = grad_MD.contiguous()
        grad_rows = grad_matrix = grad_bias = grad_weights = None
        if rows_need or weights_need:
            back = matrix.transpose(-2, -1) if ctx.transposed else matrix
            grad_rows = functional.grouped_mm(grad_MD, back, offs=ctx.offsets_S)
        if weights_need:
            dots = (grad_rows * rows_MI).sum(dim=1)
            if ctx.bias is not None:
                bias_SD, slot_M = ctx.bias
                dots = dots + (grad_MD * bias_SD[slot_M]).sum(dim=1)
            grad_weights = dots.to(weights_M.dtype)
        weights_M1 = weights_M.unsqueeze(1)
        if matrix_need or bias_need:
            grad_bias = weighted_MD = (grad_MD * weights_M1).to(grad_MD.dtype)
        if matrix_need:
            pair = (rows_MI.t(), weighted_MD) if ctx.transposed else (weighted_MD.t(), rows_MI)
            grad_matrix = functional.grouped_mm(*pair, offs=ctx.offsets_S)
        if rows_need:
            grad_rows = (grad_rows * weights_M1).to(rows_MI.dtype)
        return grad_rows, grad_matrix, grad_bias if bias_need else None, grad_weights, None, None, None


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
