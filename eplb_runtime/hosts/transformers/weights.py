"""The library's checkpoint folders, as `checkpoint.weights.PretrainedFolders`; read into an attached model, each rank
its own experts and no others, and written.

Names are the library's business: checkpoints that name each expert (``mlp.experts.3.gate_proj.weight``) or that differ
otherwise go through its own conversion mapping, with this rank's experts in the place of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization._base import parse_size_to_int
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

from ...checkpoint.disk import remove_own, write_tensors
from ...checkpoint.restore import Saved
from ...checkpoint.state import CheckpointError, JointAccess, LogicalView
from ...checkpoint.stream import TensorList, brought
from ...checkpoint.weights import TensorSpec
from ...distributed.ranks import Job
from ...utils.files import write_file
from .adapters import is_saved_with_adapters
from .naming import folder_weights
from .naming import stored_names as names
from .naming import write_config as describe

__all__ = ["PretrainedFolder", "describe", "names", "opened", "write"]


@dataclass
class _Target:
    """A parameter to be, the transform that makes it, and where its parts are: ``{source pattern: [(key, slice)]}``."""

    transform: WeightTransform
    sources: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


class PretrainedFolder(Saved):
    """A folder that ``from_pretrained`` reads (safetensors); experts are read and converted one at a time."""

    optimizers = ()
    balancer = None

    def __init__(self, view: LogicalView, folder: Path) -> None:
        self.name, self._view = str(folder), view
        live = {entry.name: entry for entry in view.entries("model")}
        self._targets = _targets(view.model, _slices(_files(folder)), live)
        self._target_of: dict[str, tuple[str, str, bool]] = {}
        self._last: tuple[Any, dict[str, Tensor]] = (None, {})
        self.tensors: dict[str, TensorSpec] = {}
        keys_of: dict[int, list[str]] = {}  # tied tensors have several
        for entry in live.values():
            keys_of.setdefault(id(entry.tensor), []).append(entry.key)
        for name in self._targets:
            spread = live[name].layer is not None
            for made, value in self._converted(name, 0 if spread else None, _Described).items():
                if made not in live:
                    raise CheckpointError(f"{folder}: {made} has no place in the model")
                shape = (view.num_experts * value.shape[0], *value.shape[1:]) if spread else tuple(value.shape)
                for key in keys_of[id(live[made].tensor)]:
                    self._target_of[key], self.tensors[key] = (name, made, spread), TensorSpec(shape, value.dtype)
        if missing := sorted(entry.name for entry in live.values() if entry.key not in self.tensors):
            raise CheckpointError(f"{folder} lacks {missing[0]} ({len(missing)} such weights)")

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        """`Saved.read_block`, of one expert at most."""
        name, made, spread = self._target_of[key]
        expert = offsets[0] if spread else None
        if self._last[0] != (name, expert):
            self._last = (None, {})
            self._last = (name, expert), self._converted(name, expert)
        begin = offsets if expert is None else (0, *offsets[1:])
        value = self._last[1][made]
        block.copy_(value[tuple(slice(at, at + size) for at, size in zip(begin, block.shape, strict=True))])

    def _converted(
        self, name: str, expert: int | None, read: Callable[[Any], Any] = lambda part: part
    ) -> dict[str, Tensor]:
        """What the library makes of all sources of a parameter, or of one expert's part ``[1, ...]`` of each."""
        target, model = self._targets[name], self._view.model
        transform = deepcopy(target.transform)
        for pattern, found in target.sources.items():
            if expert is None:
                tensors = [read(part)[:] for _, part in found]
            else:
                tensors = [_of_expert(self._view, pattern, found, expert, read)]
            for tensor in tensors:
                transform.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]
        made = transform.convert(name, model=model, config=model.config)  # type: ignore[attr-defined]
        return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


opened = PretrainedFolder


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    raise CheckpointError(f"{folder} has no model.safetensors and no model.safetensors.index.json")


def _slices(files: Iterable[Path]) -> list[tuple[str, Any]]:
    """``(key, slice)`` of all files, in natural order, nothing read yet."""
    found: list[tuple[str, Any]] = []
    for file in files:
        try:
            opened: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        found.extend((key, opened.get_slice(key)) for key in opened.keys())  # noqa: SIM118
    return sorted(found, key=lambda item: dot_natural_key(item[0]))


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
    """In place of a slice of a file that is not read: shapes only."""

    def __init__(self, part: Any) -> None:
        self._tensor = torch.empty(part.get_shape(), device="meta")

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


def _of_expert(
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


# -- writing: the first rank writes what comes to it, and holds a shard on the host, on top of a bucket of the stream --


_NOT_HERE = {
    "push_to_hub": "upload the folder when it is written",
    "distributed_checkpoint": "use checkpoint.save",
    "state_dict": "the model's own weights are written",
    "is_main_process": "every rank takes part",
}


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would. Collective."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    assert view.balancer is not None
    job = view.balancer.runtime.job
    _refuse(view, job)
    size = options.pop("max_shard_size", "5GB")
    shard_bytes = parse_size_to_int(size) if isinstance(size, str) else size  # as save_pretrained understands it
    variant = options.pop("variant", None)
    weights = folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    tensors, joint = TensorList(view.balancer, {job.stages[0]: weights}), JointAccess.of(view)
    token, failed = joint.new_token(), f"{folder} was not exported"
    parts = (("model", *named) for named in brought(tensors, [joint.ranks[0]] * len(tensors.pieces)))
    on_host = ((part, name, value.cpu()) for part, name, value in parts)
    try:
        files = joint.together(failed, lambda: write_tensors(folder, joint.number, token, on_host, shard_bytes))
        joint.on_first(failed, lambda: _finish(view, tensors, files, folder, variant, options))
    except BaseException:
        remove_own(folder, joint.number, token)
        raise


def _refuse(view: LogicalView, job: Job) -> None:
    model = view.model
    if not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} has no save_pretrained: use checkpoint.save")
    if is_saved_with_adapters(model):
        raise CheckpointError(
            "the model has adapters, and its folders hold nothing else: call its own save_pretrained, on every rank"
        )
    if len(job.stage_sets) > 1 or len(job.stages) > 1:
        raise CheckpointError("a pipeline stage is no whole model: use checkpoint.save")


def _finish(
    view: LogicalView,
    tensors: TensorList,
    files: Mapping[str, Sequence[str]],
    folder: Path,
    variant: str | None,
    options: Mapping[str, Any],
) -> None:
    """Give whole files the library's names, and write the rest of the folder: the index last, and an old one goes
    first, so in between nothing loads."""
    end = f".{variant}" if variant else ""
    index, alone = folder / f"model.safetensors.index{end}.json", folder / f"model{end}.safetensors"
    for old in (index, alone):
        old.unlink(missing_ok=True)
    # Configuration and the like by the library, which also clears old shards away.
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, variant=variant, **options)  # type: ignore[attr-defined]
    if len(files) == 1:
        (folder / next(iter(files))).rename(alone)
        return
    file_of: dict[str, str] = {}
    for number, (file, inside) in enumerate(files.items(), start=1):
        name = f"model{end}-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file).rename(folder / name)
        file_of |= dict.fromkeys(inside, name)
    parameters = {id(entry.tensor): view.whole_size(entry).numel() for entry in view.entries("model")}
    own = {id(parameter) for parameter in view.parameters.values()}
    metadata = {
        "total_parameters": sum(number for key, number in parameters.items() if key in own),
        "total_size": sum(piece.spec.nbytes for piece in tensors.pieces),
    }
    write_file(index, json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2, sort_keys=True) + "\n")
