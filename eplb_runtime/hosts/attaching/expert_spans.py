"""Marks of the expert work of a model that is watched and not changed: around a call of its experts and the backward
pass of that call. Values and gradients stay the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """The hidden states for the experts, and the call; None: nothing can be marked now. For a clock that is on."""
    begin = clock.mark()
    if begin is None:
        return hidden, None
    call = ExpertCall(clock, begin)
    if isinstance(hidden, Tensor) and hidden.requires_grad and torch.is_grad_enabled():
        hidden = _Marked.apply(hidden, partial(clock.backward_ends, call))
    return hidden, call


@torch.compiler.disable
def call_ends(call: ExpertCall | None, hidden: Any, out: Any) -> Any:
    """Return the experts' output at the end of a call. Where ``hidden`` takes no gradient, the forward alone counts."""
    if call is None:
        return out
    call.clock.forward_ends(call.begin)
    follows = isinstance(hidden, Tensor) and hidden.requires_grad and torch.is_grad_enabled()
    if not (follows and isinstance(out, Tensor) and out.requires_grad):
        return out
    return _Marked.apply(out, partial(call.clock.backward_begins, call))


def mark_calls(experts: nn.Module, name: str, clock: ExpertClock) -> Callable[[], None]:
    """Mark the calls of a module, whose hidden states are the argument ``name``; returns how to end it."""
    running: list[tuple[ExpertCall | None, Any]] = []

    def before(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        running.clear()  # a repeated forward of activation checkpointing may have been broken off
        if not (clock.on and module.training):
            return args, kwargs
        hidden, call = call_begins(clock, kwargs[name] if name in kwargs else args[0])
        running.append((call, hidden))
        return (args, {**kwargs, name: hidden}) if name in kwargs else ((hidden, *args[1:]), kwargs)

    def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return call_ends(*running.pop(), out) if running else out

    hooks = experts.register_forward_pre_hook(before, with_kwargs=True), experts.register_forward_hook(after)

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


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
