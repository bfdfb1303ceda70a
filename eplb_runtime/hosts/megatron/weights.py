"""Tensors of a Megatron model under the names of its modules, with layers numbered over all pipeline stages and experts
over all expert-parallel ranks: what converters to other formats take.

Megatron counts both from 0 on each rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.core import parallel_state
from torch import Tensor, nn

from ...checkpoint.state import CheckpointError
from ...checkpoint.weights import TensorSpec, Weight
from ..attaching.description import MoELayer

_WRAPPERS = re.compile(r"^(?:module\.)*")
"""Of Megatron's DistributedDataParallel and Float16Module."""
_LAYER = re.compile(r"(.*\blayers)\.(\d+)\.")


def weights(layers: Sequence[MoELayer], model: nn.Module, first_layer: int) -> list[Weight]:
    """Return parameters and persistent buffers; collective where parameters are gathered late."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        raise CheckpointError(
            "tensor parallelism cuts Megatron's tensors, and how they are put together is known to converters alone: "
            "export inside balancer.logical_order() by the converter that you have (Megatron-Bridge, slime, verl)"
        )
    if getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False):
        model.start_param_sync(force_sync=True)  # type: ignore[operator]  # those of the last step are on their way
    experts: dict[str, Weight] = {}
    for number, layer in enumerate(layers, start=first_layer):
        for what, names in layer.slots.items():
            weight = _of_experts(_global(model, f"{layer.name}.{what}"), layer, names, number)
            experts.update(dict.fromkeys((f"{layer.name}.{name}" for name in names), weight))
    found: dict[int, Weight] = {}
    for name, tensor in _tensors(model):
        weight = experts.get(name) or _alone(_global(model, name), tensor)
        found[id(weight)] = weight
    return list(found.values())


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a state dict."""
    yield from model.named_parameters()
    passing = {
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    for name, buffer in model.named_buffers():
        if name not in passing and isinstance(buffer, Tensor):
            yield name, buffer


def _alone(name: str, tensor: Tensor) -> Weight:
    return Weight(
        (tensor,),
        None,
        {name: TensorSpec(tuple(tensor.shape), tensor.dtype)},
        None,
        lambda values: {name: values[0]},
        shared=".word_embeddings." in name or ".position_embeddings." in name,  # the stages of MTP have them, too
    )


def _of_experts(name: str, layer: MoELayer, names: Sequence[str], number: int) -> Weight:
    """One kind of tensor of all experts of a layer; ``*`` in the name is an expert's number."""
    rows = tuple(layer.parameter(own) for own in names)
    spec = TensorSpec(tuple(rows[0].shape), rows[0].dtype)
    named = [name.replace("*", str(expert)) for expert in range(layer.num_experts)]

    def convert(values: Sequence[Tensor]) -> Mapping[str, Tensor]:
        return {name: values[0]}

    return Weight((rows,), number, dict.fromkeys(named, spec), {name: name}, convert)


def _global(model: Any, name: str) -> str:
    """A name with its layer's number over the whole model, and without wrappers."""
    if match := _LAYER.match(name):
        layer = model.get_submodule(f"{match.group(1)}.{match.group(2)}")
        if isinstance(number := getattr(layer, "layer_number", None), int):  # from 1 on
            name = f"{match.group(1)}.{number - 1}.{name[match.end() :]}"
    return _WRAPPERS.sub("", name)
