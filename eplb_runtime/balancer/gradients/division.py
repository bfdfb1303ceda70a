"""Gradients of experts are divided as averaging over ranks divides the others', whenever a parameter is trained.

Tokens of all ranks reach an expert in its layer, so what a layer gives is divided there. What reaches a parameter past
its layer (a penalty over all parameters, a second head) comes from the ranks that hold the expert alone, where a
parameter outside the experts gets it from all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...distributed.ranks import Job
from ...moe.experts.slices import is_sliced


@dataclass(frozen=True)
class Divisors:
    """Divisors of gradients of whole experts: where a layer computes with them, and at every gradient that reaches a
    parameter. Their product is `distributed.ranks.Job.gradient_divisor`."""

    in_layers: float
    at_parameters: float

    @classmethod
    def of(cls, job: Job, *, by_host: bool, dense_is_sharded: bool) -> Divisors:
        """Return divisors for the experts of this rank. ``by_host``: nobody sees which gradient comes from where;
        ``dense_is_sharded``: each rank has a part of the other parameters, and gets its gradient past the sums over
        ranks."""
        divisor = job.gradient_divisor
        if by_host:
            return cls(1, divisor)
        owners = len(job.edp_ranks)
        if dense_is_sharded:
            return cls(divisor / owners, owners)
        in_layers = len(job.data_ranks) / owners
        return cls(in_layers, divisor / in_layers)


def foreign_hooks(parameter: Tensor) -> list[Callable[..., Any]]:
    """Foreign hooks on the gradient of a parameter (``register_hook``, ``register_post_accumulate_grad_hook``): neither
    this package's nor those of torch's own wrappers of models."""
    both = (parameter._backward_hooks, parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]
    return [hook for hooks in both for hook in (hooks or {}).values() if not _is_known(hook)]


def why_rows_stay(parameters: Mapping[str, Tensor]) -> str:
    """Name foreign gradient hooks on experts, which may go by row: nobody can tell. Empty: there are none."""
    name = next((name for name, parameter in parameters.items() if foreign_hooks(parameter)), "")
    return name and (
        f"{name} has gradient hooks, and one that goes by row would act on other experts once these have moved: "
        "experts stay where they are while it is there; remove it, and change the gradients of an expert after "
        "balancer.reduce_gradients(), by a mask that moves with it (balancer.register)"
    )


def _is_known(hook: Callable[..., Any]) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", hook)
    made_in = str(getattr(hook, "__module__", None) or type(owner).__module__)
    return made_in.startswith((f"{__name__.partition('.')[0]}.", "torch.distributed."))


class Division:
    """Divides the gradients of expert parameters as soon as a backward pass makes them; sliced ones are divided where
    they are computed. ``arrives`` is called with each parameter that is about to be added to. Without an optimizer
    (``training``) a backward pass is refused."""

    def __init__(
        self, parameters: Mapping[str, Tensor], divisor: float, has_copies: bool, arrives: Callable[[Tensor], None]
    ) -> None:
        self.training = False
        self._parameters = {name: p for name, p in parameters.items() if not is_sliced(p)}
        self._watched = dict(parameters) if has_copies else {}
        self._divisor = divisor
        self._arrives = arrives
        self._trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
        self._divided = {name for name, parameter in self._parameters.items() if parameter.requires_grad}
        for name in self._divided:
            self._hook(self._parameters[name])

    def follow(self) -> None:
        """Divide gradients of parameters that are trained since the last call; RuntimeError: replicas have no place for
        theirs."""
        for name, parameter in self._watched.items():
            if foreign_hooks(parameter):
                raise RuntimeError(
                    f"{name} has gradient hooks, and with replica slots a part of its gradient comes from copies, past "
                    "them: change gradients after balancer.reduce_gradients() instead, or use replica_slots=0"
                )
            if parameter.requires_grad and name not in self._trained:
                raise RuntimeError(
                    f"{name} was frozen when the model was attached and is trained now, but its copies gather no "
                    "gradients: freeze it again, unfreeze it before attach, or use replica_slots=0"
                )
        for name, parameter in self._parameters.items():
            if parameter.requires_grad and name not in self._divided:
                self._hook(parameter)
                self._divided.add(name)

    def _hook(self, parameter: Tensor) -> None:
        parameter.register_hook(partial(self._divide, parameter))

    @torch.compiler.disable
    def _divide(self, parameter: Tensor, gradient: Tensor) -> Tensor:
        if not self.training:
            raise RuntimeError(
                "a backward pass through experts that were attached without an optimizer: their gradients would not be "
                "scaled nor reduced; give the optimizer to attach, or one that is made later to "
                "balancer.adopt(optimizer), on every rank"
            )
        self._arrives(parameter)
        return gradient if self._divisor == 1 else torch.div(gradient, self._divisor)
