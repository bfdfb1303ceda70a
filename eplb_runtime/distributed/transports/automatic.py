"""The transport that fits: what each rank finds, one choice for all ranks, and torch where the choice does not work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...utils.errors import one_line
from . import cuda_memory, deepep_package, nixl_agent, nvshmem_heap, shm
from .base import (
    Message,
    Pending,
    PendingGroup,
    Transport,
    TransportError,
    Wrapping,
    first_problem,
    gather_bytes,
)
from .cuda_ipc import CudaIpc
from .neighbours import node_of_this_rank
from .nixl import Nixl
from .shm import SharedMemory
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
    """The transports of one job, equal on all its ranks.

    Args:
        within: for ranks of one node.
        across: for ranks of different nodes.
        why: in one line.
    """

    within: str
    across: str
    why: str


_WHY_NOT: Mapping[str, Callable[[torch.device], str]] = {
    "shm": shm.why_not,
    "cuda_ipc": cuda_memory.why_not,
    "nixl": lambda device: nixl_agent.why_not(),
    "nvshmem": nvshmem_heap.why_not,
    "deepep": deepep_package.why_not,
}


def why_not(name: str, device: torch.device) -> str:
    """Return why this process cannot use a transport, in a line; empty if it can. Connects nothing.

    Args:
        device: the model's.
    """
    return _WHY_NOT[name](device) if name in _WHY_NOT else ""


def probe(device: torch.device) -> tuple[Finding, ...]:
    """Return what each transport finds in this process, by name; connects nothing.

    Args:
        device: the model's.
    """
    purposes = {
        "torch": "gloo carries between CPUs" if device.type == "cpu" else "the device's own backend",
        "shm": "between the ranks of one node",
        "cuda_ipc": "between the GPUs of one node, by their copy engines",
        "nixl": f"over {', '.join(nixl_agent.rdma_devices()) or 'TCP'}",
        "nvshmem": "between GPUs, where it is asked for",
        "deepep": "between GPUs, where it is asked for",
    }
    whys = {name: why_not(name, device) for name in purposes}
    return tuple(Finding(name, not whys[name], whys[name] or purpose) for name, purpose in purposes.items())


def why_not_each(device: torch.device, backend: str) -> dict[str, str]:
    """Return why this rank would rather not use each transport; empty if it would.

    Args:
        device: the model's.
        backend: of the migration group.
    """
    # Where messages to other nodes are in host memory, those inside the node have to be, too.
    on_host = f"{backend} carries through host memory" if backend == "gloo" and device.type != "cpu" else ""
    across = "" if device.type == "cpu" and nixl_agent.rdma_devices() else "no RDMA between CPUs"
    return {
        "shm": why_not("shm", device),
        "cuda_ipc": why_not("cuda_ipc", device) or on_host,
        "nixl": across or why_not("nixl", device),
    }


def choose(nodes: Sequence[str], lacking: Sequence[Mapping[str, str]]) -> TransportChoice:
    """The transports that all ranks will use.

    Args:
        nodes: of each rank, names of the nodes.
        lacking: of each rank, what `why_not_each` said.
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


class Automatic(Wrapping):
    """Chooses when it warms up, with all ranks of the group; torch.distributed until then, and where the choice fails.

    Args:
        group, backend, device, timeout_seconds: as for every transport.

    Attributes:
        choice: None before `warm_up`.
    """

    def __init__(self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float) -> None:
        self._group = group
        self._arguments = (group, backend, device, timeout_seconds)
        super().__init__(TorchPointToPoint(*self._arguments))
        self._model_device = device
        self.choice: TransportChoice | None = None

    def warm_up(self, deadline: float) -> None:
        mine = json.dumps([node_of_this_rank(), why_not_each(self._model_device, self._arguments[1])]).encode()
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
            super().warm_up(deadline)
        if self._group.rank() == 0:
            chosen = self.choice
            logger.info("transport: %s within nodes, %s across (%s)", chosen.within, chosen.across, chosen.why)

    def _make(self, name: str, peers: Sequence[int]) -> Transport:
        if name == "shm":
            return SharedMemory(*self._arguments, peers=peers)
        if name == "cuda_ipc":
            return CudaIpc(*self._arguments, peers=peers)
        return Nixl(*self._arguments, peers=peers) if name == "nixl" else TorchPointToPoint(*self._arguments)

    def _try(self, nodes: Sequence[str], choice: TransportChoice, deadline: float) -> str:
        """Use these transports if they work on every rank; else why they do not."""
        own = nodes[self._group.rank()]
        near = [rank for rank, node in enumerate(nodes) if node == own]
        far = [rank for rank, node in enumerate(nodes) if node != own]
        transport, problem = None, ""
        try:
            transport = self._make(choice.within, near)
            if far:
                transport = Mixed(transport, self._make(choice.across, far), near)
            # Half of the time: if it fails there has to be some left.
            transport.warm_up((time.monotonic() + deadline) / 2)
        except (TransportError, OSError) as error:
            problem = one_line(error)
        failed = first_problem(problem, self._group, self.device, deadline)
        if transport is not None and failed is None:
            self._inner = transport
        elif transport is not None:
            transport.close()
        return "" if failed is None else failed.text


class Mixed(Transport):
    """Sends each message by the transport of its peer. Both work on the same device.

    Args:
        within, across: made on the same group.
        near: ranks that ``within`` reaches, this one among them.
    """

    def __init__(self, within: Transport, across: Transport, near: Collection[int]) -> None:
        self.device = within.device
        self.hashes = within.hashes and across.hashes
        self.one_by_one = within.one_by_one and across.one_by_one
        self.in_order = within.in_order or across.in_order
        self._within = within
        self._across = across
        self._near = frozenset(near)

    def wait_at_most(self, seconds: float) -> None:
        self._within.wait_at_most(seconds)
        self._across.wait_at_most(seconds)

    def register(self, regions: Sequence[Tensor]) -> None:
        self._within.register(regions)
        self._across.register(regions)

    def free_spare(self) -> None:
        self._within.free_spare()
        self._across.free_spare()

    def warm_up(self, deadline: float) -> None:
        self._within.warm_up(deadline)
        self._across.warm_up(deadline)

    def empty(self, nbytes: int) -> Tensor:
        return self._within.empty(nbytes)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        within = self._within.post(self._to(sends, True), self._to(receives, True))
        try:
            across = self._across.post(self._to(sends, False), self._to(receives, False))
        except BaseException:
            within.abort()
            raise
        seen, places = [0, 0], []
        for message in receives:
            part = int(message.peer not in self._near)
            places.append((part, seen[part]))
            seen[part] += 1
        return _Both(within, across, places)

    def close(self) -> None:
        self._within.close()
        self._across.close()

    def _to(self, messages: Sequence[Message], near: bool) -> list[Message]:
        return [message for message in messages if (message.peer in self._near) == near]


class _Both(PendingGroup):
    """Of both transports.

    Args:
        places: of each message received, which transport's it is and the how manyeth of those.
    """

    def __init__(self, within: Pending, across: Pending, places: Sequence[tuple[int, int]]) -> None:
        super().__init__(within, across)
        self._places = places

    def has(self, index: int) -> bool:
        part, place = self._places[index]
        return self._parts[part].has(place)
