"""What attaching hands over to a balancer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import BalancerConfig
from ..distributed.hang_watchdog import Watch
from ..distributed.process_groups import ProcessGroups
from ..distributed.transports.base import Transport
from ..load.counter import LoadCounter
from ..moe.dispatch.channels import MicroBatchChannels
from ..moe.experts.registry import ExpertTensors
from ..moe.kernel_selection import Kernels
from ..moe.layer import ExpertParallelLayer, HostDispatchedLayer
from ..placement import Placement
from ..replicas.placement_maps import Maps
from ..topology import Topology
from .gradients.division import Divisors
from .guard_samples import Stepper, Watched
from .model_check import Structure


@dataclass(frozen=True)
class Parts:
    """What attaching has made of a model; a balancer is put together from it.

    Args:
        topology: of one EP group, with measured bandwidths.
        placement: where the experts stand.
        registry: the live expert tensors.
        counter: counts tokens while the model runs.
        maps: what follows the placement.
        transport: carries experts, warmed up.
        dense_parameters: the rest of the model, by name.
        device: of the model.
        layer_of_parameter: MoE layer index of each expert parameter, by its name in the model.
        parameters: the expert parameters by these names.
        layers: the MoE layers that are here.
        lanes: the ways of this rank's exchanges of tokens.
        watch: sees how long this rank waits for others.
        structure: what in a model must stay as it is.
        kernels: what is computed by kernels of ours.
        divisors: of gradients of whole experts.
        come: given the name of a collective call, returns when all ranks have come to it; else raises on those that
            have, and names the others.
    """

    config: BalancerConfig
    groups: ProcessGroups
    topology: Topology
    placement: Placement
    registry: ExpertTensors
    counter: LoadCounter
    maps: Maps
    transport: Transport
    dense_parameters: Mapping[str, Tensor]
    device: torch.device
    layer_of_parameter: Mapping[str, int]
    parameters: Mapping[str, Tensor]
    layers: Sequence[ExpertParallelLayer | HostDispatchedLayer]
    lanes: MicroBatchChannels
    watch: Watch
    structure: Structure
    kernels: Kernels
    divisors: Divisors
    come: Callable[[str], None]


def watched(parts: Parts, dense: Mapping[str, Tensor], optimizers: Sequence[Stepper]) -> Watched:
    """What of them the guard looks at; parameters and optimizers that join later are in these very objects."""
    counter, layers = parts.counter, parts.layers  # the guard lives as long as the model: not so the transport
    return Watched(
        dense=dense,
        experts={name: parts.parameters[name] for name in parts.layer_of_parameter},
        optimizers=optimizers,
        average_dense=parts.config.dense_gradients == "allreduce",
        counts=lambda: int(counter.counts.sum()),
        calls=lambda: sum(layer.calls for layer in layers),
        uncounted=lambda: sum(layer.uncounted for layer in layers),
    )
