"""The transport that fits: what each rank finds, one choice for all ranks, and torch where the choice does not work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...utils.errors import one_line
from ..node import node_of_this_rank
from . import cuda_ipc, deepep_package, nixl_agent, nvshmem
from .base import Transport, TransportError, first_problem, gather_bytes
from .cuda_ipc import CudaIpc
from .nixl import Nixl
from .torch_p2p import TorchPointToPoint

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Finding:
    """A transport, whether a process like this one can use it, and why not, or what for."""

    name: str
    usable: bool
    why: str


@dataclass(frozen=True)
class TransportChoice:
    """The transport of one job, equal on all its ranks, and why it is not another one."""

    name: str
    why: str


_WHY_NOT: Mapping[str, Callable[[torch.device], str]] = {
    "cuda_ipc": cuda_ipc.why_not,
    "nixl": lambda device: nixl_agent.why_not(),
    "nvshmem": nvshmem.why_not,
    "deepep": deepep_package.why_not,
}


def why_not(name: str, device: torch.device) -> str:
    """Return why this process cannot use a transport, or "". Connects nothing."""
    return _WHY_NOT[name](device) if name in _WHY_NOT else ""


def probe(device: torch.device) -> tuple[Finding, ...]:
    """Return what each transport finds in this process, by name; connects nothing."""
    purposes = {
        "torch": "gloo carries between CPUs" if device.type == "cpu" else "the device's own backend",
        "cuda_ipc": "between the GPUs of one node, by their copy engines",
        "nixl": f"over {', '.join(nixl_agent.rdma_devices()) or 'TCP'}",
        "nvshmem": "between GPUs, where it is asked for",
        "deepep": "between GPUs, where it is asked for",
    }
    whys = {name: why_not(name, device) for name in purposes}
    return tuple(Finding(name, not whys[name], whys[name] or purpose) for name, purpose in purposes.items())


def why_not_each(device: torch.device) -> dict[str, str]:
    """Return why this rank would rather not use each transport, or ""."""
    across = "" if device.type == "cpu" and nixl_agent.rdma_devices() else "no RDMA between CPUs"
    return {"cuda_ipc": why_not("cuda_ipc", device), "nixl": across or why_not("nixl", device)}


def choose(nodes: Sequence[str], lacking: Sequence[Mapping[str, str]]) -> TransportChoice:
    """Return the transport that all ranks will use, by their nodes and what `why_not_each` said of each rank."""
    why = {
        name: next((f"rank {rank}: {said[name]}" for rank, said in enumerate(lacking) if said[name]), "")
        for name in ("cuda_ipc", "nixl")
    }
    other = "nixl" if len(set(nodes)) == 1 else "cuda_ipc"
    why[other] = "one node" if other == "nixl" else "several nodes"
    chosen = next((name for name in why if not why[name]), "torch")
    return TransportChoice(chosen, "; ".join(f"no {name}: {reason}" for name, reason in why.items() if reason))


def automatic(group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> Transport:
    """Return the transport that all ranks of the group choose. Collective, and within the time."""
    transport, choice = choose_together(group, backend, device, timeout_seconds)
    if group.rank() == 0:
        logger.info("transport: %s (%s)", choice.name, choice.why)
    return transport


def choose_together(
    group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float
) -> tuple[Transport, TransportChoice]:
    """Return the transport that works on every rank, warmed up unless it is torch's, and why it is not another one."""
    arguments, deadline = (group, backend, device, timeout_seconds), time.monotonic() + timeout_seconds
    torch_own = TorchPointToPoint(*arguments)
    mine = json.dumps([node_of_this_rank(), why_not_each(device)]).encode()
    said = [json.loads(word) for word in gather_bytes(mine, group, torch_own.device, deadline)]
    choice = choose([node for node, _ in said], [lacking for _, lacking in said])
    if choice.name == "torch":
        return torch_own, choice
    transport: Transport | None = None
    problem = ""
    try:
        transport = CudaIpc(*arguments) if choice.name == "cuda_ipc" else Nixl(*arguments)
        transport.warm_up(time.monotonic() + timeout_seconds / 2)  # if it fails there has to be some time left
    except (TransportError, OSError) as error:
        problem = one_line(error)
    failed = first_problem(problem, group, torch_own.device, deadline)
    if transport is not None and failed is None:
        return transport, choice
    if transport is not None:
        transport.close()
    return torch_own, TransportChoice("torch", f"{choice.name} failed: {failed.text if failed else problem}")
