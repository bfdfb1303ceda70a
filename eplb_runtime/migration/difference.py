"""Encodes the change from one placement to another in few bytes, which rank 0 broadcasts: the slots of changed layers.

Two bytes per slot (four from 32,768 experts on), in base64 for JSON. Homes follow from the slots: in the home layout,
local slots ``0 .. E/R - 1`` are home slots.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from ..placement import Placement, PlacementError


def difference(current: Placement, target: Placement) -> dict[str, Any]:
    """JSON-able fields from which `apply` makes ``target`` out of ``current``, both in the home layout and of one
    model."""
    changed = (current.physical_to_logical != target.physical_to_logical).any(axis=1)
    dtype = _dtype(target.num_experts)
    return {
        "epoch": target.epoch,
        "layers": np.flatnonzero(changed).tolist(),
        "slots": base64.b64encode(target.physical_to_logical[changed].astype(dtype).tobytes()).decode(),
    }


def apply(current: Placement, fields: dict[str, Any]) -> Placement:
    """Return the ``target`` that `difference` encoded; PlacementError: it is no valid placement after ``current``."""
    try:
        layers = np.array(fields["layers"], dtype=np.int64)
        slots = np.frombuffer(base64.b64decode(fields["slots"], validate=True), dtype=_dtype(current.num_experts))
        map_LP = current.physical_to_logical.copy()
        map_LP[layers] = slots.reshape(len(layers), current.num_slots)
        epoch = int(fields["epoch"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise PlacementError(f"not a change of this placement: {type(error).__name__}: {error}") from None
    shape = (current.num_layers, current.num_ranks, current.slots_per_rank)
    homes_LRH = map_LP.reshape(shape)[:, :, : current.homes_per_rank]
    layer, rank, local = np.nonzero((homes_LRH >= 0) & (homes_LRH < current.num_experts))
    home_LE = np.full_like(current.require_homes(), -1)
    home_LE[layer, homes_LRH[layer, rank, local]] = rank * current.slots_per_rank + local
    return Placement(map_LP, current.num_experts, current.num_ranks, home_LE, epoch)


def _dtype(num_experts: int) -> str:
    return "<i2" if num_experts <= np.iinfo(np.int16).max else "<i4"
