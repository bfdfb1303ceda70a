"""How fast the links really are, measured once at attach with the transport that will be used."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ..topology import Topology
from ..utils.text import one_line
from .consensus import TransportError, maxima
from .transports.base import Message, Transport

FIRST_BYTES = 8 << 20
LEAST_SECONDS = 0.004
"""Messages grow until they take so long. Shorter ones tell how ranks start, not how fast a link is: 8 MiB are through
NVLink in 20 microseconds, and ranks leave a barrier up to 100 apart."""
MOST_BYTES = {"cpu": 64 << 20, "cuda": 2 << 30}
SHARE_OF_FREE_MEMORY = 8
"""On a device, a probe takes at most one part in so many of what is free, for each of its two buffers."""
REPEATS = 3


def measure(
    topology: Topology,
    transport: Transport,
    ep_rank: int,
    control: dist.ProcessGroup,
    timeout_seconds: float,
    peers: Sequence[int] | None = None,
) -> Topology:
    """Return the topology with measured bandwidths: the slowest rank's, every rank sending and receiving at once, in a
    ring inside each node, then one across nodes. A link class that does not exist keeps its default. Collective."""
    size, node = topology.num_ranks, topology.ranks_per_node
    peers = range(size) if peers is None else peers
    first, local = ep_rank - ep_rank % node, ep_rank % node
    rings = {
        "intra_node_bandwidth": (first + (local + 1) % node, first + (local - 1) % node),
        "inter_node_bandwidth": ((ep_rank + node) % size, (ep_rank - node) % size),
    }
    deadline = time.monotonic() + timeout_seconds
    try:
        most = MOST_BYTES[transport.device.type]
        if transport.device.type == "cuda":
            most = min(most, torch.cuda.mem_get_info(transport.device)[0] // SHARE_OF_FREE_MEMORY)
        most = max(1, -int(maxima(torch.tensor(-most), control)))  # what the rank with the least memory can spare
        measured = {
            name: _bandwidth(transport, peers[to], peers[source], most, control, deadline)
            for name, (to, source) in rings.items()
            if to != ep_rank
        }
    except TransportError:
        raise
    except RuntimeError as error:
        raise TransportError(f"the links could not be measured: {one_line(error)}") from error
    return replace(topology, **measured)  # type: ignore[arg-type]


def _bandwidth(
    transport: Transport, destination: int, source: int, most: int, control: dist.ProcessGroup, deadline: float
) -> float:
    """Return bytes a second, by messages large enough to trust the clock; equal on all ranks."""
    nbytes = min(FIRST_BYTES, most)
    while True:
        out, arrived = transport.empty(nbytes).zero_(), transport.empty(nbytes)
        seconds = []
        for _ in range(REPEATS):
            if transport.device.type == "cuda":
                torch.cuda.synchronize(transport.device)  # what is queued is no part of it, on no rank
            dist.barrier(group=control)
            began = time.perf_counter()
            transport.post([Message(destination, out)], [Message(source, arrived)]).wait(deadline)
            seconds.append(time.perf_counter() - began)
        del out, arrived
        # Every rank takes the same way from here: the slowest one's time.
        slowest = float(maxima(torch.tensor(min(seconds), dtype=torch.float64), control))
        larger = min(most, max(2 * nbytes, int(1.5 * nbytes * LEAST_SECONDS / slowest)))
        if slowest >= LEAST_SECONDS or larger == nbytes:
            return nbytes / slowest
        nbytes = larger
