"""Hugging Face Transformers 5: every MoE whose experts module follows the library's experts interface.

Such a module keeps its experts in tensors ``[E, ...]`` and has ``forward(hidden_states, top_k_index, top_k_weights)``.
Cut to the local slots and called with one choice per row and weight 1, its own code (eager, grouped_mm, ...) computes
the rows that arrive here, whatever the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...moe.layer import ExpertParallelLayer
from ..attaching.description import AttachError, End, HostModel, MoELayer, refusing, spread_of
from ..attaching.expert_spans import mark_calls
from . import folders
from .adapters import (
    AdaptedExperts,
    adapted_experts,
    detached_state,
    follow,
    peft_model,
)
from .compute import RowCompute
from .folders import weights

_PART = (
    "experts are spread over ranks, and this model is only a part of what was attached: save the adapters "
    "(save_pretrained of PEFT's model) and merge them into the model that you started from, in a process of its own"
)
"""Of PEFT's base, adapters merged or not."""


def describe(model: nn.Module) -> HostModel:
    """Return the MoE layers of ``model`` in model order, and the padding of its batches."""
    if any(getattr(module, "_is_expert_parallel", False) for module in model.modules()):
        from .expert_parallel import describe_spread

        return describe_spread(model, _Padding())
    adapted = dict(adapted_experts(model, follows_experts_interface))
    inside = {id(one.experts) for one in adapted.values()}
    layers = tuple(
        _describe_layer(name, module, adapted.get(name))
        for name, module in model.named_modules()
        if name in adapted or (follows_experts_interface(module) and id(module) not in inside)
    )
    padding = _Padding()
    with_adapters = [(layer, adapted[layer.name]) for layer in layers if layer.name in adapted]
    return HostModel(
        layers,
        padding.real_tokens,
        lambda: padding.watch(model, padding.see),
        getattr(model, "_init_weights", lambda module: None),
        lambda balancer: _save_together(model, with_adapters, balancer.runtime.barrier),
        folders,
        adapters=frozenset(f"{layer.name}.{name}" for layer, one in with_adapters for name in one.parameters),
        weights=weights,
    )


def watched(model: nn.Module) -> HostModel:
    """The MoE layers of ``model`` in model order, also of one that could not be balanced."""
    padding = _Padding()
    found = [(name, module) for name, module in model.named_modules() if follows_experts_interface(module)]
    layers = tuple(_watched_layer(name, module) for name, module in found)
    return HostModel(layers, padding.real_tokens, lambda: padding.watch(model, padding.see))


def _watched_layer(name: str, experts: nn.Module) -> MoELayer:
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    first = next(experts.parameters(recurse=False), None)
    rows = num_experts if first is None or not first.ndim else int(first.shape[0])
    ep_size = max(1, rows // num_experts)  # by the library, whose tensors then count all experts on each rank
    return MoELayer(
        name,
        experts,
        num_experts * ep_size,
        watch=partial(_see_choices, experts),
        mark_work=partial(mark_calls, experts, "forward"),
        experts_here=rows,
        ep_size=ep_size * (ep_size > 1),
    )


def _see_choices(experts: nn.Module, see: Callable[[Tensor, int, int], None]) -> End:
    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        chosen = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        see(chosen, hidden.shape[-1], chosen.shape[-1])

    return experts.register_forward_pre_hook(before_forward, with_kwargs=True).remove


def follows_experts_interface(module: nn.Module) -> bool:
    """Return whether the library's ``use_experts_implementation`` decorator made this module's class."""
    return all(hasattr(module, name) for name in ("num_experts", "has_gate", "is_transposed", "_is_expert_parallel"))


def _describe_layer(name: str, outer: nn.Module, adapted: AdaptedExperts | None) -> MoELayer:
    """``outer``: the experts module, or the outermost adapter around it."""
    experts = outer if adapted is None else adapted.experts
    path = "" if adapted is None else adapted.path
    num_experts = int(experts.num_experts)  # type: ignore[arg-type]
    if nn.utils.parametrize.is_parametrized(experts):
        raise AttachError(
            f"the weights of {name} are parametrized: what makes them would not move along; remove the "
            "parametrizations first"
        )
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
    compute = RowCompute(experts, names, () if adapted is None else adapted.low_rank)

    def install(layer: ExpertParallelLayer) -> None:
        def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            return layer(hidden_states, top_k_index, top_k_weights)

        outer.forward = forward  # type: ignore[method-assign]

    return MoELayer(
        name=name,
        experts=outer,
        num_experts=num_experts,
        parameters=(*(path + key for key in names), *(() if adapted is None else adapted.parameters)),
        compute=compute,
        install=install,
        by_expert={} if adapted is None or spread is not None else adapted.by_expert(),
        run=outer.forward,
        watch=partial(_see_choices, outer) if adapted is None else None,
    )


def _save_together(
    model: nn.Module, adapted: Sequence[tuple[MoELayer, AdaptedExperts]], barrier: Callable[[str], None]
) -> None:
    """``save_pretrained`` of an attached model writes all of it, from all ranks."""
    for inner in model.modules():
        if inner is not model and isinstance(inner, PreTrainedModel):
            object.__setattr__(inner, "save_pretrained", refusing(_PART))
    if adapted:
        follow(model, adapted)
        return
    if not isinstance(model, PreTrainedModel):
        # PEFT's folders hold adapters, which are whole on every rank.
        if (found := peft_model(model)) is not None:
            object.__setattr__(found[1], "save_pretrained", partial(_save_adapters, found[1], found[1].save_pretrained))
        return
    own = model.save_pretrained

    def save_pretrained(save_directory: str | Path, is_main_process: bool = True, **options: Any) -> None:
        """As the library's, in logical order. Collective: every rank calls it, whatever ``is_main_process`` is."""
        from ...checkpoint import export_pretrained

        if getattr(model, "_hf_peft_config_loaded", False):
            _save_adapters(model, own, save_directory, is_main_process=is_main_process, **options)
            return
        barrier("save_pretrained of an attached model")
        export_pretrained(model, save_directory, **options)

    object.__setattr__(model, "save_pretrained", save_pretrained)


def _save_adapters(model: nn.Module, own: Any, *arguments: Any, **options: Any) -> None:
    """Call a library's ``save_pretrained``, which writes adapters alone, without a warning of what is no whole."""
    own(*arguments, **{**options, "state_dict": options.get("state_dict") or detached_state(model.state_dict)})


class _Padding:
    """Remembers the attention mask of the batch that a thread runs, so that padding does not count as load."""

    def __init__(self) -> None:
        self._masks = threading.local()

    @torch.compiler.disable
    def see(self, mask: Tensor | None) -> None:
        """The mask of the batch that this thread runs now."""
        self._masks.now = mask

    def watch(self, model: nn.Module, see: Callable[[Tensor | None], None]) -> End:
        """Look at what each forward of the model is given, from now on; what runs outside of one has no mask."""

        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
            see(mask if isinstance(mask, Tensor) and mask.ndim == 2 else None)

        before = model.register_forward_pre_hook(before_forward, with_kwargs=True)
        after = model.register_forward_hook(lambda *_: see(None), always_call=True)

        def remove() -> None:
            before.remove()
            after.remove()

        return remove

    def real_tokens(self, tokens: int) -> Tensor | None:
        """bool ``[T]``; with a key-value cache the mask is longer than the batch, whose tokens are its last columns."""
        mask: Tensor | None = getattr(self._masks, "now", None)
        if mask is None or tokens % mask.shape[0] or tokens // mask.shape[0] > mask.shape[1]:
            return None
        return mask[:, mask.shape[1] - tokens // mask.shape[0] :].to(torch.bool).reshape(-1)
