"""Operators that stand in graphs of torch.compile for what must run as it is, each time a graph runs.

A layer counts, exchanges tokens and follows placements: state that lives outside of graphs. So a graph holds one
operator for its forward and one for its backward, which torch.compile neither looks into nor moves past each other.
What they do stands in `layer_op.py`; here is how a graph names it, and what a tracer must know: shapes and effects.
"""

from __future__ import annotations

import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import torch
import torch._functorch.config as functorch_config
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _len_torch_dispatch_stack
from torch.utils.checkpoint import CheckpointPolicy, _CachedTorchDispatchMode, _CachingTorchDispatchMode

# A graph holds tensors and numbers, so what it calls has a number. 0 and 1 would be taken for constants.
_owners: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = count(2)


class Owner:
    """What a graph calls. Graphs hold it by its number, and do not keep it alive."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        _owners[self.number] = self


def _owner(number: int) -> Any:
    try:
        return _owners[number]
    except KeyError:
        raise RuntimeError(
            "a graph of torch.compile calls a model's balancer that is not there any more: compile the model again "
            "(torch.compiler.reset())"
        ) from None


class OutsideGraphs(Owner):
    """A call that is made each time, also where the caller was compiled, at its place among the layers.

    Args:
        call: given a tensor or None. Of a graph it is a copy: graphs use their memory again.
    """

    def __init__(self, call: Callable[[Tensor | None], None]) -> None:
        super().__init__()
        self._call = call

    def __call__(self, tensor: Tensor | None = None) -> None:
        if in_graphs() and torch.compiler.is_compiling():
            torch.ops.eplb_runtime.call_outside(self.number, torch.is_grad_enabled(), tensor)
        else:
            self.now(tensor)

    @torch.compiler.disable
    def now(self, tensor: Tensor | None) -> None:
        """Make the call, here."""
        self._call(tensor)


class GraphLayer(Owner, ABC):
    """A layer as graphs call it."""

    @abstractmethod
    def forward(
        self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, learns: Sequence[bool]
    ) -> tuple[Tensor, Any]:
        """``[T, D]``, and what ``backward`` wants; learns: as of `experts`."""

    @abstractmethod
    def backward(self, saved: Any, grad_TD: Tensor) -> Sequence[Tensor]:
        """Gradients of what learns, whole and in one piece each."""


def in_graphs() -> bool:
    """Whether this torch keeps operators in the order of the program, and drops none: else graphs break here."""
    return _EFFECTS


def experts(
    number: int, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor, parameters: Sequence[Tensor]
) -> Tensor:
    """A layer's forward in a graph: ``[T, D]``.

    Args:
        number: of its `GraphLayer`.
        parameters: of its experts, which they get gradients by; memory and values are read from the module.
    """
    grad, device = torch.is_grad_enabled(), hidden_TD.device.type
    learns = [grad and tensor.requires_grad for tensor in (hidden_TD, topk_weights_TK, *parameters)]
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    combined_TD: Tensor = torch.ops.eplb_runtime.experts(
        number, hidden_TD, topk_ids_TK, topk_weights_TK, list(parameters), grad, learns, autocast
    )
    return combined_TD


# -- what a forward leaves for its backward --------------------------------------------------------------------------

_saved: dict[int, Any] = {}
_handles = count()


def _handle(saved: Any) -> Tensor:
    """int64 ``[1]``, on the host. What it stands for is kept as long as its memory: a graph holds that from the forward
    to the end of its backward, and lets go of it when the pass will not come."""
    number = next(_handles)
    memory = np.array([number], dtype=np.int64)
    _saved[number] = saved
    weakref.finalize(memory, _saved.pop, number, None).atexit = False
    return torch.from_numpy(memory)


def _saved_by(handle: Tensor) -> Any:
    try:
        return _saved[int(handle)]
    except KeyError:
        raise RuntimeError(
            "the backward pass of an MoE layer in a graph of torch.compile has lost what its forward kept: tensors "
            "that are saved for it are copied (saved_tensors_hooks, save_on_cpu), which graphs of an attached model "
            "do not support"
        ) from None


# -- operators -------------------------------------------------------------------------------------------------------

with torch.inference_mode(False):
    _KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


@contextmanager
def _as_outside(grad: bool) -> Iterator[None]:
    """Graphs run below autograd; inside, all is as where nothing is compiled."""
    if torch.is_inference_mode_enabled():
        yield
        return
    with torch._C._ForceDispatchKeyGuard(*_KEYS), torch.set_grad_enabled(grad):
        yield


def _call_outside(number: int, grad: bool, tensor: Tensor | None) -> Tensor:
    """Nothing, in a tensor: what Inductor has fused so far is not run ahead of an operator that is on no device."""
    with _as_outside(grad):
        _owner(number).now(None if tensor is None else tensor.clone())
    return torch.empty(0, device="cpu")


def _experts(
    number: int,
    hidden_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    parameters: Sequence[Tensor],
    grad: bool,
    learns: Sequence[bool],
    autocast: torch.dtype | None,
    repeats: bool,
) -> tuple[Tensor, Tensor]:
    with _as_outside(grad), _autocast(hidden_TD, autocast):
        combined_TD, saved = _owner(number).forward(hidden_TD, topk_ids_TK, topk_weights_TK, learns)
    return combined_TD, _handle(None if repeats else saved)


def _experts_backward(
    number: int,
    grad_TD: Tensor,
    handle: Tensor,
    hidden_TD: Tensor | None,
    topk_ids_TK: Tensor | None,
    topk_weights_TK: Tensor,
    parameters: Sequence[Tensor],
    learns: Sequence[bool],
    autocast: torch.dtype | None,
) -> list[Tensor]:
    owner, saved = _owner(number), _saved_by(handle)
    if hidden_TD is not None:
        with _as_outside(grad=True), _autocast(grad_TD, autocast):
            _, saved = owner.forward(hidden_TD, topk_ids_TK, topk_weights_TK, learns)
    with _as_outside(grad=False):
        return list(owner.backward(saved, grad_TD))


def _autocast(like: Tensor, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(like.device.type, dtype=dtype, enabled=dtype is not None)


def _fake_call_outside(number: int, grad: bool, tensor: Tensor | None) -> Tensor:
    _order_in_inductor()
    return torch.empty(0, device="cpu")


def _fake_experts(number: int, hidden_TD: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    _order_in_inductor()
    return hidden_TD.new_empty(hidden_TD.shape), torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_experts_backward(
    number: int,
    grad_TD: Tensor,
    handle: Tensor,
    hidden_TD: Tensor | None,
    topk_ids_TK: Tensor | None,
    topk_weights_TK: Tensor,
    parameters: Sequence[Tensor],
    learns: Sequence[bool],
    autocast: torch.dtype | None,
) -> list[Tensor]:
    _order_in_inductor()
    of = zip((grad_TD, topk_weights_TK, *parameters), learns, strict=True)
    return [tensor.new_empty(tensor.shape) for tensor, need in of if need]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.number, hidden_TD, ids_TK, weights_TK, parameters, _, ctx.learns, ctx.autocast, ctx.repeats = inputs
    ctx.save_for_backward(output[1], weights_TK, *([hidden_TD, ids_TK] if ctx.repeats else []), *parameters)


def _differentiate(ctx: Any, grad_TD: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    handle, weights_TK, *rest = ctx.saved_tensors
    hidden_TD, ids_TK, *parameters = rest if ctx.repeats else (None, None, *rest)
    gradients = torch.ops.eplb_runtime.experts_backward(
        ctx.number, grad_TD, handle, hidden_TD, ids_TK, weights_TK, parameters, ctx.learns, ctx.autocast
    )
    found = iter(gradients)
    hidden, weights, *of_parameters = (next(found) if need else None for need in ctx.learns)
    return None, hidden, None, weights, of_parameters, None, None, None, None


def _experts_in_place(
    number: int,
    hidden_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_weights_TK: Tensor,
    parameters: Sequence[Tensor],
    grad: bool,
    learns: Sequence[bool],
    autocast: torch.dtype | None,
) -> Tensor:
    """Inside activation checkpointing, a forward is repeated by its backward operator, never as a part of the graph:
    there nothing would say in which order repeated forwards and backward passes exchange tokens. Nor is it where a
    graph is made to keep less for its backward (``aggressive_recomputation``)."""
    modes = _get_current_dispatch_mode_stack() if _len_torch_dispatch_stack() else []
    repeats = any(isinstance(mode, (_CachedTorchDispatchMode, _CachingTorchDispatchMode)) for mode in modes)
    tracing = get_proxy_mode() if modes else None
    if tracing is not None and functorch_config.activation_memory_budget < 1:
        raise RuntimeError(
            "torch._functorch.config.activation_memory_budget below 1 has torch choose what of a graph's forward is "
            "repeated in its backward, and it may choose an MoE layer's exchange of tokens: leave it at 1, and use "
            "activation checkpointing (torch.utils.checkpoint), inside the graph or around it"
        )
    before = len(tracing.tracer.graph.nodes) if tracing is not None else 0
    combined_TD: Tensor = torch.ops.eplb_runtime.experts_forward(
        number, hidden_TD, topk_ids_TK, topk_weights_TK, parameters, grad, learns, autocast, repeats
    )[0]
    if tracing is not None:
        nodes = tracing.tracer.graph.nodes
        for node in islice(reversed(nodes), len(nodes) - before):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return combined_TD


def _order_in_inductor() -> None:
    """Called before anything is lowered. Inductor of torch 2.13 notes under a buffer's name which call follows which,
    and looks it up under an operation's; noted under the right name, it keeps to it."""
    lowering: Any = sys.modules.get("torch._inductor.lowering")
    if lowering is None or torch.ops.eplb_runtime.call_outside.default in lowering.lowerings:
        return
    for operator in (torch.ops.eplb_runtime.experts_forward, torch.ops.eplb_runtime.experts_backward):
        lowering.register_lowering(operator.default, type_promotion_kind=None)(partial(_lowered, operator.default))
    call_outside = torch.ops.eplb_runtime.call_outside.default  # the last one: its place tells that all are there
    lowering.register_lowering(call_outside, type_promotion_kind=None)(partial(_lowered, call_outside))


def _lowered(operator: Any, *args: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V
    from torch._library.effects import EffectType

    graph: Any = V.graph
    before, previous = len(graph.operations), graph.effectful_ops.get(EffectType.ORDERED)
    result = ir.FallbackKernel.create(operator, *args)
    if previous is not None:
        for made in graph.operations[before:]:
            graph.additional_star_deps[made.get_operation_name()].add(previous.get_name())
    return pytree.tree_map(lambda node: node.wrap_for_lowering() if isinstance(node, ir.IRNode) else node, result)


_LIBRARY = torch.library.Library("eplb_runtime", "FRAGMENT")


def _define() -> bool:
    """Whether all operators could be given the effect that keeps them in order."""
    register = getattr(torch.library, "_register_effectful_op", None)
    if register is None:
        return False
    from torch._library.effects import EffectType

    tags = [tag for tag in (getattr(torch.Tag, "cudagraph_unsafe", None),) if tag is not None]
    for name, real, fake in (
        ("call_outside", _call_outside, _fake_call_outside),
        ("experts_forward", _experts, _fake_experts),
        ("experts_backward", _experts_backward, _fake_experts_backward),
    ):
        operator = torch.library.custom_op(f"eplb_runtime::{name}", real, mutates_args=(), tags=tags)
        operator.register_fake(fake)
        if name == "experts_forward":
            operator.register_autograd(_differentiate, setup_context=_save_for_backward)
        register(f"eplb_runtime::{name}", EffectType.ORDERED)
    _LIBRARY.define(
        "experts(SymInt number, Tensor hidden, Tensor ids, Tensor weights, Tensor[] parameters, bool grad, "
        "bool[] learns, ScalarType? autocast) -> Tensor"
    )
    _LIBRARY.impl("experts", _experts_in_place, "CompositeImplicitAutograd")
    register("eplb_runtime::experts", EffectType.ORDERED)
    return True


_EFFECTS = _define()
