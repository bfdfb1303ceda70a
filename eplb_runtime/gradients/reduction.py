"""Gradients of a model whose experts are spread over ranks: reduced once a step, and clipped by one norm over all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..experts.registry import ExpertTensors
from ..experts.slices import is_sliced, local, version
from ..phases import phase
from ..process_groups import ProcessGroups
from ..replicas.sync import ReplicaSync
from .averaging import average_gradients
from .norm import squares_of_dense, squares_of_experts, sum_over_stages


class Gradients:
    """Gradients on their way to the optimizer: reduced once a step, and clipped by one norm.

    Args:
        registry: has the expert parameters.
        replicas: brings copies' gradients home; None: there are no copies.
        dense_parameters: the rest of the model, by name; more may join.
        average_dense: whether the rest is averaged here, or by the host.

    Attributes:
        reduced: called whenever gradients have been reduced.
    """

    def __init__(
        self,
        registry: ExpertTensors,
        replicas: ReplicaSync | None,
        dense_parameters: Mapping[str, Tensor],
        groups: ProcessGroups,
        *,
        average_dense: bool,
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._dense_parameters = dense_parameters
        self._groups = groups
        self._average_dense = average_dense
        self._sliced = any(is_sliced(parameter) for parameter in registry.parameters())
        self._reduced = False
        self._seen: list[tuple[int, ...]] | None = None
        self.reduced: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """The optimizer has stepped: new gradients come."""
        self._reduced, self._seen = False, None

    def forward_begins(self) -> None:
        """New gradients may come, or none (a forward between clipping and the step): whether they did shows later."""
        if self._reduced and self._seen is None:
            self._seen = self._versions()

    def reduce(self) -> None:
        """Make every gradient what the optimizer is to see; nothing more until there are new ones. Collective."""
        if self._reduced and (self._seen is None or self._seen == self._versions()):
            if self._sliced and self._replicas is not None:  # a backward pass since brought what no gradient shows yet
                self._replicas.reduce_gradients()
            return
        self._seen = None
        with phase("reduce gradients"):
            self._reduce()
        self._reduced = True
        self.reduced()

    def _reduce(self) -> None:
        if self._replicas is not None:
            self._replicas.wait_all()
            self._replicas.reduce_gradients()
        if self._average_dense:
            average_gradients(self._dense_parameters.values(), self._groups.data, self._groups.job.gradient_divisor)
        if self._groups.expert_data is not None and not self._sliced:
            average_gradients(self._registry.parameters(), self._groups.expert_data, 1, in_rank_order=True)

    def _versions(self) -> list[tuple[int, ...]]:
        """Tells whether any gradient was written or replaced since."""
        gradients = (p.grad for p in (*self._registry.parameters(), *self._dense_parameters.values()))
        return [version(gradient) for gradient in gradients if gradient is not None]

    @torch.no_grad()
    def clip(self, max_norm: float, logical_of_rows_LH: Tensor, num_experts: int) -> Tensor:
        """Reduce, scale down to ``max_norm``, and return the norm before, a float64 scalar. Collective.

        Args:
            logical_of_rows_LH: int64 ``[L, E/R]`` on the model's device: the logical expert of each row here.
            num_experts: E.
        """
        self.reduce()
        experts = [p.grad for p in self._registry.parameters() if p.grad is not None]
        dense = [p.grad for p in self._dense_parameters.values() if p.grad is not None]
        squares = [
            *self._squares_of_experts(logical_of_rows_LH, num_experts, lambda parameter: parameter.grad),
            *squares_of_dense(dense),
        ]
        none = torch.zeros((), dtype=torch.float64, device=logical_of_rows_LH.device)
        norm = sum_over_stages(torch.stack(squares).sum() if squares else none, self._groups).sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in [*experts, *dense]:
            local(gradient).mul_(scale.to(gradient.dtype))
        return norm

    @torch.no_grad()
    def square_of_experts(
        self, logical_of_rows_LH: Tensor, num_experts: int, gradient_of: Callable[[Tensor], Tensor | None]
    ) -> Tensor:
        """The squared norm over all experts of the model, for a host that clips by itself: a float64 scalar, equal on
        every rank and wherever experts stand. Collective.

        Args:
            logical_of_rows_LH, num_experts: as of `clip`.
            gradient_of: what the host would take as the gradient of an expert parameter.
        """
        squares = self._squares_of_experts(logical_of_rows_LH, num_experts, gradient_of)
        none = torch.zeros((), dtype=torch.float64, device=logical_of_rows_LH.device)
        return sum_over_stages(torch.stack(squares).sum() if squares else none, self._groups)

    def _squares_of_experts(
        self, logical_of_rows_LH: Tensor, num_experts: int, gradient_of: Callable[[Tensor], Tensor | None]
    ) -> list[Tensor]:
        gradients: list[tuple[int, Tensor | list[Tensor | None]]] = []
        for layer in self._registry.layers:
            for parameter in self._registry.by_expert(layer):
                if isinstance(parameter, tuple):
                    gradients.append((layer, [gradient_of(row) for row in parameter]))
                    continue
                gradient = gradient_of(parameter)
                if gradient is not None:
                    gradients.append((layer, local(gradient)))
        slices = self._groups.expert_data if self._sliced and not self._groups.job.divided_rows else None
        return squares_of_experts(gradients, logical_of_rows_LH, num_experts, self._groups.rows, slices)
