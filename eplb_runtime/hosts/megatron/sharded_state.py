"""Megatron's distributed checkpoints name each expert; here the names are made those of the logical experts.

Megatron numbers a rank's experts by their slots. What it makes of them is taken as it is and renumbered, so a
checkpoint is in logical order wherever experts stand, and loads wherever they stand then. Optimizers take over the
names of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor


def save_by_logical_expert(module: Any, logical_of_slots: Callable[[], Tensor]) -> None:
    """From now on, the sharded state of a layer's experts has their logical numbers.

    Args:
        module: Megatron's `MoELayer`.
        logical_of_slots: int64 ``[E]``.
    """
    own, mine = module.experts.sharded_state_dict, list(module.local_expert_indices)

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state = own(prefix, sharded_offsets, metadata)
        order = logical_of_slots().tolist()
        logical = {slot: order[slot] for slot in mine}
        if (metadata or {}).get("singleton_local_shards", False):
            return {name: _named(entry, f"{prefix}experts.", logical) for name, entry in state.items()}
        return {name: _placed(entry, len(sharded_offsets), logical) for name, entry in state.items()}

    module.experts.sharded_state_dict = sharded_state_dict


def _named(entry: Any, prefix: str, logical: Mapping[int, int]) -> Any:
    """An entry that has its expert's number in its key (``singleton_local_shards``)."""
    number, dot, rest = entry.key.removeprefix(prefix).partition(".")
    if not (entry.key.startswith(prefix) and dot and number.isdigit() and int(number) in logical):
        raise RuntimeError(f"{entry.key} in a sharded state dict is of no expert of this rank ({sorted(logical)})")
    return replace(entry, key=f"{prefix}{logical[int(number)]}.{rest}")


def _placed(entry: Any, axis: int, logical: Mapping[int, int]) -> Any:
    """An entry that is its expert's part of a tensor ``[..., E, ...]`` with E in this axis."""
    if isinstance(entry, ShardedTensorFactory):
        build = entry.build_fn  # called later, perhaps with other data (an optimizer's)

        def built(*args: Any, **kwargs: Any) -> Any:
            return dict_list_map_outplace(lambda part: _placed(part, axis, logical), build(*args, **kwargs))

        return replace(entry, build_fn=built)
    if not isinstance(entry, ShardedTensor | ShardedObject) or entry.global_offset[axis] not in logical:
        raise RuntimeError(f"{entry} in a sharded state dict is of no expert of this rank ({sorted(logical)})")
    offset = list(entry.global_offset)
    offset[axis] = logical[offset[axis]]
    return replace(entry, global_offset=tuple(offset))
