"""Memory that the ranks of a node open to each other, by torch's symmetric memory, and signals between them.

Rows of replicas lie in it, and windows of messages, which copy engines write. All ranks make the same blocks in order.
"""

import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import launcher_environment
from ...utils.text import one_line
from ..consensus import failing_together, gather_json
from .base import TransportError
from .windows import HasLeft, Windows

_CPU = torch.device("cpu")
_OF_TORCH = "torch.distributed._symmetric_memory"
BACKEND = "CUDA"
"""torch's back end whose memory is written by plain copies and whose signals wait on a stream."""
LEAST_CHANNELS, _BYTES_OF_A_SIGNAL = 4, 4
"""Two signals each way, for weights and for gradients."""
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch compares the GPUs of ranks by their numbers, and refuses equal ones, unless the environment has this."""


def node_of_this_rank() -> str:
    """Return a name that is equal on ranks of one node: host name, boot id and the launcher's number of the node."""
    environment = launcher_environment()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    machine = kernel.read_text().strip() if kernel.exists() else ""
    node = environment.get("GROUP_RANK", environment.get("SLURM_NODEID", ""))
    return f"{os.uname().nodename}/{machine}/{node}"


def why_not(device: torch.device) -> str:
    """Return why this process cannot share GPU memory within its node; "": no reason is seen before ranks meet."""
    if device.type != "cuda":
        return f"it copies between GPUs, not on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    backend = import_module(_OF_TORCH).get_backend(device)
    if backend != BACKEND:
        return f"torch's symmetric memory must be of the back end {BACKEND!r} here, and is of {backend!r}"
    return ""


class NodeMemory:
    """Memory of this rank and of the others of its node.

    Args:
        group: the ranks of the node; used to meet, by its store. It is torch's to find by its name from here on.
        device: of all memory; ``group_device`` is that of the group's backend.
        timeout_seconds: a signal that is waited for longer stops the GPU's work with an error that names it. 0: never.
        package: in the place of torch's.

    Attributes:
        rank: this one's place in the group; peers are places in it.
        channels: so many signals can be under way at once from one rank to another.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        timeout_seconds: float,
        package: Any = None,
        group_device: torch.device = _CPU,
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._group_device, self._device = group, group_device, device
        self._timeout_ms = int(timeout_seconds * 1000)
        self._why_not = why_not(device) if package is None else ""
        self._package = package or import_module(_OF_TORCH)
        self._blocks: list[Tensor] = []
        self._handles: list[Any] = []

    def meet(self, deadline: float) -> None:
        """Set ``channels``. RuntimeError, on all ranks: nodes or signal pads differ, or a rank cannot. Collective."""
        self.channels = int(self._package.get_signal_pad_size()) // (_BYTES_OF_A_SIGNAL * self.size)
        mine = [node_of_this_rank(), self.channels, self._why_not]
        for rank, (node, channels, why) in enumerate(gather_json(mine, self._group, self._group_device, deadline)):
            if why:
                raise RuntimeError(f"rank {rank} of the group: {why}")
            if node != mine[0]:
                raise RuntimeError("ranks that the launcher counts to one node see different ones")
            if channels != self.channels:
                raise RuntimeError("ranks have signal pads of different sizes (set_signal_pad_size)")

    def connect(self, deadline: float) -> None:
        """Do `meet`, open a first block, and try writes and signals between all ranks. RuntimeError: they fail."""
        self.meet(deadline)
        if self.channels < LEAST_CHANNELS:
            raise RuntimeError(
                f"torch's signal pad has room for {self.channels} signals between {self.size} ranks, and "
                f"{LEAST_CHANNELS} are needed: torch.distributed._symmetric_memory.set_signal_pad_size makes it larger"
            )
        with failing_together(self._group, self._group_device, deadline):
            trial = self.zeros((self.size,), torch.int32, self._device)
        self.open()
        others = [peer for peer in range(self.size) if peer != self.rank]
        for peer in others:
            self.of_peer(peer, trial)[self.rank : self.rank + 1].fill_(self.rank + 1)
            self.put(peer, 0)
        for peer in others:
            self.wait(peer, 0)
        if trial.tolist() != [peer + 1 if peer != self.rank else 0 for peer in range(self.size)]:
            raise RuntimeError("a test value that ranks wrote into each other's memory did not arrive")

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new block of zeros, kept by this object, which peers reach after `open`. Equal on every rank."""
        if device.type != self._device.type:
            raise RuntimeError(f"rows of copies on {device}, and the node's memory is on {self._device}")
        self._blocks.append(self._package.empty(tuple(shape), dtype=dtype, device=device).zero_())
        return self._blocks[-1]

    def open(self) -> None:
        """Open all new blocks to all ranks. RuntimeError: the ranks' blocks differ. Collective; the host waits."""
        new = self._blocks[len(self._handles) :]
        blocks = [[list(block.shape), str(block.dtype)] for block in new]
        deadline = time.monotonic() + max(1.0, self._timeout_ms / 1000)
        with failing_together(self._group, self._group_device, deadline):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # zeros, before anybody else writes there
        if any(said != blocks for said in gather_json(blocks, self._group, self._group_device, deadline)):
            raise RuntimeError("ranks of one node have different rows of experts, so they cannot open each other's")
        for block in new:
            try:
                self._handles.append(self._package.rendezvous(block, self._group))
            except RuntimeError as error:  # on all ranks: torch compares all of them
                hint = f" (ranks that see one GPU each: set {SHARING}=1 on all)" if "overlapping" in str(error) else ""
                raise RuntimeError(f"{one_line(error)}{hint}") from error

    def of_peer(self, peer: int, own: Tensor) -> Tensor:
        """Return a peer's memory, with ``own``'s shape and dtype, at the place in the block that ``own`` has here."""
        for block, handle in zip(self._blocks, self._handles, strict=False):
            offset = own.data_ptr() - block.data_ptr()
            if 0 <= offset <= block.nbytes - own.nbytes:
                there: Tensor = handle.get_remote_tensor(peer, (block.nbytes,), torch.uint8)
                return there[offset : offset + own.nbytes].view(own.dtype).view(own.shape)
        raise RuntimeError("these rows are outside the memory that the node's ranks share")

    def put(self, peer: int, channel: int) -> None:
        """Queue a signal on the current stream, which waits there until the peer has taken the channel's last one."""
        self._handles[0].put_signal(peer, channel, self._timeout_ms)

    def wait(self, peer: int, channel: int) -> None:
        """Let the current stream wait for a peer's signal on this channel, and take the signal."""
        self._handles[0].wait_signal(peer, channel, self._timeout_ms)


class CudaIpc(Windows):
    """Writes into the windows of other ranks of the node."""

    staged = False

    def _open(self, nbytes: int, deadline: float) -> Tensor:
        seconds = max(1.0, deadline - time.monotonic())
        self._memory = NodeMemory(self._group, self.device, seconds, self._package, self._group_device)
        try:
            self._memory.meet(deadline)
            with failing_together(self._group, self._group_device, deadline):
                window = self._memory.zeros((nbytes,), torch.uint8, self.device)
            self._memory.open()
        except RuntimeError as error:
            raise TransportError(f"memory of this node's GPUs cannot be opened: {error}") from error
        return window

    def _put(self, place: Tensor, source: Tensor, peer: int, after: HasLeft | None = None) -> HasLeft:
        self._memory.of_peer(peer, place).copy_(source, non_blocking=True)
        return self._stream.mark()
