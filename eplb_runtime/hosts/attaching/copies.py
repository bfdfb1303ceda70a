"""What carries rows of copies in a job, as its settings ask: made and tried before anything is cut."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from ...config import BalancerConfig, ConfigError
from ...distributed.process_groups import ProcessGroups
from ...distributed.transports import deepep_package
from ...replicas.copy_engine import CopyEngine
from ...replicas.multicast import Multicast
from ...replicas.node_memory import NodeMemory, why_not
from ...replicas.point_to_point import PointToPoint
from ...replicas.row_transport import RowTransport
from ...topology import Topology
from ...utils.errors import one_line
from .checks import raise_on_all


def transport_of_copies(
    config: BalancerConfig, groups: ProcessGroups, topology: Topology, device: torch.device
) -> RowTransport:
    """Collective over the job.

    Raises:
        AttachError: ``config.copies_by`` cannot be had; on all ranks.
    """
    by_torch = PointToPoint(groups.replicas if config.replica_slots else groups.rows, groups.job.row_ranks)
    if config.copies_by == "torch":
        return by_torch
    lacks, make = {"copy_engine": (_no_copy_engine, _copy_engine), "deepep": (_no_deepep, _deepep)}[config.copies_by]
    raise_on_all(_refused(config, lacks(groups, topology, device)), groups)
    transport: RowTransport = by_torch
    problem = ""
    try:
        transport = make(config, groups, topology, device, by_torch)
    except (RuntimeError, AssertionError, ConfigError) as error:
        problem = one_line(error)
    raise_on_all(_refused(config, problem), groups)
    return transport


def _refused(config: BalancerConfig, why: str) -> str:
    return f"copies_by={config.copies_by!r}: {why}" if why else ""


# -- copy engines ------------------------------------------------------------------------------------------------------


def _no_copy_engine(groups: ProcessGroups, topology: Topology, device: torch.device) -> str:
    """What can be seen before ranks meet, in a line; empty: nothing."""
    return "each rank has a node of its own" if topology.ranks_per_node == 1 else why_not(device)


def _copy_engine(
    config: BalancerConfig, groups: ProcessGroups, topology: Topology, device: torch.device, by_torch: RowTransport
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


# -- DeepEP ------------------------------------------------------------------------------------------------------------


def _imported() -> Any:
    return deepep_package.imported(asked="copies_by='deepep'")


def _no_deepep(groups: ProcessGroups, topology: Topology, device: torch.device) -> str:
    if tuple(groups.job.row_ranks) != tuple(groups.job.ep_ranks):
        return "homes that are divided over ranks of several EP groups are not carried"
    why = deepep_package.why_not_between(topology.num_ranks, topology.ranks_per_node) or deepep_package.why_not(device)
    if why:
        return why
    try:
        _imported()
    except ConfigError as error:
        return str(error)
    return ""


def _deepep(
    config: BalancerConfig, groups: ProcessGroups, topology: Topology, device: torch.device, by_torch: RowTransport
) -> RowTransport:
    package, group = _imported(), groups.dispatch
    shared = deepep_package.shared_between(package, group)
    package.Buffer.set_num_sms(config.dispatch.sms)
    there, back = deepep_package.settings(package, group.size())
    deepep_package.refuse_filled_memory()
    buffer = shared.buffer(group, config.dispatch.sms, there, back)
    return Multicast(buffer, there, group.rank(), group.size(), device, by_torch)
