"""Hugging Face folders: written whole from an attached model, read by each rank for its own experts only.

Names are the library's business: checkpoints that name each expert (``mlp.experts.3.gate_proj.weight``) or that differ
otherwise go through its own conversion mapping, with this rank's experts in the place of all.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ...checkpoint.state import CheckpointError, LogicalView, part_here
from ...experts.slices import local


def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would; rank 0 writes."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    whole: dict[str, Tensor] = {}
    copies: dict[int, Tensor] = {}
    for entry in view.tensors():
        tensor = entry.tensor.detach()
        if entry.layer is not None and view.balancer is not None:
            tensor = view.balancer.gather_experts(entry.layer, tensor)
        elif isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        if first:
            # Tied weights stay one tensor under two names, as the library wants to see them.
            whole[entry.name] = copies.setdefault(id(entry.tensor), tensor.to("cpu", copy=True))
    if first:
        view.model.save_pretrained(str(folder), state_dict=whole, **options)  # type: ignore[operator]
    if dist.is_initialized():
        dist.barrier()


@dataclass
class _Target:
    """A parameter to be, the transform that makes it, and where its parts are: ``{source pattern: [(key, slice)]}``."""

    transform: WeightTransform
    sources: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


@torch.no_grad()
def read(view: LogicalView, folder: Path) -> None:
    """Read a folder that ``from_pretrained`` reads (safetensors); weights are cast to the model's dtype."""
    live = {entry.name: entry for entry in view.tensors()}
    with ExitStack() as stack:
        targets = _targets(view.model, _slices(_files(folder), stack), live)
        loaded: set[int] = set()
        for name, target in targets.items():
            layer = live[name].layer
            if layer is None:
                parts = {pattern: [part[:] for _, part in found] for pattern, found in target.sources.items()}
            else:
                parts = {
                    pattern: _own_experts(view, layer, pattern, found) for pattern, found in target.sources.items()
                }
            for made, value in _convert(target.transform, name, parts, view.model).items():
                if made not in live:
                    raise CheckpointError(f"{folder}: {made} has no place in the model")
                tensor = live[made].tensor
                if value.shape != tensor.shape:
                    raise CheckpointError(f"{folder}: {made} has shape {tuple(value.shape)}, not {tuple(tensor.shape)}")
                local(tensor).copy_(part_here(value, tensor))
                loaded.add(id(tensor))
    missing = sorted(name for name, entry in live.items() if id(entry.tensor) not in loaded)
    if missing:
        raise CheckpointError(f"{folder} lacks {missing[0]} ({len(missing)} such weights)")
    view.weights_changed()


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    raise CheckpointError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _slices(files: Iterable[Path], stack: ExitStack) -> Iterator[tuple[str, Any]]:
    """``(key, slice)`` of all files, in natural order, nothing read yet."""
    found: list[tuple[str, Any]] = []
    for file in files:
        try:
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        found.extend((key, opened.get_slice(key)) for key in opened.keys())  # noqa: SIM118
    return iter(sorted(found, key=lambda item: dot_natural_key(item[0])))


def _targets(model: nn.Module, slices: Iterable[tuple[str, Any]], live: dict[str, Any]) -> dict[str, _Target]:
    """Which parameter each key goes to, by the library's rules (as in its convert_and_load_state_dict_in_model)."""
    mapping: list[WeightTransform] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    names = {name: entry.tensor for name, entry in live.items()}
    targets: dict[str, _Target] = {}
    for key, part in slices:
        name, pattern = rename_source_key(key, renamings, converters, prefix, names)
        if name not in names and key in names:
            name, pattern = rename_source_key(key, [], [], prefix, names)
        if name not in names:
            continue  # as from_pretrained does: weights that this model has no use for
        made_by: WeightTransform = deepcopy(by_pattern[pattern]) if pattern is not None else WeightRenaming(key, name)
        target = targets.setdefault(name, _Target(made_by))
        target.sources.setdefault(pattern if pattern is not None else key, []).append((key, part))
    return targets


def _own_experts(view: LogicalView, layer: int, pattern: str, found: list[tuple[str, Any]]) -> list[Tensor]:
    """The part of a source that this rank's experts need: one tensor per expert, or rows of one for all."""
    experts = view.experts_here(layer)
    if len(found) == view.num_experts and "*" in pattern:
        return [found[expert][1][:] for expert in experts]
    key, part = found[0]
    if len(found) == 1 and list(part.get_shape())[:1] == [view.num_experts]:
        return [torch.cat([part[expert : expert + 1] for expert in experts])]
    raise CheckpointError(
        f"{key} belongs to experts but is neither one tensor for each of the {view.num_experts} nor one for all with "
        "them in its first dimension: load the model with from_pretrained before attach"
    )


def _convert(
    transform: WeightTransform, name: str, parts: dict[str, list[Tensor]], model: nn.Module
) -> dict[str, Tensor]:
    for pattern, tensors in parts.items():
        for tensor in tensors:
            transform.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]
    made = transform.convert(name, model=model, config=model.config)  # type: ignore[attr-defined]
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
