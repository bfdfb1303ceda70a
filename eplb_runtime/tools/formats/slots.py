"""Slots of engines' maps: empty ones are filled on the way out, and each gets its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...placement import EMPTY, Placement
from .reading import FormatError, expert_ids

if TYPE_CHECKING:
    from torch import Tensor

    from ...balancer.exports import TensorStream


class SlotTensor(NamedTuple):
    """A tensor of an exported model, for an engine that keeps experts in slots of its own.

    Attributes:
        name: as the checkpoint has it, with the number of the logical expert.
        layer: MoE layer of the whole model, from 0 on; None: no expert's.
        slot: physical slot, ``0..P-1`` over the engine's ranks; None: no expert's.
    """

    name: str
    tensor: Tensor
    layer: int | None
    slot: int | None


def tensors_of_slots(tensors: TensorStream, physical_to_logical: Placement | ArrayLike) -> Iterator[SlotTensor]:
    """Yield the tensors of each physical slot of an engine that balances its experts itself: an expert's tensor for
    each of its slots. Tensors of no expert come as they are.

    Args:
        tensors: `Balancer.named_logical_tensors`, which this runs through; collective as that is.
        physical_to_logical: the engine's map as it is now, ``[L, P]`` over the MoE layers alone
            (`convert.read_placement` reads vLLM's and SGLang's files); the same on every rank.

    Raises:
        FormatError: the map is for another number of layers or experts, or leaves out an expert; on every rank alike,
            ahead of the first tensor.
    """
    given = physical_to_logical
    rows = given.physical_to_logical if isinstance(given, Placement) else expert_ids(given, "the map")
    layers = 1 + max((layer for layer, _ in tensors.experts.values()), default=-1)
    if rows.ndim != 2 or len(rows) != layers:
        raise FormatError(
            f"the map has shape {list(rows.shape)}, and the model {layers} MoE layers: give [layers, slots] without "
            "rows of dense layers"
        )
    _require_all(rows, tensors.num_experts)
    for name, tensor in tensors:
        layer, expert = tensors.experts.get(name, (None, None))
        if layer is None:
            yield SlotTensor(name, tensor, None, None)
            continue
        for logical, one in [(expert, tensor)] if expert is not None else enumerate(tensor):
            for slot in np.flatnonzero(rows[layer] == logical).tolist():
                yield SlotTensor(name, one, layer, slot)


def _require_all(rows: NDArray[np.integer[Any]], experts: int) -> None:
    """Refuse a map on every rank alike, ahead of the first tensor."""
    for layer, row in enumerate(rows):
        if len(missing := np.setdiff1d(np.arange(experts), row)):
            raise FormatError(f"the map of layer {layer} has no slot for expert {missing[0]}, which the model has")
        if row.max() >= experts:
            raise FormatError(f"the map of layer {layer} has expert {row.max()}, and the model {experts} experts")


def fill_empty_slots(placement: Placement) -> NDArray[np.int32]:
    """Return int32 [L, P]: the map with each empty slot given a copy of the expert that has fewest copies so far and is
    not on that rank; ties go to the lower id."""
    rows = np.array(placement.physical_to_logical)
    counts = np.array(placement.copy_count)
    for layer, slot in np.argwhere(rows == EMPTY):
        rank_start = slot - slot % placement.slots_per_rank
        on_rank = rows[layer, rank_start : rank_start + placement.slots_per_rank]
        cost = counts[layer] + placement.num_slots * np.isin(np.arange(placement.num_experts), on_rank)
        expert = int(np.argmin(cost))
        rows[layer, slot] = expert
        counts[layer, expert] += 1
    return rows
