"""Transports of expert bytes by the name that users give, one file each behind `base.Transport`. The one that fits is
what each rank finds, one choice for all ranks, and torch where that does not work. How fast it is is measured once."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ...topology import Topology
from ...utils.text import one_line
from ..consensus import first_problem, gather_json, maxima
from . import nixl, symmetric
from .base import Message, Transport, TransportError
from .deepep import DeepEP
from .nixl import Nixl
from .nvshmem import Nvshmem
from .symmetric import CudaIpc, node_of_this_rank
from .torch_p2p import TorchPointToPoint

logger = logging.getLogger("eplb_runtime")


def why_rather_not(name: str, device: torch.device) -> str:
    """Return why this rank would rather not use ``name``, "cuda_ipc" or "nixl"; "": it would."""
    if name == "cuda_ipc":
        return symmetric.why_not(device)
    return nixl.why_not() if device.type == "cpu" and nixl.rdma_devices() else "no RDMA between CPUs"


def automatic(group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> Transport:
    """Return the transport that works on every rank: inside a node CUDA IPC, between nodes NIXL, both warmed up; else
    torch's, not warmed up. Rank 0 logs which and why. Collective. ``timeout_seconds`` is for all of it."""
    arguments, deadline = (group, backend, device, timeout_seconds), time.monotonic() + timeout_seconds
    made: Transport = TorchPointToPoint(*arguments)
    of_torch, here = made, (group, made.device, deadline)
    several = len(set(gather_json(node_of_this_rank(), *here))) > 1
    name, where = ("nixl", "several nodes") if several else ("cuda_ipc", "one node")
    if not (why := first_problem(problem := why_rather_not(name, device), *here)):
        try:
            made = TRANSPORTS[name](*arguments)
            made.warm_up(time.monotonic() + timeout_seconds / 2)  # if it fails there has to be some time left
        except (TransportError, OSError) as error:
            problem = one_line(error)
        if why := first_problem(problem, *here):
            made.close()
            made = of_torch
    if group.rank() == 0:
        logger.info("transport: %s", f"torch ({where}; no {name}: {why})" if why else f"{name} ({where})")
    return made


TRANSPORTS: dict[str, Callable[[dist.ProcessGroup, str, torch.device, float], Transport]] = {
    "torch": TorchPointToPoint,
    "cuda_ipc": CudaIpc,
    "nixl": Nixl,
    "nvshmem": Nvshmem,
    "deepep": DeepEP,
    "auto": automatic,
}
"""``MigrationConfig.transport`` -> made of the EP group's migration group, the name of its backend, the model's device,
and the most seconds that anything is waited for."""

FIRST_BYTES, LEAST_SECONDS, REPEATS = 8 << 20, 0.004, 3
"""To measure links, messages grow until they take so long. Shorter ones tell how ranks start, not how fast a link is:
8 MiB are through NVLink in 20 microseconds, and ranks leave a barrier up to 100 apart."""
MOST_BYTES, SHARE_OF_FREE_MEMORY = {"cpu": 64 << 20, "cuda": 2 << 30}, 8
"""On a device, a probe takes at most one part in so many of what is free, for each of its two buffers."""


def measure(
    topology: Topology,
    transport: Transport,
    ep_rank: int,
    control: dist.ProcessGroup,
    timeout_seconds: float,
    peers: Sequence[int] | None = None,
) -> Topology:
    """Return the topology with measured bandwidths (bytes a second): the slowest rank's while every rank sends and
    receives, in a ring inside each node, then one across nodes. A link class that does not exist keeps its default.
    Collective. TransportError: it failed. ``peers``: the transport's rank of each EP rank; None: the same numbers."""
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
