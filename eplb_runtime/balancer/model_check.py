"""Checks that a model stays as it was attached: which module holds which expert weights, and what is trained.

Frameworks replace parameters (sharding), put modules around others (adapters) and add trained parameters. All of this
is right before attach. After it, experts would be computed, averaged or moved without it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..moe.experts.slices import has_divide_factor, keep_slices


class StructureError(RuntimeError):
    """A model was changed after ``attach`` in a way that the balancer cannot follow."""


class ModelCheck:
    """The models of one rank, as they were attached, by the prefix of their parameters' names; experts modules with
    their parameters, and parameters that attach replaced."""

    def __init__(
        self,
        models: Mapping[str, nn.Module],
        experts: Sequence[tuple[str, nn.Module, Sequence[str]]],
        replaced: Mapping[str, weakref.ref[Tensor]],
    ) -> None:
        self.models = dict(models)
        self._replaced = dict(replaced)
        self._experts = list(experts)
        parameters = [p for model in self.models.values() for p in model.parameters()]
        # FSDP2 puts other tensors into a module while it computes.
        self._sharded = any(isinstance(parameter, DTensor) for parameter in parameters)
        self._divided = {name for name, module, _ in experts if has_divide_factor(module)}  # a host may want it
        self._held = [] if self._sharded else [_held(module, key) for _, module, keys in experts for key in keys]
        self._known = {id(parameter) for parameter in parameters}

    @property
    def experts(self) -> dict[str, nn.Module]:
        """The experts module of each MoE layer, by name, in the order of layers."""
        return {name: module for name, module, _ in self._experts}

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is a DTensor, as `fully_shard` makes them."""
        return self._sharded

    def know(self, parameters: Sequence[Tensor]) -> None:
        """Add parameters that are trained and averaged, too."""
        self._known.update(map(id, parameters))

    def replaced(self) -> dict[str, Tensor]:
        """Parameters that attach has replaced and that somebody still references, by name."""
        found = {name: parameter() for name, parameter in self._replaced.items()}
        self._replaced = {name: self._replaced[name] for name, parameter in found.items() if parameter is not None}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def moved(self) -> None:
        """Refresh gathered experts after a move: FSDP2 leaves whole ones in a module after an evaluation."""
        if self._sharded:
            for model in self.models.values():
                keep_slices(model)

    def check(self, *, thoroughly: bool) -> None:
        """Check that nothing has changed; cheap enough for each forward.

        Args:
            thoroughly: walk through the whole model.

        Raises:
            StructureError: something has.
        """
        for module, key, parameter in self._held:
            if module._parameters.get(key) is not parameter:
                self._raise_replaced(module, key)
        if thoroughly and not self._sharded:
            for prefix, model in self.models.items():
                self._check_tree(prefix, model)
        if thoroughly and self._sharded:
            for name, experts, _ in self._experts:
                if name not in self._divided and has_divide_factor(experts):
                    raise StructureError(
                        f"set_gradient_divide_factor was called on {name} after attach: gradients of experts are "
                        "divided for FSDP's own average over EDP; leave it out"
                    )

    def _raise_replaced(self, module: nn.Module, key: str) -> None:
        name = next(name for name, other, _ in self._experts if any(module is inner for inner in other.modules()))
        if isinstance(module._parameters.get(key), DTensor):
            raise StructureError(
                f"{name}.{key} was sharded after attach (fully_shard): call eplb_runtime.shard_experts(model) and "
                "fully_shard first, then make the optimizer and attach"
            )
        raise StructureError(
            f"{name}.{key} was replaced after attach: do that first, then attach (in torch.func.functional_call, or in "
            "an evaluation with other weights, with replica slots: copy them into the parameters)"
        )

    def _check_tree(self, prefix: str, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        for name, experts, _ in self._experts:
            if name.startswith(prefix) and modules.get(name.removeprefix(prefix), experts) is not experts:
                raise StructureError(
                    f"a {type(modules[name.removeprefix(prefix)]).__name__} was put around {name} after attach "
                    "(adapters?): put it there first, then make the optimizer and attach"
                )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in self._known:
                raise StructureError(
                    f"{prefix}{name} was added after attach and is trained, but no optimizer that the balancer knows "
                    "holds it: add it (adapters, heads) and make the optimizer first, then attach, or call "
                    "balancer.adopt(optimizer)"
                )


def _held(experts: nn.Module, key: str) -> tuple[nn.Module, str, nn.Parameter | None]:
    """Module that holds a parameter, the parameter's name in it, and the parameter."""
    inside, _, own_name = key.rpartition(".")
    module = experts.get_submodule(inside)
    return module, own_name, module._parameters[own_name]
