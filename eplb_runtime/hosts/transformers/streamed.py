"""Tensors of an attached model as its Hugging Face folder names them, each by itself, for `Balancer`'s exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...checkpoint.state import CheckpointError, LogicalView, why_merged
from ...checkpoint.weights import Weight, weights_of
from .naming import Convert, Piece, converter, pieces_of, saved_entries

_Converted = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]


def weights(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors as ``save_pretrained`` of the whole model would write them; of another module under its own names.

    Raises:
        CheckpointError: the model is quantised, adapters are merged into it, or the library's names cannot be given a
            tensor at a time.
    """
    view = LogicalView(model)
    whole = view.model
    if problem := why_merged(whole):
        raise CheckpointError(problem)
    if not isinstance(whole, PreTrainedModel):
        return weights_of(model, first_layer)
    if getattr(whole, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantised: load it with dequantize=True to export it")
    entries = saved_entries(view)
    convert = converter(whole)
    found = []
    for piece in pieces_of(view, entries, convert):
        sources = tuple(entries[name].tensor for name in piece.names)
        layer = entries[piece.names[0]].layer
        found.append(Weight(sources, layer, piece.made, piece.by_expert, _conversion(piece, convert)))
    return found


def _conversion(piece: Piece, convert: Convert) -> _Converted:
    """What makes the tensors of a piece from its values, in the order of its names."""
    if piece.convert:
        return partial(_converted, piece.names, convert)
    # Only the name differs; of experts the key stays the model's.
    keys = piece.names if piece.by_expert is not None else tuple(piece.made)
    return lambda values: dict(zip(keys, values, strict=True))


def _converted(names: Sequence[str], convert: Convert, values: Sequence[Tensor]) -> Mapping[str, Tensor]:
    return convert(dict(zip(names, values, strict=True)))
