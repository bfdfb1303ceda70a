"""Saved state and exported weights of Megatron's experts and optimizers, in logical order wherever experts are.

Distributed checkpoints name a rank's experts by their slots: what Megatron makes is taken as it is and renumbered, and
optimizers take over the names of the parameters. Plain state goes by place: it says of which experts it is, or is not
taken. Exports have the names of modules, with layers numbered over all pipeline stages and experts over all ranks, as
converters to other formats take them; Megatron counts both from 0 on each rank.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)
from torch import Tensor, nn

from ...checkpoint.state import CheckpointError, Stored, TensorSpec
from ...checkpoint.stream import Weight
from ...moe.experts.registry import MARK
from ..attaching.description import MoELayer
from ..attaching.state_hooks import BY_THE_FRAMEWORK, refusal

BUCKETS = ("dp_reshardable", "dp_zero_gather_scatter", "fully_sharded_bucket_space")
"""Ways to save a distributed optimizer's state by where it lies in its buffers, which does not say whose it is."""
Put = Callable[[Any, str, Callable[..., Any]], None]
"""Puts a method in the place of a thing's own."""
_WRAPPERS = re.compile(r"^(?:module\.)*")
"""Of Megatron's DistributedDataParallel and Float16Module."""
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")


def save_by_logical_expert(module: Any, logical_of_slots: Callable[[], Tensor]) -> None:
    """Replace the ``sharded_state_dict`` of a layer's experts: its entries have logical expert numbers."""
    own, mine = module.experts.sharded_state_dict, list(module.local_expert_indices)

    def sharded_state_dict(
        prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        state = own(prefix, sharded_offsets, metadata)
        logical = {slot: expert for slot, expert in enumerate(logical_of_slots().tolist()) if slot in mine}
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
    """Replace methods of an optimizer by ``put``: its state dicts name their experts under `MARK`, and loading those of
    other experts raises RuntimeError."""
    own_state, own_sharded, own_load = leaf.state_dict, leaf.sharded_state_dict, leaf.load_state_dict
    made_with = experts_here()

    def state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**own_state(*args, **kwargs), MARK: experts_here()}

    def sharded_state_dict(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # Its tensors are named by the experts that are here now. This is not written, and is there once they are read.
        return {**own_sharded(*args, **kwargs), MARK: LocalNonpersistentObject(experts_here())}

    def load_state_dict(state: Mapping[str, Any]) -> None:
        theirs = state.get(MARK, made_with)
        for layer, here in experts_here().items():
            if theirs.get(layer) != here:
                raise RuntimeError(refusal("optimizer's state dict", layer, BY_THE_FRAMEWORK))
        own_load({key: value for key, value in state.items() if key != MARK})

    put(leaf, "state_dict", state_dict)
    put(leaf, "sharded_state_dict", sharded_state_dict)
    put(leaf, "load_state_dict", load_state_dict)


def refuse_places(optimizer: Any, leaf: Any, has_moved: Callable[[], bool], put: Put) -> None:
    """Replace methods of a distributed optimizer by ``put``: saving or loading state by its place in buffers raises
    RuntimeError once experts have moved."""
    own = leaf.sharded_state_dict

    def refuse(way: str) -> None:
        if has_moved():
            raise RuntimeError(
                f"the distributed optimizer's state would be saved or loaded by place ({way}), and experts have moved: "
                "use sharded_state_dict, by parameter (distrib_optim_sharding_type 'fully_reshardable')"
            )

    def sharded_state_dict(
        model_sharded_state_dict: Any,
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Any:
        way = sharding_type or (metadata or {}).get("distrib_optim_sharding_type")
        if way in BUCKETS:
            refuse(way)
        return own(model_sharded_state_dict, is_loading, sharding_type, metadata)

    def by_place(way: str, by_megatron: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        refuse(way)
        return by_megatron(*args, **kwargs)

    put(leaf, "sharded_state_dict", sharded_state_dict)
    for thing in {id(one): one for one in (optimizer, leaf)}.values():
        for name in ("save_parameter_state", "load_parameter_state"):
            put(thing, name, partial(by_place, name, getattr(thing, name)))


# -- exported weights --------------------------------------------------------------------------------------------------


def weights(layers: Sequence[MoELayer], model: nn.Module, first_layer: int) -> list[Weight]:
    """Return a `Weight` for each parameter and persistent buffer, and for each kind of expert tensor of a layer. With
    ``overlap_param_gather`` parameters are gathered first (collective). CheckpointError: tensor parallelism."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise CheckpointError(
            "tensor parallelism cuts Megatron's tensors, and how they are put together is known to converters alone: "
            "export inside balancer.logical_order() by the converter that you have (Megatron-Bridge, slime, verl)"
        )
    if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
        model.start_param_sync(force_sync=True)  # type: ignore[operator]  # those of the last step are on their way
    experts: dict[str, Weight] = {}
    for number, layer in enumerate(layers, start=first_layer):
        for what, names in layer.slots.items():  # one kind of tensor of all experts; ``*`` is an expert's number
            name, rows = _global(model, f"{layer.name}.{what}"), tuple(map(layer.parameter, names))
            by = Stored((name,), layer.num_experts)
            weight = Weight({name: rows}, number, dict.fromkeys(by.names_of(), TensorSpec.of(rows[0])), by)
            experts |= {f"{layer.name}.{own}": weight for own in names}
    found: dict[int, Weight] = {}
    for own, tensor in _tensors(model):
        name = _global(model, own)
        shared = ".word_embeddings." in name or ".position_embeddings." in name  # the stages of MTP have them, too
        weight = experts.get(own, Weight({name: tensor}, None, {name: TensorSpec.of(tensor)}, Stored((name,)), shared))
        found[id(weight)] = weight
    return list(found.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state dict, each once."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if isinstance(tensor, Tensor) and name not in module._non_persistent_buffers_set and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}".lstrip("."), tensor


def _global(model: Any, name: str) -> str:
    """A name with its layer's number over the whole model, and without wrappers."""
    if match := _LAYER.match(name):
        layer = model.get_submodule(f"{match.group(1)}.{match.group(2)}")
        if isinstance(number := getattr(layer, "layer_number", None), int):  # from 1 on
            name = f"{match.group(1)}.{number - 1}.{name[match.end() :]}"
    return _WRAPPERS.sub("", name)
