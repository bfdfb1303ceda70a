"""Transports of expert bytes by the name that users give, one file each behind `base.Transport`; and the one that fits:
what each rank finds, one choice for all ranks, and torch where the choice does not work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from ...utils.text import one_line
from ..consensus import first_problem, gather_json
from . import nixl, symmetric
from .base import Transport, TransportError
from .deepep import DeepEP
from .nixl import Nixl
from .nvshmem import Nvshmem
from .symmetric import CudaIpc, node_of_this_rank
from .torch_p2p import TorchPointToPoint

logger = logging.getLogger("eplb_runtime")


def why_rather_not(device: torch.device) -> dict[str, str]:
    """Return why this rank would rather not use each transport that can be chosen, or "". Connects nothing."""
    has_rdma = device.type == "cpu" and nixl.rdma_devices()
    return {"cuda_ipc": symmetric.why_not(device), "nixl": nixl.why_not() if has_rdma else "no RDMA between CPUs"}


def choose(nodes: Sequence[str], lacking: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Return the transport that all ranks will use, and why, by their nodes and what `why_rather_not` said of each."""
    name, where = ("cuda_ipc", "one node") if len(set(nodes)) == 1 else ("nixl", "several nodes")
    for rank, said in enumerate(lacking):
        if said[name]:
            return "torch", f"{where}; no {name}: rank {rank}: {said[name]}"
    return name, where


def automatic(group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> Transport:
    """Return the transport that works on every rank, warmed up unless it is torch's. Collective, and in time."""
    arguments, deadline = (group, backend, device, timeout_seconds), time.monotonic() + timeout_seconds
    torch_own = TorchPointToPoint(*arguments)
    said = gather_json([node_of_this_rank(), why_rather_not(device)], group, torch_own.device, deadline)
    name, why = choose([node for node, _ in said], [lacking for _, lacking in said])
    made: Transport | None = None
    if name != "torch":
        problem = ""
        try:
            made = TRANSPORTS[name](*arguments)
            made.warm_up(time.monotonic() + timeout_seconds / 2)  # if it fails there has to be some time left
        except (TransportError, OSError) as error:
            problem = one_line(error)
        if failed := first_problem(problem, group, torch_own.device, deadline):
            why, name = f"{name} failed: {failed}", "torch"
            if made is not None:
                made.close()
    if group.rank() == 0:
        logger.info("transport: %s (%s)", name, why)
    return torch_own if made is None or name == "torch" else made


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
