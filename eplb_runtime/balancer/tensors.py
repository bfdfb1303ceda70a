"""Tensors of an attached model other than its experts' parameters: what optimizers step, and what goes by row with
experts and was registered."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..moe.experts.registry import MARK, RegistryError, arrays_in, matched, why_not_written
from ..moe.experts.slices import WeightMemory, is_sliced
from ..placement import Placement
from .runtime import Runtime


class ModelTensors:
    """The tensors of one attached model on one rank.

    Attributes:
        dense: parameters outside the experts, by name; more may join.
        optimizers: that step the model.
        registered: MoE layer and tensor of what moves with experts, by parameter and name.
        memory: of all weights, which a job may free and take again.
        sliced: whether ``fully_shard`` slices experts.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.dense = dict(runtime.dense_parameters)
        self.optimizers: list[Any] = []
        self.registered: dict[str, tuple[int, Tensor]] = {}
        self.memory = WeightMemory()
        for name, weight in {**runtime.dense_parameters, **runtime.parameters}.items():
            self.memory.add(name, weight)
        self.sliced = any(is_sliced(parameter) for parameter in runtime.registry.parameters())
        self._marks: list[tuple[int, Tensor]] = []
        self._not_by_row: list[weakref.ref[Any]] = []

    @property
    def host_steps(self) -> bool:
        """Return whether only the framework's own optimizer knows where gradients are."""
        return any(not isinstance(optimizer, torch.optim.Optimizer) for optimizer in self.optimizers)

    def have_gradients(self) -> bool:
        """Return whether experts may have gradients that no optimizer has used."""
        registry, replicas = self._runtime.registry, self._runtime.maps.replicas
        found = self.host_steps or any(parameter.grad is not None for parameter in registry.parameters())
        # FSDP may keep the homes' where no hook sees them.
        return found or (self.sliced and replicas is not None and replicas.holds_gradients())

    def train(self, optimizer: Any, outside: Mapping[str, Tensor]) -> None:
        """Note an optimizer that is about to be hooked; ``outside``: its parameters outside the model, by name."""
        self.optimizers.append(optimizer)
        self._runtime.registry.stepped_by(optimizer)
        self.train_outside(outside)
        for layer in self._runtime.layers:
            layer.counts_in_evaluation = False

    def forget(self, optimizer: Any, outside: Mapping[str, Tensor]) -> None:
        """Forget an optimizer that was let go; ``outside``: as for `train`."""
        self.optimizers[:] = [other for other in self.optimizers if other is not optimizer]
        self._runtime.registry.no_longer_stepped_by(optimizer)
        for name in outside:
            self.dense.pop(name, None)
            self.memory.forget(name)

    def train_outside(self, parameters: Mapping[str, Tensor]) -> None:
        """Take these parameters as a part of the model that is the same on every rank; by a name for messages."""
        self.dense.update(parameters)
        for name, parameter in parameters.items():
            self.memory.add(name, parameter)
        self._runtime.model_check.know(list(parameters.values()))

    def register(self, parameter: str, name: str, tensor: Tensor) -> None:
        """`Balancer.register`."""
        layers, device = self._runtime.layer_of_parameter, self._runtime.device
        if parameter not in layers:
            raise RegistryError(f"{parameter!r} is no expert parameter: take a key of balancer.layer_of_parameter")
        if tensor.device != device or tensor.requires_grad:
            raise RegistryError(
                f"{name} of {parameter}: give a tensor on {device} without gradients (detach it); this one is on "
                f"{tensor.device}, requires_grad={tensor.requires_grad}"
            )
        if problem := why_not_written(tensor):
            raise RegistryError(f"{name} of {parameter}: {problem}")
        if self.sliced and not is_sliced(tensor):
            raise RegistryError(f"{name} of {parameter}: give a DTensor placed as the parameter (torch.zeros_like(it))")
        self._runtime.registry.add(layers[parameter], f"{parameter}/{name}", tensor, "buffer")
        self._runtime.model_check.keep_from_ddp([tensor])
        self.registered[f"{parameter}/{name}"] = (layers[parameter], tensor)

    def register_all(self, name: str, tensors: Any, moves: bool) -> None:
        """`Balancer.register_all`."""
        of_parameter = self._runtime.layer_of_parameter
        if moves:
            parameters = {
                prefix + own: parameter
                for prefix, model in self._runtime.model_check.models.items()
                for own, parameter in model.named_parameters()
            }
            for parameter, tensor in matched(tensors, parameters, list(of_parameter)).items():
                self.register(parameter, name, tensor)
        self._not_by_row += map(weakref.ref, arrays_in(tensors))  # the rest belongs to other parameters
        if moves and isinstance(tensors, Mapping):
            # A copied state dict carries a mark of its placement.
            layers = {parameter.rpartition(".")[0]: layer for parameter, layer in of_parameter.items()}
            marks = [(layers.get(str(key).removesuffix(f".{MARK}")), mark) for key, mark in tensors.items()]
            self._marks += [(layer, mark) for layer, mark in marks if layer is not None]

    def mark(self, placement: Callable[[], Placement]) -> None:
        """Follow a change of the placement in what marks it."""
        for layer, mark in self._marks:
            homes_RH = placement().homes_LRH[layer]
            mark.copy_(torch.tensor([self._runtime.job.ep_rank, *homes_RH.ravel().tolist()]))

    def known(self) -> Iterator[Tensor]:
        """Return tensors that move with experts other than parameters and gradients, the optimizers' tensors, and those
        that do not go by row (`register_all`)."""
        yield from (tensor for _, tensor in self.registered.values())
        yield from (torch.as_tensor(one) for ref in self._not_by_row if (one := ref()) is not None)
        for optimizer in self.optimizers:
            yield from arrays_in(getattr(optimizer, "state", None))
            yield from (parameter for group in optimizer.param_groups for parameter in group["params"])
