"""Gradients of experts' weights that Megatron computes beside the backward pass of their dispatch
(``overlap_dispatch_backward_with_experts_wgrad``).

TransformerEngine's grouped layers keep rows and their gradients until Megatron calls `backward_dw`, and add to
``main_grad`` then: each expert's micro-batch by micro-batch, wherever it stands, and all of them before the layer's
backward pass ends. So nothing follows the placement. It is tried on a few rows at attach.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

_SETTING = "overlap_dispatch_backward_with_experts_wgrad"
_LINEARS = ("linear_fc1", "linear_fc2")
_TRIED = 16
"""Rows of each expert that are computed at attach."""
_KEPT = ("is_first_microbatch",)
"""Marks of a layer that a forward changes."""
_KEPT_OF_WEIGHTS = ("grad", "grad_added_to_main_grad")


def why_not_delayed(name: str, module: Any) -> str:
    """Return why gradients of a layer's experts would not come as they are expected, or ""."""
    if not getattr(module.config, _SETTING, False):
        return ""
    if getattr(module.experts, "_with_fused_impl", False):
        return f"{_SETTING}=True with use_transformer_engine_op_fuser=True has not been run; set one of them to False"
    for own in _LINEARS:
        linear: Any = getattr(module.experts, own, None)
        which = f"{name}.experts.{own} ({type(linear).__name__})"
        if not hasattr(linear, "backward_dw"):
            return f"{which} has no backward_dw: when it computes gradients is not known; set {_SETTING}=False"
        trained = [weight for weight in linear.parameters() if weight.requires_grad]
        if not all(hasattr(weight, "main_grad") for weight in trained):
            return f"{_SETTING}=True without Megatron's DistributedDataParallel around the model; set it to False"
        if trained and (why := _why_not_as_expected(linear)):
            return f"{which} {why}; set {_SETTING}=False"
    return ""


def _why_not_as_expected(linear: Any) -> str:
    """Try one grouped layer: gradients come with `backward_dw` alone, and to ``main_grad``."""
    weights: list[Any] = list(linear.parameters())
    generator = torch.Generator().manual_seed(0)
    width_out, width_in = weights[0].shape

    def drawn(width: int) -> Tensor:
        rows = torch.randn(_TRIED * len(weights), width, generator=generator)
        return rows.to(weights[0].device, weights[0].dtype)

    rows, gradient = drawn(width_in).requires_grad_(), drawn(width_out)
    with torch.no_grad(), _left_as_it_was(linear, weights):  # Megatron calls backward_dw in a backward pass
        try:
            with torch.enable_grad():
                output, _ = linear.forward(rows, [_TRIED] * len(weights))
            torch.autograd.grad(output, rows, gradient)
            early = any(bool(weight.main_grad.any()) for weight in weights)
            linear.backward_dw()
        except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
            return f"cannot be tried on {_TRIED} rows of each expert ({error})"
        if early:
            return "adds to main_grad in the backward pass already"
        expected = [
            of_output.float().T @ of_rows.float()
            for of_output, of_rows in zip(gradient.split(_TRIED), rows.detach().split(_TRIED), strict=True)
        ]
        pairs = zip(weights, expected, strict=True)
        if not all(torch.allclose(weight.main_grad.float(), sum_, rtol=5e-2, atol=0.2) for weight, sum_ in pairs):
            return "adds something else to main_grad than its weights' gradients"
    return ""


@contextmanager
def _left_as_it_was(linear: nn.Module, weights: Sequence[Any]) -> Iterator[None]:
    """With zeros in ``main_grad`` meanwhile."""
    marks = _marks(linear, _KEPT)
    of_weights = [_marks(weight, _KEPT_OF_WEIGHTS) for weight in weights]
    kept = [weight.main_grad.clone() for weight in weights]
    for weight in weights:
        weight.main_grad.zero_()
    try:
        yield
    finally:
        for weight, gradient, own in zip(weights, kept, of_weights, strict=True):
            weight.main_grad.copy_(gradient)
            for mark, value in own.items():
                setattr(weight, mark, value)
        for mark, value in marks.items():
            setattr(linear, mark, value)


def _marks(thing: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(thing, name) for name in names if hasattr(thing, name)}
