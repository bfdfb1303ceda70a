"""Hugging Face Transformers 5: every MoE whose experts module follows the library's experts interface.

Such a module keeps its experts in tensors ``[E, ...]`` and has ``forward(hidden_states, top_k_index, top_k_weights)``.
Cut to the local slots and called with one choice per row and weight 1, its own code (eager, grouped_mm, ...) computes
the rows that arrive here, whatever the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...moe.layer import ExpertParallelLayer
from .. import module
from ..attaching.description import AttachError, End, HostModel, MoELayer, refusing, spread_of
from ..attaching.expert_spans import watch_calls
from ..module import MoE
from . import folders
from .adapters import AdaptedExperts, experts_of, follows_experts_interface, is_saved_with_adapters, patch_adapters
from .compute import RowCompute

_PART = (  # of PEFT's base, adapters merged or not
    "experts are spread over ranks, and this model is only a part of what was attached: save the adapters "
    "(save_pretrained of PEFT's model) and merge them into the model that you started from, in a process of its own"
)


def describe(model: nn.Module) -> HostModel:
    """Return a `HostModel` with the MoE layers of ``model``, in its order, and the padding of its batches. AttachError:
    a layer, or an adapter on it, cannot be split by expert."""
    if any(getattr(one, "_is_expert_parallel", False) for one in model.modules()):
        from .expert_parallel import describe_spread

        return describe_spread(model, _Padding(model))
    found, padding = list(experts_of(model)), _Padding(model)
    layers = tuple(_describe_layer(*one) for one in found)
    with_adapters = [(layer, own) for layer, (_, _, own) in zip(layers, found, strict=True) if own.low_rank]
    return HostModel(
        layers,
        padding.real_tokens,
        padding.watch,
        getattr(model, "_init_weights", lambda module: None),
        lambda balancer: _save_together(model, with_adapters, balancer.runtime.barrier),
        folders,
        weights=folders.weights,
    )


def watched(model: nn.Module) -> HostModel:
    """Return the MoE layers of ``model``, in its order, to be watched only; the model need not be one to balance."""
    padding, experts = _Padding(model), {n: m for n, m in model.named_modules() if follows_experts_interface(m)}
    found = module.watched(model, [MoE(name, run="forward") for name in experts]).layers
    # Where the library has spread experts their tensors count those of all ranks.
    sizes: Any = [one.num_experts for one in experts.values()]
    layers = [replace(one, ep_size=one.num_experts // here) for one, here in zip(found, sizes, strict=True)]
    return HostModel(tuple(layers), padding.real_tokens, padding.watch)


def _describe_layer(name: str, outer: nn.Module, adapted: AdaptedExperts) -> MoELayer:
    """``outer``: the experts module, or the outermost adapter around it."""
    experts = adapted.experts
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    tensors = [*experts.named_parameters(), *experts.named_buffers()]
    spread = spread_of(outer)
    rows = num_experts if spread is None else spread.rows
    odd = [key for key, tensor in tensors if tensor.ndim == 0 or tensor.shape[0] != rows or "." in key]
    if odd or not tensors:
        raise AttachError(
            f"{name} ({type(experts).__name__}) has {', '.join(odd) or 'no tensors'} without the {num_experts} experts "
            "as first dimension: this layer cannot be split by expert"
        )
    if buffers := [key for key, _ in experts.named_buffers()]:
        raise AttachError(f"{name} keeps expert buffers ({', '.join(buffers)}): quantised experts are not supported")
    names = tuple(key for key, _ in experts.named_parameters())

    def install(layer: ExpertParallelLayer) -> None:
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return layer(hidden_states, top_k_index, top_k_weights)

        outer.forward = forward  # type: ignore[method-assign]

    return MoELayer(
        name=name,
        experts=outer,
        num_experts=num_experts,
        parameters=(*(adapted.path + key for key in names), *adapted.by_expert),
        compute=RowCompute(experts, names, adapted.low_rank),
        install=install,
        by_expert={} if spread is not None else adapted.by_expert,
        run=outer.forward,
        watch=None if adapted.low_rank else partial(watch_calls, outer, "forward", lambda ids, weights: ids),
    )


def _save_together(
    model: nn.Module, adapted: Sequence[tuple[MoELayer, AdaptedExperts]], barrier: Callable[[str], None]
) -> None:
    for inner in model.modules():
        if inner is not model and isinstance(inner, PreTrainedModel):
            object.__setattr__(inner, "save_pretrained", refusing(_PART))
    if adapted:
        patch_adapters(model, adapted)
    if adapted or not isinstance(model, PreTrainedModel):
        return
    own = model.save_pretrained

    def save_pretrained(save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
        """Save the whole model in logical order; adapters as the library does. Collective: every rank calls it."""
        from ...checkpoint import export_pretrained

        if is_saved_with_adapters(model):  # which are whole on every rank
            own(save_directory, is_main_process=is_main_process, **options)
            return
        barrier("save_pretrained of an attached model")
        export_pretrained(model, save_directory, **options)

    object.__setattr__(model, "save_pretrained", save_pretrained)


class _Padding:
    """Remembers the attention mask of the batch that a thread runs, so that padding does not count as load."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._masks = model, threading.local()

    @torch.compiler.disable
    def _see(self, mask: Any) -> None:
        self._masks.now = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def watch(self) -> End:
        """Hook the model: a running forward's attention mask is kept until its end. Return how to remove the hooks."""

        def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._see(kwargs.get("attention_mask", args[1] if len(args) > 1 else None))

        hooks = ExitStack()
        hooks.callback(self._model.register_forward_pre_hook(before_forward, with_kwargs=True).remove)
        hooks.callback(self._model.register_forward_hook(lambda *_: self._see(None), always_call=True).remove)
        return hooks.close

    def real_tokens(self, tokens: int) -> Tensor | None:
        """Return bool ``[T]``, the running forward's real tokens by its mask's last columns; None: no fitting mask."""
        mask: Tensor | None = getattr(self._masks, "now", None)
        if mask is None or tokens % mask.shape[0] or tokens // mask.shape[0] > mask.shape[1]:
            return None
        return mask[:, mask.shape[1] - tokens // mask.shape[0] :].to(torch.bool).reshape(-1)
