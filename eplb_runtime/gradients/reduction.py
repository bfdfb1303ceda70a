"""Gradients of a model whose experts are spread over ranks: reduced once a step, and clipped by one norm over all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..experts.registry import ExpertTensors
from ..experts.slices import is_sliced, local
from ..ranks import ProcessGroups
from ..replicas.sync import ReplicaSync
from .norm import squares_of_dense, squares_of_experts, sum_over_stages

BUCKET_BYTES = 32 << 20
"""Gradients of one dtype travel together up to this size."""


class Gradients:
    """Gradients on their way to the optimizer: reduced once a step, and clipped by one norm.

    Args:
        registry: has the expert parameters.
        replicas: brings copies' gradients home; None: there are no copies.
        dense_parameters: the rest of the model.
        average_dense: whether the rest is averaged here, or by the host.
    """

    def __init__(
        self,
        registry: ExpertTensors,
        replicas: ReplicaSync | None,
        dense_parameters: Sequence[Tensor],
        groups: ProcessGroups,
        *,
        average_dense: bool,
    ) -> None:
        self._registry = registry
        self._replicas = replicas
        self._dense_parameters = list(dense_parameters)
        self._groups = groups
        self._average_dense = average_dense
        self._sliced = any(is_sliced(parameter) for parameter in registry.parameters())
        self._reduced = False

    def begin(self) -> None:
        """New gradients come."""
        self._reduced = False

    def reduce(self) -> None:
        """Make every gradient what the optimizer is to see; nothing more until new ones begin. Collective."""
        if self._reduced:
            return
        if self._replicas is not None:
            self._replicas.wait_all()
            self._replicas.reduce_gradients()
        if self._average_dense:
            average_gradients(self._dense_parameters, self._groups.data, self._groups.job.gradient_divisor)
        if self._groups.expert_data is not None and not self._sliced:
            average_gradients(self._registry.parameters(), self._groups.expert_data, 1)
        self._reduced = True

    @torch.no_grad()
    def clip(self, max_norm: float, logical_of_rows_LH: Tensor, num_experts: int) -> Tensor:
        """Reduce, scale down to ``max_norm``, and return the norm before, a float64 scalar. Collective.

        Args:
            logical_of_rows_LH: int64 ``[L, E/R]`` on the model's device: the logical expert of each row here.
            num_experts: E.
        """
        self.reduce()
        experts = [
            (layer, local(parameter.grad))
            for layer in self._registry.layers
            for parameter in self._registry.parameters(layer)
            if parameter.grad is not None
        ]
        dense = [p.grad for p in self._dense_parameters if p.grad is not None]
        slices = self._groups.expert_data if self._sliced else None
        squares = [
            *squares_of_experts(experts, logical_of_rows_LH, num_experts, self._groups.dispatch, slices),
            *squares_of_dense(dense),
        ]
        none = torch.zeros((), dtype=torch.float64, device=logical_of_rows_LH.device)
        norm = sum_over_stages(torch.stack(squares).sum() if squares else none, self._groups).sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in [*(g for _, g in experts), *dense]:
            local(gradient).mul_(scale.to(gradient.dtype))
        return norm


def average_gradients(parameters: Iterable[Tensor], group: dist.ProcessGroup, divisor: int) -> None:
    """Sum the gradients over ``group`` and divide by ``divisor``, in place, a few large all-reduces at a time.

    A parameter without a gradient on some ranks takes part with zeros; one without a gradient on every rank stays so.

    Args:
        parameters: the same, in the same order, on every rank of the group.
    """
    parameters = [p for p in parameters if p.requires_grad]
    if not parameters:
        return
    has_gradient = torch.tensor([p.grad is not None for p in parameters], dtype=torch.uint8)
    has_gradient = has_gradient.to(parameters[0].device)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    gradients = []
    for parameter, present in zip(parameters, has_gradient.tolist(), strict=True):
        if not present:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    for bucket in _buckets(gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
        dist.all_reduce(flat, group=group)
        flat.div_(divisor)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[Tensor]) -> Iterable[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        size = 0
        for gradient in same:
            if bucket and size + gradient.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.nbytes
        yield bucket
