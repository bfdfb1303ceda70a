"""Read a Hugging Face folder into an attached model: each rank its own experts and no others.

Names are the library's business: checkpoints that name each expert (``mlp.experts.3.gate_proj.weight``) or that differ
otherwise go through its own conversion mapping, with this rank's experts in the place of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ...checkpoint.state import CheckpointError, Entry, LogicalView
from ...moe.experts.slices import columns, is_sliced, local


@dataclass
class _Target:
    """A parameter to be, the transform that makes it, and where its parts are: ``{source pattern: [(key, slice)]}``."""

    transform: WeightTransform
    sources: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


@torch.no_grad()
def read(view: LogicalView, folder: Path) -> None:
    """Read a folder that ``from_pretrained`` reads (safetensors); weights are cast to the model's dtype.

    Names and shapes are checked before the first weight is written; experts are read and converted one at a time.
    """
    live = {entry.name: entry for entry in view.entries("model")}
    with ExitStack() as stack:
        targets = _targets(view.model, _slices(_files(folder), stack), live)
        loaded: set[int] = set()
        for name, target in targets.items():
            experts = None if live[name].layer is None else 0
            for made, value in _convert(target, name, _sources(view, target, experts, _Described), view.model).items():
                if made not in live:
                    raise CheckpointError(f"{folder}: {made} has no place in the model")
                wanted = _wanted(live[made], experts)
                if value.shape != wanted:
                    raise CheckpointError(f"{folder}: {made} has shape {tuple(value.shape)}, not {tuple(wanted)}")
                loaded.add(id(live[made].tensor))
        if missing := sorted(name for name, entry in live.items() if id(entry.tensor) not in loaded):
            raise CheckpointError(f"{folder} lacks {missing[0]} ({len(missing)} such weights)")
        for name, target in targets.items():
            layer = live[name].layer
            rows = [(None, None)] if layer is None else list(enumerate(view.experts_here(layer)))
            for row, expert in rows:
                for made, value in _convert(target, name, _sources(view, target, expert), view.model).items():
                    _put(view, live[made], row, value)
    view.weights_changed()


def _wanted(entry: Entry, expert: int | None) -> torch.Size:
    size = entry.tensor.shape
    return size if expert is None else torch.Size([1, *size[1:]])


def _put(view: LogicalView, entry: Entry, row: int | None, value: Tensor) -> None:
    """Write a whole tensor, or one expert's row ``[1, ...]`` of it, or this rank's slice of either."""
    if row is not None:
        local(entry.tensor)[row].copy_(value[0, columns(entry.tensor)] if is_sliced(entry.tensor) else value[0])
        return
    for offsets, block in view.blocks_of(entry):
        block.copy_(value[tuple(slice(at, at + size) for at, size in zip(offsets, block.shape, strict=True))])


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
        made_by: WeightTransform = by_pattern[pattern] if pattern is not None else WeightRenaming(key, name)
        target = targets.setdefault(name, _Target(made_by))
        target.sources.setdefault(pattern if pattern is not None else key, []).append((key, part))
    return targets


class _Described:
    """Stands for a slice of a file that is not read: shapes only."""

    def __init__(self, part: Any) -> None:
        self._tensor = torch.empty(part.get_shape(), device="meta")

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _sources(
    view: LogicalView, target: _Target, expert: int | None, read: Callable[[Any], Any] = lambda part: part
) -> dict[str, list[Tensor]]:
    """What a target is made of: all of its sources, or one expert's part of each."""
    if expert is None:
        return {pattern: [read(part)[:] for _, part in found] for pattern, found in target.sources.items()}
    return {pattern: [_expert(view, pattern, found, expert, read)] for pattern, found in target.sources.items()}


def _expert(
    view: LogicalView, pattern: str, found: list[tuple[str, Any]], expert: int, read: Callable[[Any], Any]
) -> Tensor:
    """One expert's part of a source, which has a tensor for each expert, or one for all with experts as its rows."""
    if len(found) == view.num_experts and "*" in pattern:
        one: Tensor = read(found[expert][1])[:]
        return one
    key, part = found[0]
    if len(found) == 1 and list(part.get_shape())[:1] == [view.num_experts]:
        row: Tensor = read(part)[expert : expert + 1]
        return row
    raise CheckpointError(
        f"{key} belongs to experts but is neither one tensor for each of the {view.num_experts} nor one for all with "
        "them in its first dimension: load the model with from_pretrained before attach"
    )


def _convert(target: _Target, name: str, parts: dict[str, list[Tensor]], model: nn.Module) -> dict[str, Tensor]:
    transform = deepcopy(target.transform)
    for pattern, tensors in parts.items():
        for tensor in tensors:
            transform.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]
    made = transform.convert(name, model=model, config=model.config)  # type: ignore[attr-defined]
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
