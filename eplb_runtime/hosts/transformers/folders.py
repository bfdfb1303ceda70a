"""Hugging Face folders of an attached model: names, writing and reading, each rank its own experts and no others, a
piece at a time. `checkpoint` calls `names`, `describe`, `write` and `opened`.

Names are the library's business. It turns a whole state dict into the folder's names and shapes, all at once
(`revert_weight_conversion`); here it is asked with tensors on the meta device, which have no memory, to learn which
tensor becomes what. Folders are read by the names that it would write. Nothing is known of any model family.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization._base import parse_size_to_int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ...checkpoint.disk import TensorFiles, remove, tensors_in, write_tensors
from ...checkpoint.state import CheckpointError, Entry, JointAccess, LogicalView, Saved, Stored, TensorSpec, why_merged
from ...checkpoint.stream import Weight, brought, weights_of
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


def weights(model: nn.Module, first_layer: int) -> list[Weight]:
    """Return tensors as ``save_pretrained`` of the whole model writes them; another module's under their own names.
    CheckpointError: merged adapters, a quantised model, or names that cannot be converted a tensor at a time."""
    view = LogicalView(model)
    if problem := why_merged(view.model):
        raise CheckpointError(problem)
    return _folder_weights(view) if isinstance(view.model, PreTrainedModel) else weights_of(model, first_layer)


def _folder_weights(view: LogicalView, as_in_model: bool = False) -> list[Weight]:
    """The tensors of the library's folders, or under the model's own names, each with what it is made of. A quantised
    model is refused, and one of which the tensors would not make the folder that the whole model makes."""
    if getattr(view.model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantised: load it with dequantize=True to export it")
    # The library's own way back from the model's names to the folder's.
    convert: Convert = dict if as_in_model else partial(revert_weight_conversion, view.model)  # type: ignore[arg-type]
    entries = _saved_entries(view)
    specs = {name: view.spec_of(entry) for name, entry in entries.items()}
    whole = {name: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for name, spec in specs.items()}
    by_library = convert(dict(whole))
    made = _specs(by_library)
    name_of = {id(tensor): name for name, tensor in whole.items()}
    renamed = {name_of[id(tensor)]: key for key, tensor in by_library.items() if id(tensor) in name_of}
    found: list[Weight] = []
    joined: dict[str, Tensor] = {}
    tried: dict[Any, bool] = {}
    for name, entry in entries.items():
        experts = view.num_experts if entry.layer is not None else 0
        if name in renamed:
            key = renamed[name]
            found.append(Weight({name: entry.tensor}, entry.layer, {key: made[key]}, Stored((key,), experts)))
            continue
        alone = _specs(convert({name: whole[name]}))
        if any(made.get(key) != spec for key, spec in alone.items()):
            joined[name] = entry.tensor
            continue
        by = _cut_by(name, whole[name], alone, experts, convert, tried) or convert
        found.append(Weight({name: entry.tensor}, entry.layer, alone, by))
    if joined:
        made_of = _specs(convert({name: whole[name] for name in joined}))
        found.append(Weight(joined, entries[next(iter(joined))].layer, made_of, convert))
    together = {key: spec for weight in found for key, spec in weight.made.items()}
    if together != made or sum(len(weight.made) for weight in found) != len(made):
        odd = sorted(set(made) ^ set(together)) or sorted(made)
        raise CheckpointError(
            f"the library's conversion of this model cannot be done a tensor at a time ({odd[0]}): use checkpoint.save"
        )
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


def _specs(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}


def _cut_by(
    name: str, whole: Tensor, made: Mapping[str, TensorSpec], experts: int, convert: Convert, tried: dict[Any, bool]
) -> Stored | None:
    """Return how a conversion cuts a tensor, or each expert of a stack, into parts; None: it does something else.
    ``tried``: what the same parameter of another layer has shown."""
    one = whole[0] if experts else whole
    parts = _specs(convert({name: whole[:1] if experts else whole}))
    names = tuple(_numbered(key, experts, spec, made) if experts else key for key, spec in parts.items())
    if not all(names) or len(made) != max(1, experts) * len(parts):
        return None
    for dim, length in enumerate(one.shape):
        sizes = tuple(spec.shape[dim] if len(spec.shape) == one.ndim else 0 for spec in parts.values())
        stored = Stored(names, experts, sizes if len(sizes) > 1 else (), dim)
        kind = re.sub(r"\d+", "*", name), one.shape, sizes, dim
        if sum(sizes) == length and kind not in tried:
            tried[kind] = all(_keeps_places(name, one, axis, stored, convert) for axis in range(one.ndim))
        if tried.get(kind):
            return stored
    return None


def _keeps_places(name: str, one: Tensor, axis: int, stored: Stored, convert: Convert) -> bool:
    """Return whether a conversion leaves each element where a cut leaves it, along one axis; four experts are tried."""
    few = min(4, stored.experts) or 1
    # Each element says of which expert it is and where, without memory for all of them.
    places = torch.arange(few * one.shape[axis], dtype=torch.int32)
    places = places.view(few, *[1] * axis, -1, *[1] * (one.ndim - axis - 1)).expand(few, *one.shape)
    made = convert({name: places if stored.experts else places[0]})
    wanted = {key: part for expert in range(few) for key, part in stored.cut(places[expert], expert)}
    return made.keys() == wanted.keys() and all(torch.equal(made[key], part) for key, part in wanted.items())


def _numbered(first: str, count: int, spec: TensorSpec, made: Mapping[str, TensorSpec]) -> str:
    """``experts.0.w1`` -> ``experts.*.w1``: the number whose successors are all made alike; empty: there is none."""
    for match in re.finditer(r"\b0\b", first):
        name = f"{first[: match.start()]}*{first[match.end() :]}"
        if all(made.get(name.replace("*", str(number))) == spec for number in range(count)):
            return name
    return ""


def names(view: LogicalView) -> dict[str, Stored]:
    """Return by name how the library's folders store each tensor, but for experts that stay stacked. {}: it is no model
    of the library, or cannot be exported."""
    if not isinstance(view.model, PreTrainedModel):
        return {}
    try:
        listed = _folder_weights(view)
    except CheckpointError:
        return {}
    found = {name: weight.by for weight in listed for name in weight.sources if isinstance(weight.by, Stored)}
    return {name: how for name, how in found.items() if not how.experts or "*" in how.names[0]}


def write_config(view: LogicalView, folder: Path) -> None:
    """Write ``config.json`` for ``from_pretrained`` into the folder. Write nothing of a model with PEFT adapters, or of
    a module that is no PreTrainedModel."""
    model = view.model
    if isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        write_file(folder / "config.json", config.to_json_string())


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write the folder that ``save_pretrained`` of the whole model would; ``options`` are its options. Collective; all
    tensors come to the first rank, which writes, with one shard in host memory. After a failure partial files are
    removed. CheckpointError: a model or an option that cannot be exported."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    balancer = view.balancer
    assert balancer is not None
    job = balancer.runtime.job
    if not hasattr(view.model, "save_pretrained"):
        raise CheckpointError(f"{type(view.model).__name__} has no save_pretrained: use checkpoint.save")
    if is_saved_with_adapters(view.model):
        raise CheckpointError(
            "the model has adapters, and its folders hold nothing else: call its own save_pretrained, on every rank"
        )
    if len(job.stage_sets) > 1 or len(job.stages) > 1:
        raise CheckpointError("a pipeline stage is no whole model: use checkpoint.save")
    size = options.pop("max_shard_size", "5GB")
    shard_bytes = parse_size_to_int(size) if isinstance(size, str) else size  # as save_pretrained understands it
    listed = _folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    joint, failed = JointAccess.of(view), f"{folder} was not exported"
    token, nbytes = joint.new_token(), sum(spec.nbytes for weight in listed for spec in weight.made.values())
    parts = (("model", name, value.cpu()) for name, value in brought(balancer, listed, joint, failed))
    try:
        files = joint.together(failed, lambda: write_tensors(folder, joint.number, token, parts, shard_bytes))
        joint.on_first(failed, lambda: _finish(view, nbytes, files, folder, options))
    except BaseException:
        remove(folder, f"*-{token}.*")
        raise


def _finish(view: LogicalView, nbytes: int, files: Mapping[str, Sequence[str]], folder: Path, options: Any) -> None:
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
    if len(files) > 1:
        index = {"metadata": {"total_size": nbytes}, "weight_map": file_of}
        write_file(folder / _INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def opened(view: LogicalView, folder: Path) -> Saved:
    """Open a folder of safetensors that ``from_pretrained`` reads, and return it for loading. CheckpointError: no such
    folder, quantised, more experts than the model, or a conversion that is more than renaming and cutting."""
    if not isinstance(view.model, PreTrainedModel):
        raise CheckpointError(f"{type(view.model).__name__} has no folders of the library: use checkpoint.load")
    files = tensors_in(folder, _files(folder), "model")
    listed: dict[str, Stored] = {}
    for weight in _folder_weights(view):
        by = weight.by
        if not isinstance(by, Stored):
            raise CheckpointError(
                f"{folder}: the library does more to {next(iter(weight.sources))} than rename and cut it: load the "
                "model with from_pretrained before attach"
            )
        # Experts under numbers, or stacked in one tensor.
        listed |= dict.fromkeys(weight.sources, by if not by.experts or "*" in by.names[0] else Stored(by.names))
    by_tensor: dict[int, list[Entry]] = {}  # tied tensors have several names, of which a folder has one
    for entry in view.entries("model"):
        by_tensor.setdefault(id(entry.tensor), []).append(entry)
    layout: dict[str, Stored] = {}
    for entries in by_tensor.values():
        names = [entry.name for entry in entries]
        ways = [*(listed[name] for name in names if name in listed), *(Stored((name,)) for name in names)]
        how = next((way for way in ways if {("model", name) for name in way.names_of()} <= files.keys()), None)
        if how is None:
            continue  # `restore.fitted` names it
        if how.experts and any(("model", name) in files for name in how.names_of(how.experts)):
            raise CheckpointError(f"{folder} has more than {how.experts} experts in {names[0]}")
        layout |= dict.fromkeys((entry.key for entry in entries), how)
    saved = TensorFiles(str(folder), files, layout)
    if quantised := next((key for key, spec in saved.tensors.items() if spec.dtype.itemsize == 1), ""):
        raise CheckpointError(f"{folder}: {quantised} is quantised: load the model with from_pretrained before attach")
    return saved


def _files(folder: Path) -> list[str]:
    if (folder / _INDEX).exists():
        return sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    if (folder / _ONE_FILE).exists():
        return [_ONE_FILE]
    raise CheckpointError(f"{folder} has no {_ONE_FILE} and no {_INDEX}")
