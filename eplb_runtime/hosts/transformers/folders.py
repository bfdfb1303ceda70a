"""Hugging Face folders of an attached model, as `checkpoint.state.PretrainedFolders`: names, writing and reading, each
rank its own experts and no others, a piece at a time.

Names are the library's business. It turns a whole state dict into the folder's names and shapes, all at once
(`revert_weight_conversion`); here it is asked with tensors on the meta device, which have no memory, to learn which
tensor becomes what. Folders that name each expert (``mlp.experts.3.gate_proj.weight``) or differ otherwise are read
through its own conversion mapping, with one expert in the place of all. Nothing is known of any model family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization._base import parse_size_to_int
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ...checkpoint.disk import remove_own, write_tensors
from ...checkpoint.state import CheckpointError, Entry, JointAccess, LogicalView, Saved, Stored, TensorSpec, why_merged
from ...checkpoint.stream import TensorList, Weight, brought, weights_of
from ...distributed.ranks import Job
from ...utils.files import write_file
from .adapters import is_saved_with_adapters

State = dict[str, Tensor]
Convert = Callable[[State], State]
_INDEX, _ONE_FILE = "model.safetensors.index.json", "model.safetensors"
_NOT_HERE = {
    "push_to_hub": "upload the folder when it is written",
    "distributed_checkpoint": "use checkpoint.save",
    "state_dict": "the model's own weights are written",
    "is_main_process": "every rank takes part",
    "variant": "rename the files when they are written",
}


# -- which tensor becomes what -----------------------------------------------------------------------------------------


def weights(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors as ``save_pretrained`` of the whole model would write them; of another module under its own names."""
    view = LogicalView(model)
    if problem := why_merged(view.model):
        raise CheckpointError(problem)
    return _folder_weights(view) if isinstance(view.model, PreTrainedModel) else weights_of(model, first_layer)


def _folder_weights(view: LogicalView, as_in_model: bool = False) -> list[Weight]:
    """The tensors of the library's folders, or under the model's own names, each with what it is made of. A quantised
    model is refused, and one of which the tensors would not make the folder that the whole model makes."""
    if getattr(view.model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantised: load it with dequantize=True to export it")
    entries, convert = _saved_entries(view), partial(_by_library, view.model, as_in_model)
    described = {name: view.spec_of(entry) for name, entry in entries.items()}
    whole = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in described.items()}
    by_library = convert(dict(whole))
    made = _specs(by_library)
    name_of = {id(tensor): name for name, tensor in whole.items()}
    renamed = {name_of[id(tensor)]: key for key, tensor in by_library.items() if id(tensor) in name_of}
    found, joined = [], []
    for name, entry in entries.items():
        if name in renamed:
            key, spread = renamed[name], entry.layer is not None
            rename = partial(_change, (name if spread else key,), dict)
            rows = {name: key} if spread else None
            spec = {key: made[key]}
            found.append(Weight((entry.tensor,), entry.layer, spec, rows, rename, names=(name,), keeps_values=True))
            continue
        alone = _specs(convert({name: whole[name]}))
        if any(made.get(key) != spec for key, spec in alone.items()):
            joined.append(name)
            continue
        by_expert = _by_expert(name, whole[name], alone, convert) if entry.layer is not None else None
        change = partial(_change, (name,), convert)
        found.append(Weight((entry.tensor,), entry.layer, alone, by_expert, change, names=(name,)))
    if joined:
        sources = tuple(entries[name].tensor for name in joined)
        specs = _specs(convert({name: whole[name] for name in joined}))
        change, layer = partial(_change, tuple(joined), convert), entries[joined[0]].layer
        found.append(Weight(sources, layer, specs, None, change, names=tuple(joined)))
    together = {key: spec for weight in found for key, spec in weight.made.items()}
    if together != made or sum(len(weight.made) for weight in found) != len(made):
        odd = sorted(set(made) ^ set(together)) or sorted(made)
        raise CheckpointError(
            f"the library's conversion of this model cannot be done a tensor at a time ({odd[0]}): use checkpoint.save"
        )
    _check_experts(found, whole, convert)
    return found


def _saved_entries(view: LogicalView) -> dict[str, Entry]:
    """The model's tensors that ``save_pretrained`` would save: tied ones once, under the name that it would take."""
    entries = {entry.name: entry for entry in view.entries("model")}
    for name in getattr(view.model, "_keys_to_ignore_on_save", None) or ():
        entries.pop(name, None)
    one_each = {id(entry.tensor): torch.empty(1) for entry in entries.values()}
    kept = remove_tied_weights_from_state_dict(
        {name: one_each[id(entry.tensor)] for name, entry in entries.items()},
        view.model,  # type: ignore[arg-type]
    )
    return {name: entries[name] for name in kept}


def _by_library(model: nn.Module, as_in_model: bool, state: State) -> State:
    """The library's own way back from the model's names to the folder's."""
    return state if as_in_model else revert_weight_conversion(model, state)  # type: ignore[arg-type]


def _change(names: Sequence[str], convert: Convert, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return convert(dict(zip(names, values, strict=True)))


def _specs(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}


def _by_expert(name: str, stack: Tensor, made: Mapping[str, TensorSpec], convert: Convert) -> Mapping[str, str] | None:
    """Where each expert of a stack goes: to tensors with its number in their names, or to rows; None: neither."""
    experts, one = stack.shape[0], _specs(convert({name: stack[:1]}))
    if one.keys() == made.keys():
        rows = all(
            spec.shape[:1] == (1,) and made[key] == TensorSpec((experts, *spec.shape[1:]), spec.dtype)
            for key, spec in one.items()
        )
        return {key: key for key in one} if rows else None
    numbered = {key: _numbered(key, experts, spec, made) for key, spec in one.items()}
    return numbered if len(made) == experts * len(one) and all(numbered.values()) else None


def _numbered(first: str, count: int, spec: TensorSpec, made: Mapping[str, TensorSpec]) -> str:
    """``experts.0.w1`` -> ``experts.*.w1``: the number whose successors are all made alike; empty: there is none."""
    for match in re.finditer(r"\b0\b", first):
        name = f"{first[: match.start()]}*{first[match.end() :]}"
        if all(made.get(name.replace("*", str(number))) == spec for number in range(count)):
            return name
    return ""


def _check_experts(found: Iterable[Weight], whole: Mapping[str, Tensor], convert: Convert) -> None:
    """Two experts of nothing but 0 and 1 must arrive under these numbers; once for each parameter of a layer."""
    seen = set()
    for weight in found:
        name = weight.names[0]
        kind, row = name.rpartition(".")[2], whole[name].shape[1:]
        if weight.by_expert is None or weight.keeps_values or kind in seen or len(whole[name]) < 2:
            continue
        seen.add(kind)
        numbers = torch.arange(2, dtype=torch.uint8).view(2, *(1 for _ in row)).expand(2, *row)
        made = convert({name: numbers})
        for expert in range(2):
            for _, key, at in weight.places_of(expert):
                if key not in made or not bool((made[key] if at is None else made[key][at]).eq(expert).all()):
                    raise CheckpointError(f"the library's conversion of {name} mixes experts: use checkpoint.save")


# -- folders of `checkpoint.save`, that the library reads too ----------------------------------------------------------


def names(view: LogicalView) -> dict[str, Stored]:
    """How the library's folders store tensors of the model, by name: those that it renames or cuts into parts.

    Experts that its folders store stacked are left out, and what it changes otherwise.
    """
    if not isinstance(view.model, PreTrainedModel):
        return {}
    try:
        listed = _folder_weights(view)
    except CheckpointError:
        return {}
    found: dict[str, Stored] = {}
    cuts: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int] | None] = {}
    for weight in listed:
        name, spread = weight.names[0], weight.layer is not None
        keys = tuple(weight.made) if weight.by_expert is None else tuple(weight.by_expert.values())
        if len(weight.names) > 1 or (spread and not all("*" in one for one in keys)):
            continue
        if weight.keeps_values:
            found[name] = Stored(keys)
            continue
        parameter = view.parameters[name]
        kind = name.rpartition(".")[2], tuple(parameter.shape)[int(spread) :]
        if kind not in cuts:
            cuts[kind] = _cut_by(partial(_parts, weight, spread), kind[1])
        cut = cuts[kind]
        if cut is not None and len(keys) == max(1, len(cut[0])):
            found[name] = Stored(keys, view.num_experts if spread else 0, *cut)
    return found


def _parts(weight: Weight, spread: bool, value: Tensor) -> list[Tensor]:
    return list(weight.convert([value.unsqueeze(0) if spread else value]).values())


def _cut_by(
    convert: Callable[[Tensor], Sequence[Tensor]], shape: tuple[int, ...]
) -> tuple[tuple[int, ...], int] | None:
    """Return sizes and dimension of the parts, in order, that a conversion makes of a tensor; None: it is no cut."""
    # Each element says where it is along one dimension, without memory for all of them.
    places = [
        torch.arange(length, dtype=torch.int32).view(-1, *(1 for _ in shape[dim + 1 :])).expand(shape)
        for dim, length in enumerate(shape)
    ]
    made = [convert(each) for each in places]
    for dim in range(len(shape)):
        sizes = tuple(part.shape[dim] if part.ndim == len(shape) else 0 for part in made[dim])
        if sum(sizes) == shape[dim] and all(
            all(torch.equal(part, own) for part, own in zip(parts, each.split(list(sizes), dim), strict=True))
            for parts, each in zip(made, places, strict=True)
        ):
            return (sizes if len(sizes) > 1 else ()), dim
    return None


def describe(view: LogicalView, folder: Path) -> None:
    """Write the ``config.json`` that ``from_pretrained`` reads with the weights; none of a model with adapters."""
    model = view.model
    if isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        write_file(folder / "config.json", config.to_json_string())


# -- writing -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would. Collective; all comes to the first rank, which holds a
    shard on the host, and two stacks, on top of a bucket of the stream."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    balancer = view.balancer
    assert balancer is not None
    _refuse(view, balancer.runtime.job)
    size = options.pop("max_shard_size", "5GB")
    shard_bytes = parse_size_to_int(size) if isinstance(size, str) else size  # as save_pretrained understands it
    listed = _folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    tensors = TensorList(balancer, {balancer.runtime.job.stages[0]: listed})
    joint, failed = JointAccess.of(view), f"{folder} was not exported"
    token = joint.new_token()
    to = [joint.ranks[0]] * len(tensors.pieces)
    parts = (("model", name, value.cpu()) for name, value in brought(tensors, to))
    try:
        files = joint.together(failed, lambda: write_tensors(folder, joint.number, token, parts, shard_bytes))
        joint.on_first(failed, lambda: _finish(view, tensors, files, folder, options))
    except BaseException:
        remove_own(folder, joint.number, token)
        raise


def _refuse(view: LogicalView, job: Job) -> None:
    if not hasattr(view.model, "save_pretrained"):
        raise CheckpointError(f"{type(view.model).__name__} has no save_pretrained: use checkpoint.save")
    if is_saved_with_adapters(view.model):
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
    options: Mapping[str, Any],
) -> None:
    """Give whole files the library's names, and write the rest of the folder; in between nothing loads."""
    for name in (_INDEX, _ONE_FILE):
        (folder / name).unlink(missing_ok=True)
    # Configuration and the like by the library, which also clears old shards away.
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, **options)  # type: ignore[attr-defined]
    file_of: dict[str, str] = {}
    for number, (file, keys) in enumerate(files.items(), start=1):
        final = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else _ONE_FILE
        (folder / file).rename(folder / final)
        file_of |= dict.fromkeys(keys, final)
    if len(files) == 1:
        return
    numels = {id(entry.tensor): torch.Size(view.spec_of(entry).shape).numel() for entry in view.entries("model")}
    metadata = {
        "total_parameters": sum(numels[key] for key in {id(one) for one in view.parameters.values()} & numels.keys()),
        "total_size": sum(piece.spec.nbytes for piece in tensors.pieces),
    }
    index = {"metadata": metadata, "weight_map": file_of}
    write_file(folder / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class _Target:
    """A parameter to be, the transform that makes it, and where its parts are: ``{source pattern: [(key, slice)]}``."""

    transform: WeightTransform
    sources: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)


class PretrainedFolder(Saved):
    """A folder that ``from_pretrained`` reads (safetensors); experts are read and converted one at a time."""

    def __init__(self, view: LogicalView, folder: Path) -> None:
        self.name, self._view = str(folder), view
        live = {entry.name: entry for entry in view.entries("model")}
        self._targets = _targets(view.model, _slices(_files(folder)), live)
        self._target_of: dict[str, tuple[str, str, bool]] = {}
        self._last: tuple[Any, Mapping[str, Tensor]] = (None, {})
        self.tensors: dict[str, TensorSpec] = {}
        keys_of: dict[int, list[str]] = {}  # tied tensors have several
        for entry in live.values():
            keys_of.setdefault(id(entry.tensor), []).append(entry.key)
        for name in self._targets:
            spread = live[name].layer is not None
            for made, value in self._converted(name, 0 if spread else None, _described).items():
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
            self._last = (name, expert), self._converted(name, expert, lambda part: part)
        begin = offsets if expert is None else (0, *offsets[1:])
        value = self._last[1][made]
        block.copy_(value[tuple(slice(at, at + size) for at, size in zip(begin, block.shape, strict=True))])

    def _converted(self, name: str, expert: int | None, read: Callable[[Any], Any]) -> dict[str, Tensor]:
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


def _described(part: Any) -> Tensor:
    """In place of a slice of a file that is not read: shapes only."""
    return torch.empty(part.get_shape(), device="meta")


def _files(folder: Path) -> list[Path]:
    if (folder / _INDEX).exists():
        return [folder / name for name in sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))]
    if (folder / _ONE_FILE).exists():
        return [folder / _ONE_FILE]
    raise CheckpointError(f"{folder} has no {_ONE_FILE} and no {_INDEX}")


def _slices(files: Iterable[Path]) -> list[tuple[str, Any]]:
    """``(key, slice)`` of all files, in natural order, nothing read yet."""
    found: list[tuple[str, Any]] = []
    for file in files:
        try:
            content: Any = safe_open(file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from None
        found.extend((key, content.get_slice(key)) for key in content.keys())  # noqa: SIM118
    return sorted(found, key=lambda item: dot_natural_key(item[0]))


def _targets(model: nn.Module, slices: Iterable[tuple[str, Any]], live: Mapping[str, Entry]) -> dict[str, _Target]:
    """Which parameter each key goes to, by the library's rules (as in its convert_and_load_state_dict_in_model)."""
    mapping: list[WeightTransform] = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    tensors = {name: entry.tensor for name, entry in live.items()}
    targets: dict[str, _Target] = {}
    for key, part in slices:
        name, pattern = rename_source_key(key, renamings, converters, prefix, tensors)
        if name not in tensors and key in tensors:
            name, pattern = rename_source_key(key, [], [], prefix, tensors)
        if name not in tensors:
            continue  # as from_pretrained does: weights that this model has no use for
        made_by: WeightTransform = by_pattern[pattern] if pattern is not None else WeightRenaming(key, name)
        target = targets.setdefault(name, _Target(made_by))
        target.sources.setdefault(pattern if pattern is not None else key, []).append((key, part))
    return targets


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
