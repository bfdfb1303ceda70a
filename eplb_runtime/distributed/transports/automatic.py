"""The transport that fits: what each rank finds, one choice for all ranks, and torch where the choice does not work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...utils.errors import one_line
from .. import node_memory
from ..consensus import first_problem, gather_bytes
from ..node import node_of_this_rank
from . import nixl
from .base import Transport, TransportError
from .cuda_ipc import CudaIpc
from .torch_p2p import TorchPointToPoint

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class TransportChoice:
    """The transport of one job, equal on all its ranks, and why."""

    name: str
    why: str


def why_rather_not(device: torch.device) -> dict[str, str]:
    """Return why this rank would rather not use each transport that can be chosen, or "". Connects nothing."""
    has_rdma = device.type == "cpu" and nixl.rdma_devices()
    return {"cuda_ipc": node_memory.why_not(device), "nixl": nixl.why_not() if has_rdma else "no RDMA between CPUs"}


def choose(nodes: Sequence[str], lacking: Sequence[Mapping[str, str]]) -> TransportChoice:
    """Return the transport that all ranks will use, by their nodes and what `why_rather_not` said of each rank."""
    name, where = ("cuda_ipc", "one node") if len(set(nodes)) == 1 else ("nixl", "several nodes")
    for rank, said in enumerate(lacking):
        if said[name]:
            return TransportChoice("torch", f"{where}; no {name}: rank {rank}: {said[name]}")
    return TransportChoice(name, where)


def automatic(group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> Transport:
    """Return the transport that all ranks of the group choose. Collective, and within the time."""
    transport, choice = choose_together(group, backend, device, timeout_seconds)
    if group.rank() == 0:
        logger.info("transport: %s (%s)", choice.name, choice.why)
    return transport


def choose_together(
    group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float
) -> tuple[Transport, TransportChoice]:
    """Return the transport that works on every rank, warmed up unless it is torch's, and why it is that one."""
    arguments, deadline = (group, backend, device, timeout_seconds), time.monotonic() + timeout_seconds
    torch_own = TorchPointToPoint(*arguments)
    mine = json.dumps([node_of_this_rank(), why_rather_not(device)]).encode()
    said = [json.loads(word) for word in gather_bytes(mine, group, torch_own.device, deadline)]
    choice = choose([node for node, _ in said], [lacking for _, lacking in said])
    if choice.name == "torch":
        return torch_own, choice
    transport: Transport | None = None
    problem = ""
    try:
        transport = CudaIpc(*arguments) if choice.name == "cuda_ipc" else nixl.Nixl(*arguments)
        transport.warm_up(time.monotonic() + timeout_seconds / 2)  # if it fails there has to be some time left
    except (TransportError, OSError) as error:
        problem = one_line(error)
    failed = first_problem(problem, group, torch_own.device, deadline)
    if transport is not None and not failed:
        return transport, choice
    if transport is not None:
        transport.close()
    return torch_own, TransportChoice("torch", f"{choice.name} failed: {failed}")
