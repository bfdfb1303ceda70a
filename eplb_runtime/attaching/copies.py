"""What carries rows of copies in a job, as its settings ask: made and tried before anything is cut."""

from __future__ import annotations

import logging
import time

import torch
import torch.distributed as dist

from ..config import BalancerConfig
from ..migration.transports.base import TransportError
from ..process_groups import ProcessGroups
from ..replicas.carrier import Carrier
from ..replicas.copy_engine import LEAST_CHANNELS, CopyEngine
from ..replicas.node_memory import NodeMemory, missing
from ..replicas.point_to_point import PointToPoint
from ..topology import Topology
from .checks import raise_on_all

logger = logging.getLogger("eplb_runtime")


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
    # A rank that is alone on its node has nobody there to copy to, and between nodes all do as torch does.
    memory = NodeMemory(node, device, _host_seconds()) if node.size() > 1 else None
    problem = ""
    if memory is not None:
        try:
            memory.meet(time.monotonic() + config.timeout_seconds)
            if memory.channels < LEAST_CHANNELS:
                problem = (
                    f"torch's signal pad has room for {memory.channels} signals between {memory.size} ranks, and "
                    f"{LEAST_CHANNELS} are needed: call torch.distributed._symmetric_memory.set_signal_pad_size first"
                )
        except (RuntimeError, TransportError) as error:
            problem = (str(error).strip().splitlines() or [type(error).__name__])[0]
    raise_on_all(_refused(config, problem), groups)
    if memory is None:
        return by_torch
    size = topology.ranks_per_node * groups.job.row_parts
    return CopyEngine(memory, groups.job.row_rank // size * size, device, by_torch)


def _refused(config: BalancerConfig, why: str) -> str:
    return f"copies_by={config.copies_by!r}: {why}" if why else ""


def _host_seconds() -> float:
    """The timeout that the host gave its process group: as long as a lost rank is waited for elsewhere."""
    seconds: float = dist.distributed_c10d._get_default_store().timeout.total_seconds()  # type: ignore[attr-defined]
    return seconds
