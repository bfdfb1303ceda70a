"""Checks what one rank sees by itself: a model stays as it was attached, and its optimizers write what they list.

Frameworks replace parameters (sharding), put modules around others (adapters) and add trained parameters. All of this
is right before attach. After it, experts would be computed, averaged or moved without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_ELEMENTS = 1024
"""Elements of a tensor, about, that tell whether an optimizer has written it."""


class StructureError(RuntimeError):
    """A model was changed after ``attach`` in a way that the balancer cannot follow."""


class ModelCheck:
    """The models of one rank, as they were attached, by the prefix of their parameters' names; experts modules with
    their parameters, and parameters that attach replaced. ``is_sharded``: some are DTensors, by `fully_shard`."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        experts: Sequence[tuple[str, nn.Module, Sequence[str]]],
        replaced: Mapping[str, weakref.ref[Tensor]],
    ) -> None:
        self.models = dict(models)
        self._replaced = dict(replaced)
        self.experts = {name: module for name, module, _ in experts}
        """The experts module of each MoE layer, by name, in the order of layers."""
        modules = [module for model in self.models.values() for module in model.modules()]
        parameters = [p for model in self.models.values() for p in model.parameters()]
        self.is_sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self._known = set(map(id, parameters))
        self._fsdp = [module for module in modules if isinstance(module, FSDPModule)]
        self._held: list[tuple[str, nn.Module, str, nn.Parameter | None]] = []
        for name, module, keys in () if self.is_sharded else experts:  # FSDP2 puts others there while it computes
            for key in keys:
                inside, _, own = key.rpartition(".")
                inner = module.get_submodule(inside)
                self._held.append((f"{name}.{key}", inner, own, inner._parameters[own]))
        self._of_this_rank: set[int] = set()
        self.seen_in_ddp = False

    def keep_from_ddp(self, tensors: Iterable[Tensor]) -> None:
        """Let DistributedDataParallel, put around a model later, leave these of its parameters and buffers alone: each
        rank's are of its own experts, and it sets buffers to rank 0's in every forward."""
        ours = set(map(id, tensors))
        self._of_this_rank |= ours
        for model in self.models.values():
            own = [*model.named_parameters(), *model.named_buffers()]
            names = {*getattr(model, "_ddp_params_and_buffers_to_ignore", ()), *(n for n, t in own if id(t) in ours)}
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(names))

    def know(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters that are trained and averaged, too."""
        self._known.update(map(id, parameters))

    def replaced(self) -> dict[str, Tensor]:
        """Parameters that attach has replaced and that somebody still references, by name."""
        found = {name: parameter for name, ref in self._replaced.items() if (parameter := ref()) is not None}
        self._replaced = {name: self._replaced[name] for name in found}
        return found

    def keep_slices(self) -> None:
        """Put FSDP2's slices back where an evaluation has left whole tensors: no step or move writes these."""
        for module in self._fsdp:
            module.reshard()

    def check(self, *, thoroughly: bool) -> None:
        """Check that nothing has changed; cheap enough for each forward. ``thoroughly``: walk through the whole model.
        Raises StructureError: something has."""
        for name, module, own, parameter in self._held:
            if module._parameters.get(own) is not parameter:
                raise StructureError(
                    f"{name} was replaced after attach: do that first (shard_experts and fully_shard, adapters), then "
                    "make the optimizer and attach; for an evaluation copy other weights into the parameters"
                )
        wrapped = getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None) if thoroughly else None
        self.seen_in_ddp |= wrapped is not None
        if wrapped is not None and wrapped.process_group.size() > 1:
            shared = {id(tensor) for tensor in (*wrapped._module_parameters, *wrapped.modules_buffers)}
            if not shared.isdisjoint(self._of_this_rank | set(map(id, self.replaced().values()))):
                raise StructureError(
                    "DistributedDataParallel averages parameters from before attach, or experts, of which each rank "
                    "has others: attach first, then wrap the very module that was attached, and call "
                    "balancer.register before; or set dense_gradients='allreduce'"
                )
        for prefix, model in self.models.items() if thoroughly and not self.is_sharded else ():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and id(parameter) not in self._known:
                    raise StructureError(
                        f"{prefix}{name} was added after attach and is trained, but no optimizer that the balancer "
                        "knows holds it: add it (adapters, heads) and make the optimizer first, then attach, or call "
                        "balancer.adopt(optimizer)"
                    )


# -- optimizers --------------------------------------------------------------------------------------------------------

Snapshot = tuple[str, Tensor, Tensor, object]
"""A parameter that is about to be stepped, by name: some elements, and the versions of it and its state."""


def why_misplaced(experts: Mapping[str, Tensor], optimizers: Sequence[Any]) -> str:
    """Name a trained expert tensor that the optimizers do not list once; empty: they list each."""
    rates = _rates(optimizers)
    for name, parameter in experts.items() if optimizers else ():
        if parameter.requires_grad and (times := len(rates.get(id(parameter), ()))) != 1:
            return (
                "make the optimizer of the parameters that are to be trained, then attach, and leave its groups and "
                f"what is frozen alone: it holds {name} {times} times"
            )
    return ""


def snapshots(parameters: Mapping[str, Tensor], optimizers: Sequence[Any]) -> list[Snapshot]:
    """Take snapshots of parameters with gradients that an optimizer lists."""
    rates = _rates(optimizers)
    # Writing through .data leaves no version; the values tell then, where rounding hides no update.
    wide = [(name, p) for name, p in parameters.items() if p.element_size() > 2 and any(rates.get(id(p), ()))]
    return [(name, p, _elements(p).clone(), _versions(p, optimizers)) for name, p in wide if p.grad is not None]


def why_not_stepped(before: Sequence[Snapshot], optimizers: Sequence[Any], skipped: Collection[int]) -> str:
    """Name a parameter that a step has left as it was, though it has a gradient and is listed; empty: none.

    Args:
        skipped: ids of parameters whose optimizer all ranks have skipped.
    """
    for name, p, elements, versions in before:
        is_as_before = _versions(p, optimizers) == versions and torch.equal(_elements(p), elements)
        gradient = p.grad if p.grad is not None and p.grad.layout is torch.strided else None
        if is_as_before and gradient is not None and id(p) not in skipped and _elements(gradient).any():
            return (
                "use an optimizer that steps all that it lists, on every rank (ZeroRedundancyOptimizer does not): its "
                f"step does not write {name}, which has a gradient"
            )
    return ""


def options_of(optimizers: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return the learning rates and the other options of each group. Left out are numbers on a device, and optimizers
    of a framework's own, which may have different groups on each rank."""
    groups = [group for one in optimizers if isinstance(one, torch.optim.Optimizer) for group in one.param_groups]
    others = [[(key, _numbers(group[key])) for key in sorted(set(group) - {"lr", "params"})] for group in groups]
    return [_numbers(group.get("lr")) for group in groups], others


def _numbers(value: Any) -> Any:
    """The numbers in an option."""
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return value if isinstance(value, int | float) else None


def _rates(optimizers: Sequence[Any]) -> dict[int, list[Any]]:
    """Learning rates by id of a parameter, one for each time that an optimizer lists it."""
    rates: dict[int, list[Any]] = {}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        for parameter in group["params"]:
            rates.setdefault(id(parameter), []).append(group.get("lr", 1))
    return rates


def _versions(parameter: Tensor, optimizers: Sequence[Any]) -> object:
    """Versions of a parameter and its state: an optimizer may write its state alone in some steps (a warm-up)."""
    states = [getattr(optimizer, "state", {}).get(parameter) for optimizer in optimizers]
    values = [parameter, *(value for state in states if isinstance(state, dict) for value in state.values())]
    have = [isinstance(one, Tensor) and not one.is_inference() for one in values]
    return [(id(one), one._version) if has else repr(one) for one, has in zip(values, have, strict=True)]


def _elements(tensor: Tensor) -> Tensor:
    """Elements from all over a tensor."""
    flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
    return flat[:: max(1, len(flat) // _ELEMENTS)]
