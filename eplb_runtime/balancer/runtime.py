"""One frozen object that holds what a running balancer is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..config import BalancerConfig
from ..distributed.process_groups import ProcessGroups
from ..distributed.ranks import Job
from ..load.clock import ExpertClock
from ..load.counter import LoadCounter
from ..moe.dispatch.channels import MicroBatchChannels
from ..moe.experts.registry import ExpertTensors
from ..moe.layer import ExpertParallelLayer, HostDispatchedLayer
from ..placement import Placement
from ..replicas.sync import Maps
from ..topology import Topology
from .model_check import ModelCheck


class Barrier(Protocol):
    """A wait of all ranks for each other."""

    def __call__(self, what: str, seconds: float | None = None) -> None:
        """Wait until every rank has reached a call; raise on the ranks that have, and name the others, if one does
        not."""


@dataclass(frozen=True)
class Divisors:
    """Divisors of gradients of whole experts: where a layer computes with them, and at every gradient that reaches a
    parameter. Their product is `distributed.ranks.Job.gradient_divisor`."""

    in_layers: float
    at_parameters: float

    @classmethod
    def of(cls, job: Job, *, by_host: bool, dense_is_sharded: bool) -> Divisors:
        """Return divisors for the experts of this rank. ``by_host``: it is not seen which gradient comes from where;
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


@dataclass(frozen=True)
class Runtime:
    """A model's experts, ranks and settings, as attaching has made them. Passed down whole.

    The transport is not in it: `reconnect` replaces it.

    Args:
        topology: of one EP group, with measured bandwidths.
        placement: of the experts at attach.
        registry: the live expert tensors.
        counter: counts tokens while the model runs.
        expert_clock: measures expert work in some steps.
        maps: everything that follows the placement.
        dense_parameters: all parameters outside the experts, by name.
        device: of the experts.
        layer_of_parameter: MoE layer index of each expert parameter, by its name in the model.
        parameters: the expert parameters by these names.
        layers: the MoE layers of this rank.
        host_dispatches: whether the framework dispatches tokens and saves experts; equal on all ranks, also where
            ``layers`` is empty.
        channels: channels on which this rank exchanges tokens.
        model_check: notices changes of the model that the balancer cannot follow.
        divisors: of gradients of whole experts.
        barrier: of all ranks ahead of a collective call.
    """

    config: BalancerConfig
    groups: ProcessGroups
    topology: Topology
    placement: Placement
    registry: ExpertTensors
    counter: LoadCounter
    expert_clock: ExpertClock
    maps: Maps
    dense_parameters: Mapping[str, Tensor]
    device: torch.device
    layer_of_parameter: Mapping[str, int]
    parameters: Mapping[str, Tensor]
    layers: Sequence[ExpertParallelLayer | HostDispatchedLayer]
    host_dispatches: bool
    channels: MicroBatchChannels
    model_check: ModelCheck
    divisors: Divisors
    barrier: Barrier

    @property
    def job(self) -> Job:
        """The ranks of the job and what they share."""
        return self.groups.job

    @property
    def averages_dense(self) -> bool:
        """Return whether the balancer averages gradients outside the experts, and not the host."""
        return self.config.dense_gradients == "allreduce"
