"""Replica slots of a job: what carries their rows, and what computes a layer's experts on this rank with them."""

from __future__ import annotations

import time
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...balancer.runtime import Divisors
from ...config import BalancerConfig
from ...distributed.node_memory import NodeMemory, why_not
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Job
from ...moe.experts.aligned import Aligned
from ...moe.experts.compute import LocalExperts
from ...moe.experts.slices import is_sliced
from ...replicas.bank import ReplicaBank
from ...replicas.compute import PersistentReplicas, ReplicaGather, ShardedReplicas
from ...replicas.copy_engine import CopyEngine
from ...replicas.plan import RowTransport
from ...replicas.point_to_point import PointToPoint
from ...replicas.sync import ReplicaSync
from ...topology import Topology
from ...utils.errors import one_line
from .checks import raise_on_all
from .description import MoELayer


def transport_of_copies(
    config: BalancerConfig, groups: ProcessGroups, topology: Topology, device: torch.device
) -> RowTransport:
    """Return what carries rows of replicas, or raise AttachError on all ranks. Collective over the job."""
    rows = groups.replicas if config.replica_slots else groups.rows
    transport: RowTransport = PointToPoint(rows, groups.job.row_ranks)
    if config.copies_by == "torch":
        return transport
    # What can be seen before ranks meet.
    alone = topology.ranks_per_node == 1
    raise_on_all(_refused("each rank has a node of its own" if alone else why_not(device)), groups)
    problem = ""
    try:
        transport = _copy_engine(groups, topology, device, transport)
    except (RuntimeError, AssertionError) as error:
        problem = one_line(error)
    raise_on_all(_refused(problem), groups)
    return transport


def _refused(why: str) -> str:
    return f"copies_by='copy_engine': {why}" if why else ""


def _copy_engine(
    groups: ProcessGroups, topology: Topology, device: torch.device, by_torch: RowTransport
) -> RowTransport:
    node = groups.of_nodes(topology.ranks_per_node)
    # As long as any wait for a lost rank.
    host_seconds = dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    memory = NodeMemory(node, device, host_seconds)
    memory.connect(time.monotonic() + groups.setup_seconds)
    size = topology.ranks_per_node * groups.job.row_division
    return CopyEngine(memory, groups.job.row_rank // size * size, device, by_torch)


def local_experts(
    index: int,
    layer: MoELayer,
    job: Job,
    divisors: Divisors,
    replicas: ReplicaSync | None,
    bank: ReplicaBank | None,
    gather: ReplicaGather,
) -> LocalExperts:
    """Return the slots of one layer, as dispatch calls them."""
    assert layer.compute is not None
    compute = layer.compute if layer.alignment == 1 else Aligned(layer.compute, layer.alignment)
    leaves = _live_parameters(layer)
    sliced = any(is_sliced(parameter) for parameter in leaves)
    # FSDP averages over EDP; the rest of the division is done before. A host that divides rows reduces by itself.
    of_slices = 1.0 if job.divided_rows else job.gradient_divisor / len(job.edp_ranks)
    divisor = of_slices if sliced else divisors.in_layers
    if replicas is None and layer.live_weights is not None:
        return LocalExperts(compute, layer.live_weights, divisor=1.0 if sliced else divisor)
    if replicas is None:
        return LocalExperts(compute, partial(_live_parameters, layer), divisor)
    assert bank is not None
    if bank.is_sliced:
        live_weights = layer.live_weights or partial(_live_parameters, layer)
        return ShardedReplicas(compute, live_weights, divisor, index, bank, replicas, gather=gather)
    return PersistentReplicas(compute, lambda: bank.parameters, divisor, index, bank, replicas)


def _live_parameters(layer: MoELayer) -> list[Tensor]:
    return [layer.parameter(name) for name in layer.parameters]
