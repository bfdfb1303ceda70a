"""Reduces the gradients of a model with spread experts once a step, and clips them by one norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ...moe.experts.slices import is_sliced, local
from ...utils.spans import phase
from ..runtime import Runtime
from .averaging import Averaging
from .norm import Gradient, over_stages, powers_of_dense, powers_of_experts
from .norm_of_ranges import RangesOfSlots


class Gradients:
    """Gradients of one model: each contribution is reduced once, and all are clipped by one norm. ``follow`` is called
    before each reduction, to learn of parameters that have joined; ``logical_of_rows`` gives int64 ``[L, E/R]`` on the
    model's device, the logical expert of each row here."""

    def __init__(
        self,
        runtime: Runtime,
        dense_parameters: Mapping[str, Tensor],
        logical_of_rows: Callable[[], Tensor],
        *,
        follow: Callable[[], None],
    ) -> None:
        groups = runtime.groups
        self._registry = runtime.registry
        self._replicas = runtime.maps.replicas
        self._dense_parameters = dense_parameters
        self._logical_of_rows, self._num_experts = logical_of_rows, runtime.placement.num_experts
        self._groups, self._device = groups, runtime.device
        self._follow = follow
        self._sliced = any(is_sliced(parameter) for parameter in self._registry.parameters())
        self._averaged: list[Averaging] = []
        if runtime.averages_dense:
            self._averaged.append(Averaging(dense_parameters, groups.data, groups.job.gradient_divisor))
        self._of_experts: Averaging | None = None
        if groups.expert_data is not None and not self._sliced:
            self._of_experts = Averaging(
                runtime.parameters, groups.expert_data, 1, in_rank_order=True, hooked_by_caller=True
            )
            self._averaged.append(self._of_experts)
        self._first = True
        self._new = True

    def begin(self) -> None:
        """Begin new gradients after an optimizer's step."""
        self._first = True
        self.moved()

    def moved(self) -> None:
        """Note that experts have moved between steps, with their gradients."""
        for averaging in self._averaged:
            averaging.step_is_over()

    def forward_begins(self) -> None:
        """Expect new gradients, of slices where no hook sees them."""
        self._new = self._new or self._sliced
        if self._sliced and self._registry.has_left_behind:
            self._registry.forget_zeroed()

    def arrives(self, parameter: Tensor) -> None:
        """Note that a backward pass, or a replica, is about to add to the gradient of an expert parameter."""
        self._new = True
        if self._registry.has_left_behind:
            self._registry.refuse_left_behind(parameter)
        if self._of_experts is not None:
            self._of_experts.arrives(parameter)

    def reduce(self) -> None:
        """Reduce all gradients for the optimizer; without new ones nothing happens. Collective."""
        self._follow()
        if self._registry.has_left_behind:
            self._registry.refuse_left_behind()
        if self._replicas is not None:  # replicas may have gradients that no home shows yet
            self._replicas.wait_all()
            self._replicas.reduce_gradients()
        new = self._first or self._new or any(averaging.has_new for averaging in self._averaged)
        if not new and not any(averaging.has_replaced for averaging in self._averaged):
            return
        with phase("reduce gradients"):
            for averaging in self._averaged:
                averaging.reduce(first=self._first)
        self._first = self._new = False

    @torch.no_grad()
    def clip(self, max_norm: float, parameters: Iterable[Tensor] | None, norm_type: float) -> Tensor:
        """Reduce, scale down to ``max_norm``, and return the norm before, a float64 scalar. Collective.

        Args:
            parameters: those that are scaled, by their own norm; None: all.
            norm_type: p of the norm, above 0.

        Raises:
            ValueError: one of them is not of the model; or they are some of a layer's experts, of separate tensors; or
                there is no such norm.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type={norm_type}: give a number above 0, or math.inf")
        chosen = None if parameters is None else self._chosen(parameters)
        self.reduce()

        def gradient_of(parameter: Tensor) -> Tensor | None:
            return parameter.grad if chosen is None or parameter in chosen else None

        experts = [g for p in self._registry.parameters() if (g := gradient_of(p)) is not None]
        dense = [g for p in self._dense_parameters.values() if (g := gradient_of(p)) is not None]
        powers = [*self._powers_of_experts(gradient_of, norm_type), *powers_of_dense(dense, norm_type)]
        norm = over_stages(powers, self._groups, self._device, norm_type)
        norm = norm if math.isinf(norm_type) else norm.pow(1 / norm_type)
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in [*experts, *dense]:
            local(gradient).mul_(scale.to(gradient.dtype))
        return norm

    def _chosen(self, parameters: Iterable[Tensor]) -> set[Tensor]:
        chosen = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        known = {*self._registry.parameters(), *self._dense_parameters.values()}
        for parameter in chosen - known:
            raise ValueError(
                f"a tensor of shape {list(parameter.shape)} is no parameter of the attached model: give those of "
                "model.parameters() as they are since attach"
            )
        for layer in self._registry.layers:
            for separate in self._registry.by_expert(layer):
                if isinstance(separate, tuple) and 0 < len(chosen.intersection(separate)) < len(separate):
                    raise ValueError(
                        "parameters= has some experts of a layer and leaves others out, which stand elsewhere after a "
                        "move: give all experts of a layer"
                    )
        return chosen

    @torch.no_grad()
    def square_of_experts(self, gradient_of: Callable[[Tensor], Tensor | None]) -> Tensor:
        """Return the squared norm over all experts of the model, for a host that clips by itself: a float64 scalar,
        equal on every rank and for every placement. Collective."""
        return over_stages(self._powers_of_experts(gradient_of, 2.0), self._groups, self._device, 2.0)

    def _powers_of_experts(self, gradient_of: Callable[[Tensor], Tensor | None], norm_type: float) -> list[Tensor]:
        gradients: list[tuple[int, Gradient]] = []
        for layer in self._registry.layers:
            for parameter in self._registry.by_expert(layer):
                if isinstance(parameter, tuple):
                    of_slots = [gradient_of(row) for row in parameter]
                    ranges = self._registry.ranges_of(parameter)
                    gradients.append((layer, RangesOfSlots(of_slots, ranges) if ranges else of_slots))
                    continue
                gradient = gradient_of(parameter)
                # Also where there is none: other ranks may have one, and all meet for each.
                gradients.append((layer, [] if gradient is None else local(gradient)))
        slices = self._groups.expert_data if self._sliced and not self._groups.job.divided_rows else None
        rows_LH = self._logical_of_rows()
        return powers_of_experts(gradients, rows_LH, self._num_experts, self._groups, slices, norm_type)
