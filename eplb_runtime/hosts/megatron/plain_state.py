"""Plain state of Megatron's optimizers, which goes by place: it says of which experts it is, or is not taken.

Distributed checkpoints name experts (`sharded_state.py`), and pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from ..attaching.state_hooks import BY_THE_FRAMEWORK, KEY, refusal

BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
"""Ways to save a distributed optimizer's state by where it lies in its buffers, which does not say whose it is."""
Put = Callable[[Any, str, Callable[..., Any]], None]
"""Puts a method in the place of a thing's own."""


def say_experts(leaf: Any, experts_here: Callable[[], dict[str, list[int]]], put: Put) -> None:
    """Let the plain state of an optimizer say of which experts it is, and be refused where others stand.

    Args:
        leaf: one that is not distributed.
        experts_here: the logical expert of each of this rank's slots, now, by layer.
    """
    own_state, own_sharded, own_load = leaf.state_dict, leaf.sharded_state_dict, leaf.load_state_dict
    made_with = experts_here()

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**own_state(*args, **kwargs), KEY: experts_here()}

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # Its tensors are named by what stands here now. This is not written, and is there when they have been read.
        return {**own_sharded(*args, **kwargs), KEY: LocalNonpersistentObject(experts_here())}

    def load_state_dict(state: Mapping[str, Any]) -> None:
        state = dict(state)
        theirs = state.pop(KEY, made_with)
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
    """Let a distributed optimizer save and load no state by place once experts have moved.

    Args:
        optimizer: as the training loop has it.
        leaf: the distributed one in it, or the same.
        has_moved: whether experts stand elsewhere than where Megatron has put them.
    """
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
