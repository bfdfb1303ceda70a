"""State dicts in logical order, where a framework saves and loads experts itself: whatever the placement.

Each row of an expert tensor is where the framework without us would have it, in a DTensor of the same mesh and
placements: so its formats, exports and resharding work on it as they are. The rows travel, in one exchange for each
tensor; state dicts are therefore collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...balancer.balancer import Balancer
from ...distributed.consensus import barrier
from ...moe.experts.slices import local, rearranged
from .description import MoELayer

Convert = Callable[[int, Tensor, str], DTensor]
"""`LogicalOrder.saved` or `.loaded`."""


class StateError(RuntimeError):
    """State that cannot be brought into, or out of, logical order."""


class LogicalOrder:
    """The rows of an attached model's expert tensors, between logical order and the current placement."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer
        self.barrier: Callable[[str], None] = balancer.runtime.barrier
        self.weights_changed = balancer.weights_changed
        everyone, seconds = list(balancer.runtime.job.ranks), balancer.config.timeout_seconds
        self.wait_for_all: Callable[[str], object] = lambda what: barrier(everyone, what, seconds, patient=True)
        registry = balancer.runtime.registry
        self._layer_of = {id(p): layer for layer in registry.layers for p in registry.parameters(layer)}

    def layer_of(self, parameter: Tensor) -> int | None:
        """MoE layer index of an expert parameter, else None."""
        return self._layer_of.get(id(parameter))

    @torch.no_grad()
    def saved(self, layer: int, tensor: Tensor, name: str) -> DTensor:
        """In logical order, in new memory. Collective."""
        stand_E = self._balancer.placement.homes_LRH[layer].reshape(-1)
        return self._rearranged(tensor, stand_E, np.arange(len(stand_E)), name)

    @torch.no_grad()
    def loaded(self, layer: int, tensor: Tensor, name: str) -> DTensor:
        """Of what was saved in logical order: as experts stand here. Collective."""
        stand_E = self._balancer.placement.homes_LRH[layer].reshape(-1)
        return self._rearranged(tensor, np.arange(len(stand_E)), stand_E, name)

    def in_order(self, state: Mapping[Any, Any], layer: int, name: str, convert: Convert) -> dict[Any, Any]:
        """Convert an expert parameter's optimizer state. One number for all experts (Adam's step) stays as it is."""
        return {
            key: convert(layer, value, f"{name}{key}") if isinstance(value, Tensor) and value.numel() > 1 else value
            for key, value in sorted(state.items())
        }

    def _rearranged(self, tensor: Tensor, here_E: Any, wanted_E: Any, name: str) -> DTensor:
        rows = len(here_E) // len(self._balancer.runtime.job.row_ranks)
        if not isinstance(tensor, DTensor) or local(tensor).shape[0] != rows:
            raise StateError(
                f"{name} is no DTensor whose rows are divided over ranks as the model's are: load and save it "
                "by the framework's own checkpoints"
            )
        moved = rearranged(local(tensor), here_E, wanted_E, self._balancer.runtime.groups)
        return DTensor.from_local(
            moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def keep_order(layer: MoELayer, order: LogicalOrder, *, same_tensors: bool = False) -> None:
    """Let ``state_dict`` and ``load_state_dict`` of a model have one layer's experts in logical order.

    ``same_tensors``: torchtitan's checkpointer keeps the tensors that it was given first, and writes into them what the
    same key holds later: so they are the same tensors each time, and never those of the model.
    """
    kept: dict[str, DTensor] = {}
    experts, name, names = layer.experts, layer.name, layer.parameters
    index = order.layer_of(layer.parameter(names[0]))
    assert index is not None

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for own in names:
            tensor = order.saved(index, state[prefix + own], f"{name}.{own}")
            if own in kept:
                local(kept[own]).copy_(local(tensor))
            state[prefix + own] = kept.setdefault(own, tensor) if same_tensors else tensor

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateError(f"{name}: load_state_dict(assign=True) would replace the experts that are balanced")
        for own in names:
            if prefix + own in state:
                state[prefix + own] = order.loaded(index, state[prefix + own], f"{name}.{own}")

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)


def synchronize_state(part: nn.Module, order: LogicalOrder) -> None:
    """Let the state of a model, or a stage of it, be taken and loaded by all ranks or none: one that does it alone says
    who is missing, and waits as long as the host would (ranks may read data before). Copies of experts follow what is
    loaded."""
    part.register_state_dict_pre_hook(lambda *_: order.wait_for_all("the state of the model"))
    part.register_load_state_dict_pre_hook(lambda *_: order.wait_for_all("the loading of the model's state"))
    part.register_load_state_dict_post_hook(lambda *_: order.weights_changed())


def order_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], order: LogicalOrder
) -> list[RemovableHandle]:
    """Let the state of an optimizer have experts in logical order; returns how to end it."""

    def in_order(state: dict[str, Any], convert: Convert) -> dict[str, Any]:
        order.barrier("the state of the optimizer")
        every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        changed = dict(state["state"])
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        for number, parameter in zip(numbers, every, strict=True):
            if (layer := order.layer_of(parameter)) is not None and number in changed:
                changed[number] = order.in_order(changed[number], layer, f"{names[id(parameter)]}/", convert)
        return {**state, "state": changed}

    return [
        optimizer.register_state_dict_post_hook(lambda _, state: in_order(state, order.saved)),
        optimizer.register_load_state_dict_pre_hook(lambda _, state: in_order(state, order.loaded)),
    ]
