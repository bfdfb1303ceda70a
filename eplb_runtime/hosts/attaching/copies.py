"""What carries rows of copies in a job, as its settings ask: made and tried before anything is cut."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ...config import BalancerConfig
from ...distributed.node_memory import NodeMemory, why_not
from ...distributed.process_groups import ProcessGroups
from ...replicas.copy_engine import CopyEngine
from ...replicas.point_to_point import PointToPoint
from ...replicas.row_transport import RowTransport
from ...topology import Topology
from ...utils.errors import one_line
from .checks import raise_on_all


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
    memory = NodeMemory(node, device, _host_seconds())
    memory.connect(time.monotonic() + groups.setup_seconds)
    size = topology.ranks_per_node * groups.job.row_division
    return CopyEngine(memory, groups.job.row_rank // size * size, device, by_torch)


def _host_seconds() -> float:
    """The timeout that the host gave its process group: as long as a lost rank is waited for elsewhere."""
    seconds: float = dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds
