"""Which carrier fits: what each rank finds, one choice for all, and the way back where the choice does not work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import cuda_memory, deepep_package, nixl_agent, nvshmem_heap, shm
from .base import Message, Pending, Transport, TransportError, first_problem, gather_bytes
from .cuda_ipc import CudaIpc
from .mixed import Mixed
from .neighbours import node_of_this_rank
from .nixl import Nixl
from .shm import SharedMemory
from .torch_p2p import TorchPointToPoint

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Finding:
    """Whether a carrier can be used by a process like this one, and why not, or what for."""

    name: str
    usable: bool
    why: str


@dataclass(frozen=True)
class TransportChoice:
    """The carriers of one job, equal on all its ranks.

    Args:
        within: for ranks of one node.
        across: for ranks of different nodes.
        why: in one line.
    """

    within: str
    across: str
    why: str


def probe(device: torch.device) -> tuple[Finding, ...]:
    """What each carrier finds in this process, by name; connects nothing.

    Args:
        device: the model's.
    """
    missing = shm.missing(device)
    no_cuda_ipc = cuda_memory.missing(device)
    no_nixl = nixl_agent.missing()
    no_nvshmem = nvshmem_heap.missing(device)
    no_deepep = deepep_package.missing(device)
    return (
        Finding("torch", True, "gloo carries between CPUs" if device.type == "cpu" else "the device's own backend"),
        Finding("shm", not missing, missing or "between the ranks of one node"),
        Finding("cuda_ipc", not no_cuda_ipc, no_cuda_ipc or "between the GPUs of one node, by their copy engines"),
        Finding("nixl", not no_nixl, no_nixl or f"over {', '.join(nixl_agent.rdma_devices()) or 'TCP'}"),
        Finding("nvshmem", not no_nvshmem, no_nvshmem or "between GPUs, where it is asked for"),
        Finding("deepep", not no_deepep, no_deepep or "between GPUs, where it is asked for"),
    )


def lacks(device: torch.device, backend: str) -> dict[str, str]:
    """Why this rank would rather not use each carrier; empty: it would.

    Args:
        device: the model's.
        backend: of the migration group.
    """
    # Where messages to other nodes are in host memory, those inside the node have to be, too.
    on_host = f"{backend} carries through host memory" if backend == "gloo" and device.type != "cpu" else ""
    across = "" if device.type == "cpu" and nixl_agent.rdma_devices() else "no RDMA between CPUs"
    return {
        "shm": shm.missing(device),
        "cuda_ipc": cuda_memory.missing(device) or on_host,
        "nixl": across or nixl_agent.missing(),
    }


def choose(nodes: Sequence[str], lacking: Sequence[Mapping[str, str]]) -> TransportChoice:
    """The carriers that all ranks will use.

    Args:
        nodes: of each rank, names of the nodes.
        lacking: of each rank, what `lacks` said.
    """
    why = {
        name: next((f"rank {rank}: {said[name]}" for rank, said in enumerate(lacking) if said[name]), "")
        for name in ("shm", "cuda_ipc", "nixl")
    }
    if len(set(nodes)) == len(nodes):
        why |= {name: why[name] or "each rank has a node of its own" for name in ("shm", "cuda_ipc")}
    if len(set(nodes)) == 1:
        why["nixl"] = why["nixl"] or "one node"
    within = next((name for name in ("shm", "cuda_ipc") if not why[name]), "torch")
    across = "torch" if why["nixl"] else "nixl"
    unused = [name for name in why if why[name] and not (name == "cuda_ipc" and within == "shm")]
    return TransportChoice(within, across, "; ".join(f"no {name}: {why[name]}" for name in unused))


class Automatic(Transport):
    """Chooses when it warms up, with all ranks of the group; torch.distributed until then, and where the choice fails.

    Args:
        group, backend, device, timeout_seconds: as for every carrier.

    Attributes:
        choice: None before `warm_up`.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self._group = group
        self._arguments = (group, backend, device, timeout_seconds)
        self._carrier: Transport = TorchPointToPoint(*self._arguments)
        self._model_device = device
        self.device = self._carrier.device
        self.choice: TransportChoice | None = None

    def warm_up(self, deadline: float) -> None:
        mine = json.dumps([node_of_this_rank(), lacks(self._model_device, self._arguments[1])]).encode()
        words = gather_bytes(mine, self._group, self.device, deadline)
        said: list[tuple[str, dict[str, str]]] = [json.loads(word) for word in words]
        nodes = [node for node, _ in said]
        self.choice = choose(nodes, [lacking for _, lacking in said])
        if (self.choice.within, self.choice.across) != ("torch", "torch"):
            problem = self._try(nodes, self.choice, deadline)
            if problem:
                self.choice = TransportChoice(
                    "torch", "torch", f"{self.choice.within} or {self.choice.across} failed: {problem}"
                )
        if (self.choice.within, self.choice.across) == ("torch", "torch"):
            self._carrier.warm_up(deadline)
        if self._group.rank() == 0:
            chosen = self.choice
            logger.info("transport: %s within nodes, %s across (%s)", chosen.within, chosen.across, chosen.why)

    @property
    def hashes(self) -> bool:  # type: ignore[override]
        return self._carrier.hashes

    @property
    def one_by_one(self) -> bool:  # type: ignore[override]
        return self._carrier.one_by_one

    def wait_at_most(self, seconds: float) -> None:
        self._carrier.wait_at_most(seconds)

    def register(self, regions: Sequence[Tensor]) -> None:
        self._carrier.register(regions)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        return self._carrier.post(sends, receives)

    def empty(self, nbytes: int) -> Tensor:
        return self._carrier.empty(nbytes)

    def seconds(self, sends: Sequence[Message], receives: Sequence[Message], deadline: float) -> float:
        return self._carrier.seconds(sends, receives, deadline)

    def close(self) -> None:
        self._carrier.close()

    def _make(self, name: str, peers: Sequence[int]) -> Transport:
        if name == "shm":
            return SharedMemory(*self._arguments, peers=peers)
        if name == "cuda_ipc":
            return CudaIpc(*self._arguments, peers=peers)
        return Nixl(*self._arguments, peers=peers) if name == "nixl" else TorchPointToPoint(*self._arguments)

    def _try(self, nodes: Sequence[str], choice: TransportChoice, deadline: float) -> str:
        """Use these carriers if they work on every rank; else why they do not."""
        own = nodes[self._group.rank()]
        near = [rank for rank, node in enumerate(nodes) if node == own]
        far = [rank for rank, node in enumerate(nodes) if node != own]
        carrier, problem = None, ""
        try:
            carrier = self._make(choice.within, near)
            if far:
                carrier = Mixed(carrier, self._make(choice.across, far), near)
            # Half of the time: if it fails there has to be some left.
            carrier.warm_up((time.monotonic() + deadline) / 2)
        except (TransportError, OSError) as error:
            problem = str(error) or type(error).__name__
        failed = first_problem(problem, self._group, self.device, deadline)
        if carrier is not None and failed is None:
            self._carrier = carrier
        elif carrier is not None:
            carrier.close()
        return "" if failed is None else failed.text
