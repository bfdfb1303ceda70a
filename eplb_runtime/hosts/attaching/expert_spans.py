"""Marks of the expert work of a model that is watched and not changed: around a call of its experts and the backward
pass of that call. Values and gradients stay the same bits."""

import inspect
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from ...load.clock import ExpertClock, Mark


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """A call of a layer's experts in a sampled step, and its first mark."""

    clock: ExpertClock
    begin: Mark


@torch.compiler.disable
def call_begins(clock: ExpertClock, hidden: Any) -> tuple[Any, ExpertCall | None]:
    """Mark the start of a layer's expert work. Return the hidden states, whose gradient will mark the end of the
    backward pass, and the call for `call_ends`; None: no mark is possible now. The clock must be on."""
    if (begin := clock.mark()) is None:
        return hidden, None
    call = ExpertCall(clock, begin)
    return (_Marked.apply(hidden, partial(clock.backward_ends, call)) if _is_traced(hidden) else hidden), call


@torch.compiler.disable
def call_ends(call: ExpertCall | None, hidden: Any, out: Any) -> Any:
    """Mark the end of the experts' forward and return their output, whose gradient marks the start of the backward pass
    if ``hidden`` takes one. ``call`` None: return ``out`` unmarked."""
    if call is None:
        return out
    call.clock.forward_ends(call.begin)
    is_traced = _is_traced(hidden) and _is_traced(out)
    return _Marked.apply(out, partial(call.clock.backward_begins, call)) if is_traced else out


def _is_traced(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


class _Taken:
    """A function in the place of a method. A copy of the module has its own method, and not the one of this module."""

    def __init__(self, own: Callable[..., Any], run: Callable[..., Any]) -> None:
        update_wrapper(self, own)
        self._own, self._run = own, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Any:
        return deepcopy(self._own, memo)


def watch_calls(
    owner: nn.Module,
    name: str,
    choices: Callable[[Tensor, Tensor], Tensor],
    see: Callable[[Tensor, int, int], None],
    clock: ExpertClock,
) -> Callable[[], None]:
    """Replace method ``name`` of ``owner``, which takes hidden states, ids and weights, by one that gives the same. It
    first calls ``see(choices(ids, weights), D, K)``, and lets ``clock``, while on, time the call in training. Return a
    function that puts the old method back."""
    own, had = getattr(owner, name), name in vars(owner)
    bind = inspect.signature(own).bind

    def run(*args: Any, **kwargs: Any) -> Any:
        call = bind(*args, **kwargs)
        (first, hidden), (_, topk_ids), (_, topk_weights) = call.arguments.items()
        see(choices(topk_ids, topk_weights), hidden.shape[-1], topk_ids.shape[-1])
        if not (clock.on and owner.training):
            return own(*args, **kwargs)
        call.arguments[first], began = call_begins(clock, hidden)
        return call_ends(began, call.arguments[first], own(*call.args, **call.kwargs))

    setattr(owner, name, _Taken(own, run))
    return lambda: setattr(owner, name, own) if had else delattr(owner, name)


class _Marked(torch.autograd.Function):
    """A tensor as it is; a function is called once its gradient is there."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mark: Callable[[], None]) -> Tensor:
        ctx.mark = mark
        ctx.save_for_backward(tensor.new_empty(0))
        return tensor.view_as(tensor)

    @staticmethod
    @torch.compiler.disable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _ = ctx.saved_tensors  # activation checkpointing repeats the forward of all that it holds now, and not later
        ctx.mark()
        return gradient, None
