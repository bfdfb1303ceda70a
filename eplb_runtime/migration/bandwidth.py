"""How fast the links really are, measured once at attach with the transport that will be used."""

from __future__ import annotations

import time
from dataclasses import replace

import torch
import torch.distributed as dist

from ..topology import Topology
from .transports.base import Message, Transport

PROBE_BYTES = 8 << 20


def measure(topology: Topology, transport: Transport, ep_rank: int, control: dist.ProcessGroup) -> Topology:
    """The topology with measured bandwidths: the slowest rank's, every rank sending and receiving at once.

    Ranks form a ring inside each node, then one across nodes. A link class that does not exist keeps its default.
    """
    size, node = topology.num_ranks, topology.ranks_per_node
    first, local = ep_rank - ep_rank % node, ep_rank % node
    rings = {
        "intra_node_bandwidth": (first + (local + 1) % node, first + (local - 1) % node),
        "inter_node_bandwidth": ((ep_rank + node) % size, (ep_rank - node) % size),
    }
    measured: dict[str, float] = {}
    for name, (destination, source) in rings.items():
        if destination == ep_rank:
            continue
        out, arrived = transport.empty(PROBE_BYTES).zero_(), transport.empty(PROBE_BYTES)
        seconds = []
        for _ in range(3):
            dist.barrier(group=control)
            started = time.perf_counter()
            transport.exchange([Message(destination, out)], [Message(source, arrived)])
            seconds.append(time.perf_counter() - started)
        slowest = torch.tensor([min(seconds)], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=control)
        measured[name] = PROBE_BYTES / slowest.item()
    return replace(
        topology,
        intra_node_bandwidth=measured.get("intra_node_bandwidth", topology.intra_node_bandwidth),
        inter_node_bandwidth=measured.get("inter_node_bandwidth", topology.inter_node_bandwidth),
    )
