"""What carries rows of copies in a job, as its settings ask: made and tried before anything is cut."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ..config import BalancerConfig
from ..process_groups import ProcessGroups
from ..replicas.carrier import Carrier
from ..replicas.copy_engine import CopyEngine
from ..replicas.node_memory import NodeMemory, missing
from ..replicas.point_to_point import PointToPoint
from ..topology import Topology
from .checks import raise_on_all


def carrier_of_copies(
    config: BalancerConfig, groups: ProcessGroups, topology: Topology, device: torch.device
) -> Carrier:
    """Collective over the job.

    Raises:
        AttachError: ``config.copies_by`` cannot be had; on all ranks.
    """
    by_torch = PointToPoint(groups.replicas, groups.job.row_ranks)
    if config.copies_by == "torch":
        return by_torch
    if topology.ranks_per_node == 1:
        raise_on_all(_refused(config, "each rank has a node of its own"), groups)
    raise_on_all(_refused(config, missing(device)), groups)
    node = groups.of_nodes(topology.ranks_per_node)
    memory = NodeMemory(node, device, _host_seconds())
    problem = ""
    try:
        memory.meet(time.monotonic() + config.timeout_seconds)
    except RuntimeError as error:
        problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise_on_all(_refused(config, problem), groups)
    size = topology.ranks_per_node * groups.job.row_parts
    return CopyEngine(memory, groups.job.row_rank // size * size, device, by_torch)


def _refused(config: BalancerConfig, why: str) -> str:
    return f"copies_by={config.copies_by!r}: {why}" if why else ""


def _host_seconds() -> float:
    """The timeout that the host gave its process group: as long as a lost rank is waited for elsewhere."""
    seconds: float = dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds
