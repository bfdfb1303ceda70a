"""Saved state of Megatron's experts and optimizers, in logical order wherever experts are.

Distributed checkpoints name a rank's experts by their slots: what Megatron makes is taken as it is and renumbered, and
optimizers take over the names of the parameters. Plain state goes by place: it says of which experts it is, or is not
taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor

from ...moe.experts.registry import MARK
from ..attaching.state_hooks import BY_THE_FRAMEWORK, refusal

BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
"""Ways to save a distributed optimizer's state by where it lies in its buffers, which does not say whose it is."""
Put = Callable[[Any, str, Callable[..., Any]], None]
"""Puts a method in the place of a thing's own."""


def save_by_logical_expert(module: Any, logical_of_slots: Callable[[], Tensor]) -> None:
    """Let the sharded state of a layer's experts have their logical numbers from now on."""
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


def say_experts(leaf: Any, experts_here: Callable[[], dict[str, list[int]]], put: Put) -> None:
    """Let the plain state of an optimizer say of which experts it is, and be refused where others are."""
    own_state, own_sharded, own_load = leaf.state_dict, leaf.sharded_state_dict, leaf.load_state_dict
    made_with = experts_here()

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**own_state(*args, **kwargs), MARK: experts_here()}

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # Its tensors are named by the experts that are here now. This is not written, and is there once they are read.
        return {**own_sharded(*args, **kwargs), MARK: LocalNonpersistentObject(experts_here())}

    def load_state_dict(state: Mapping[str, Any]) -> None:
        state = dict(state)
        theirs = state.pop(MARK, made_with)
        for layer, here in experts_here().items():
            if theirs.get(layer) != here:
                raise RuntimeError(
                    refusal("optimizer's state dict", layer, theirs.get(layer, []), here, BY_THE_FRAMEWORK)
                )
        own_load(state)

    put(leaf, "state_dict", state_dict)
    put(leaf, "sharded_state_dict", sharded_state_dict)
    put(leaf, "load_state_dict", load_state_dict)


def refuse_places(optimizer: Any, leaf: Any, has_moved: Callable[[], bool], put: Put) -> None:
    """Let a distributed optimizer save and load no state by place once experts have moved."""
    own = leaf.sharded_state_dict

    def sharded_state_dict(
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        way = sharding_type or (metadata or {}).get("distrib_optim_sharding_type")
        if way in BUCKETS and has_moved():
            raise RuntimeError(_by_place(way))
        return own(model_sharded_state_dict, is_loading, sharding_type, metadata)

    put(leaf, "sharded_state_dict", sharded_state_dict)
    for thing in {id(one): one for one in (optimizer, leaf)}.values():
        for name in ("save_parameter_state", "load_parameter_state"):
            put(thing, name, _refusing(getattr(thing, name), name, has_moved))


def _refusing(own: Callable[..., Any], name: str, has_moved: Callable[[], bool]) -> Callable[..., Any]:
    def by_place(*args: Any, **kwargs: Any) -> Any:
        if has_moved():
            raise RuntimeError(_by_place(name))
        return own(*args, **kwargs)

    return by_place


def _by_place(way: str) -> str:
    return (
        f"the distributed optimizer's state would be saved or loaded by place ({way}), and experts have moved: use "
        "sharded_state_dict, by parameter (distrib_optim_sharding_type 'fully_reshardable')"
    )
