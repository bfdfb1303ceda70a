"""Names of a model's tensors in its Hugging Face folder, and which experts each of them holds.

The library turns a whole state dict into the folder's names and shapes, all at once (`revert_weight_conversion`). Here
it is asked with tensors on the meta device, which have no memory, to learn which tensor becomes what; then a model can
be written a piece at a time, by the rank that has the piece. Nothing is known of any model family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ...checkpoint.state import CheckpointError, Entry, LogicalView, why_merged
from ...checkpoint.weights import Stored, TensorSpec, Weight, weights_of
from ...utils.files import write_file

State = dict[str, Tensor]
Convert = Callable[[State], State]


def weights(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors as ``save_pretrained`` of the whole model would write them; of another module under its own names."""
    view = LogicalView(model)
    if problem := why_merged(view.model):
        raise CheckpointError(problem)
    if not isinstance(view.model, PreTrainedModel):
        return weights_of(model, first_layer)
    return folder_weights(view)


def folder_weights(view: LogicalView, as_in_model: bool = False) -> list[Weight]:
    """The tensors of the library's folders, or under the model's own names, each with what it is made of. A quantised
    model is refused, and one of which the tensors would not make the folder that the whole model makes."""
    if getattr(view.model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantised: load it with dequantize=True to export it")
    entries, convert = _saved_entries(view), partial(_by_library, view.model, as_in_model)
    whole = {
        name: torch.empty(view.whole_size(entry), dtype=entry.tensor.dtype, device="meta")
        for name, entry in entries.items()
    }
    by_library = convert(dict(whole))
    made = _specs(by_library)
    name_of = {id(tensor): name for name, tensor in whole.items()}
    renamed = {name_of[id(tensor)]: key for key, tensor in by_library.items() if id(tensor) in name_of}
    found, joined = [], []
    for name, entry in entries.items():
        if name in renamed:
            key, spread = renamed[name], entry.layer is not None
            rename = partial(_rename, (name if spread else key,))
            rows = {name: key} if spread else None
            spec = {key: made[key]}
            found.append(Weight((entry.tensor,), entry.layer, spec, rows, rename, False, (name,), True))
            continue
        alone = _specs(convert({name: whole[name]}))
        if any(made.get(key) != spec for key, spec in alone.items()):
            joined.append(name)
            continue
        by_expert = _by_expert(name, whole[name], alone, convert) if entry.layer is not None else None
        change = partial(_change, (name,), convert)
        found.append(Weight((entry.tensor,), entry.layer, alone, by_expert, change, False, (name,)))
    if joined:
        sources = tuple(entries[name].tensor for name in joined)
        specs = _specs(convert({name: whole[name] for name in joined}))
        change, layer = partial(_change, tuple(joined), convert), entries[joined[0]].layer
        found.append(Weight(sources, layer, specs, None, change, False, tuple(joined)))
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


def _rename(names: Sequence[str], values: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return dict(zip(names, values, strict=True))


def _change(names: Sequence[str], convert: Convert, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return convert(dict(zip(names, values, strict=True)))


def stored_names(view: LogicalView) -> dict[str, Stored]:
    """How the library's folders store tensors of the model, by name: those that it renames or cuts into parts.

    Experts that its folders store stacked are left out, and what it changes otherwise.
    """
    if not isinstance(view.model, PreTrainedModel):
        return {}
    try:
        listed = folder_weights(view)
    except CheckpointError:
        return {}
    found: dict[str, Stored] = {}
    cuts: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], int] | None] = {}
    for weight in listed:
        name, spread = weight.names[0], weight.layer is not None
        names = tuple(weight.made) if weight.by_expert is None else tuple(weight.by_expert.values())
        if len(weight.names) > 1 or (spread and not all("*" in one for one in names)):
            continue
        if weight.keeps_values:
            found[name] = Stored(names)
            continue
        shape = tuple(view.whole_size(Entry("model", name, "", view.parameters[name], weight.layer)))[int(spread) :]
        kind = name.rpartition(".")[2], shape
        if kind not in cuts:
            cuts[kind] = _cut_by(partial(_parts, weight, spread), shape)
        cut = cuts[kind]
        if cut is not None and len(names) == max(1, len(cut[0])):
            found[name] = Stored(names, view.num_experts if spread else 0, *cut)
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


def write_config(view: LogicalView, folder: Path) -> None:
    """Write the ``config.json`` that ``from_pretrained`` reads with the weights; none of a model with adapters."""
    model = view.model
    if isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        write_file(folder / "config.json", config.to_json_string())


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


def _specs(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
