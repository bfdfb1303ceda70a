"""What the tensors of a model are called in its Hugging Face folder, and which experts each of them holds.

The library turns a whole state dict into the folder's names and shapes, all at once (`revert_weight_conversion`). Here
it is asked with tensors on the meta device, which have no memory, to learn which tensor becomes what; then a model can
be written a piece at a time, by whoever has the piece. Nothing is known of any model family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from ...checkpoint.state import CheckpointError, Entry, LogicalView
from ...checkpoint.weights import Place, Stored, TensorSpec, cut_by, patterns_of
from ...utils.files import write_file

State = dict[str, Tensor]
Convert = Callable[[State], State]


@dataclass(frozen=True)
class Piece:
    """Tensors of the model that become tensors of the folder together, independent of all others.

    Args:
        names: of the model's tensors; one, unless the library joins several.
        made: everything that becomes of them.
        convert: whether the library changes more than the name.
        by_expert: what converting one expert's row ``[1, ...]`` gives -> where that stands, for each expert. None: the
            tensors are converted whole.
    """

    names: tuple[str, ...]
    made: dict[str, TensorSpec]
    convert: bool
    by_expert: tuple[dict[str, Place], ...] | None = None

    @property
    def stacked(self) -> bool:
        """Whether experts are rows of one tensor in the folder."""
        return self.by_expert is not None and any(row is not None for _, row in self.by_expert[0].values())


def saved_entries(view: LogicalView) -> dict[str, Entry]:
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


def converter(model: PreTrainedModel) -> Convert:
    """The library's own way back from the model's names to the folder's."""
    return lambda state: revert_weight_conversion(model, state)


def pieces_of(view: LogicalView, entries: Mapping[str, Entry], convert: Convert) -> list[Piece]:
    """Cut a model into pieces that can be written one by one.

    Raises:
        CheckpointError: the pieces would not make the folder that the whole model makes.
    """
    whole = {name: _meta(view.whole_size(entry), entry.tensor.dtype) for name, entry in entries.items()}
    by_library = convert(dict(whole))
    made = _specs(by_library)
    name_of = {id(tensor): name for name, tensor in whole.items()}
    renamed = {name_of[id(tensor)]: key for key, tensor in by_library.items() if id(tensor) in name_of}
    pieces, joined = [], []
    for name, entry in entries.items():
        if name in renamed:
            key = renamed[name]
            rows = view.num_experts if entry.layer is not None else 0
            by_expert: tuple[dict[str, Place], ...] = tuple({name: (key, expert)} for expert in range(rows))
            pieces.append(Piece((name,), {key: made[key]}, False, by_expert or None))
            continue
        alone = _specs(convert({name: whole[name]}))
        if any(made.get(key) != spec for key, spec in alone.items()):
            joined.append(name)
        elif entry.layer is None:
            pieces.append(Piece((name,), alone, True))
        else:
            pieces.append(Piece((name,), alone, True, _by_expert(name, whole[name], alone, convert)))
    if joined:
        pieces.append(Piece(tuple(joined), _specs(convert({name: whole[name] for name in joined})), True))
    together = {key: spec for piece in pieces for key, spec in piece.made.items()}
    if together != made or sum(len(piece.made) for piece in pieces) != len(made):
        odd = sorted(set(made) ^ set(together)) or sorted(made)
        raise CheckpointError(
            f"the library's conversion of this model cannot be done a tensor at a time ({odd[0]}): use checkpoint.save"
        )
    _check_experts(pieces, whole, convert)
    return pieces


def stored_names(view: LogicalView) -> dict[str, Stored]:
    """How the library's folders store tensors of the model, by name: those that it renames or cuts into parts.

    Experts that its folders store stacked are left out, and what it changes otherwise.
    """
    if not isinstance(view.model, PreTrainedModel) or getattr(view.model, "hf_quantizer", None) is not None:
        return {}
    convert, entries = converter(view.model), saved_entries(view)
    try:
        pieces = pieces_of(view, entries, convert)
    except CheckpointError:
        return {}
    found: dict[str, Stored] = {}
    cuts: dict[tuple[str, torch.Size], tuple[tuple[int, ...], int] | None] = {}
    for piece in pieces:
        name = piece.names[0]
        spread = entries[name].layer is not None
        if len(piece.names) > 1 or piece.stacked or (spread and piece.by_expert is None):
            continue
        names = tuple(piece.made) if piece.by_expert is None else patterns_of(piece.by_expert)
        kind = name.rpartition(".")[2], view.whole_size(entries[name])[int(spread) :]
        if not piece.convert:
            found[name] = Stored(names)
            continue
        if kind not in cuts:
            cuts[kind] = cut_by(partial(_converted, convert, name, spread), kind[1])
        cut = cuts[kind]
        if cut is not None and all(names) and len(names) == max(1, len(cut[0])):
            found[name] = Stored(names, view.num_experts if spread else 0, *cut)
    return found


def _converted(convert: Convert, name: str, spread: bool, value: Tensor) -> list[Tensor]:
    return list(convert({name: value.unsqueeze(0) if spread else value}).values())


def write_config(model: nn.Module, folder: Path) -> None:
    """Write the ``config.json`` that ``from_pretrained`` reads with the weights; none of a model with adapters."""
    if isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = model.dtype
        write_file(folder / "config.json", config.to_json_string())


def _by_expert(
    name: str, stack: Tensor, made: Mapping[str, TensorSpec], convert: Convert
) -> tuple[dict[str, Place], ...] | None:
    """Where each expert of a stack goes: to tensors with its number in their names, or to rows; None: neither."""
    experts = stack.shape[0]
    one = _specs(convert({name: stack[:1]}))
    if one.keys() == made.keys():
        rows = all(
            spec.shape[:1] == (1,) and made[key] == TensorSpec((experts, *spec.shape[1:]), spec.dtype)
            for key, spec in one.items()
        )
        return tuple({key: (key, expert) for key in one} for expert in range(experts)) if rows else None
    numbered = {key: _numbered(key, experts, made) for key in one}
    if len(made) != experts * len(one) or any(not keys for keys in numbered.values()):
        return None
    if any(made[name] != spec for key, spec in one.items() for name in numbered[key]):
        return None
    return tuple({key: (numbered[key][expert], None) for key in one} for expert in range(experts))


def _numbered(first: str, count: int, known: Iterable[str]) -> list[str]:
    """``experts.0.w1`` -> ``experts.0.w1``, ``experts.1.w1``, ...: the number whose successors are all known."""
    known = set(known)
    for match in re.finditer(r"\b0\b", first):
        names = [f"{first[: match.start()]}{number}{first[match.end() :]}" for number in range(count)]
        if known.issuperset(names):
            return names
    return []


def _check_experts(pieces: Iterable[Piece], whole: Mapping[str, Tensor], convert: Convert) -> None:
    """Two experts of nothing but 0 and 1 must arrive under these numbers; once for each parameter of a layer."""
    seen = set()
    for piece in pieces:
        kind = piece.names[0].rpartition(".")[2]
        if piece.by_expert is None or not piece.convert or kind in seen or len(piece.by_expert) < 2:
            continue
        seen.add(kind)
        row = whole[piece.names[0]].shape[1:]
        numbers = torch.arange(2, dtype=torch.uint8).view(2, *(1 for _ in row)).expand(2, *row)
        made = convert({piece.names[0]: numbers})
        for expert in range(2):
            for key, at in piece.by_expert[expert].values():
                if key not in made or not bool((made[key] if at is None else made[key][at]).eq(expert).all()):
                    raise CheckpointError(
                        f"the library's conversion of {piece.names[0]} mixes experts: use checkpoint.save"
                    )


def _meta(size: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _spec(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype)


def _specs(state: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {key: _spec(tensor) for key, tensor in state.items()}
