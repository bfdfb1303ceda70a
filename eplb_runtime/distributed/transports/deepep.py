"""DeepEP (the package `deep_ep`): experts as rows of tokens, over NVLink inside a node and RDMA between nodes.

DeepEP's calls are collective, and messages are not. So it serves migrations between steps only: every rank of the group
posts once a round, and `post` carries. Ranks tell each other how many bytes go from whom to whom, and make the same
calls, each with the next rows of every pair. A rank is one of DeepEP's experts here; rows arrive by source rank.

A buffer cannot be taken down by one rank (its end waits for all ranks on their GPUs), so a process keeps it. Tokens and
experts go through the same one. Nothing of the package is imported unless asked for.
"""

import importlib
import inspect
import time
from collections.abc import Iterator, Sequence
from importlib import util
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...config import ConfigError
from ...utils.text import one_line
from ..consensus import failing_together
from .base import Message, Pending, SideStream, Transport, TransportError, wait_until
from .nixl import rdma_devices
from .nvshmem import claim
from .symmetric import node_of_this_rank

INSTALL = "build it from github.com/deepseek-ai/DeepEP for this torch and CUDA (dispatch/README.md)"
NUM_SMS, RANKS_OF_A_NODE = 20, 8
"""Multiprocessors for communication, DeepEP's own choice; ranks of each of several nodes in its kernels."""
SIZED_FOR_ROW_BYTES, ROW_BYTES = 16 << 10, 14336
"""So that one buffer serves rows of all widths; a multiple of 32 that one call takes, and DeepEP's tables are for."""
CHUNK_BYTES = 128 << 20
"""Bytes that a rank sends, and receives, in one call at most: as much to and from each rank."""
_GRACE_SECONDS = 5.0
"""Ranks that know that all have come may take so long to say so, whatever the deadline."""
_buffers: dict[tuple[int, tuple[int, ...], int], Any] = {}


def why_not(device: torch.device | None = None, *, low_latency: bool = False) -> str:
    """Return why this process cannot use DeepEP, or "". Imports nothing. ``low_latency``: those kernels also need
    InfiniBand, inside a node too; without it they trap, which ends the CUDA context."""
    if device is not None and device.type != "cuda":
        return f"it carries between GPUs, and this model is on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is for Hopper and newer"
    if low_latency and not rdma_devices():
        return "low_latency_tokens needs InfiniBand, and /sys/class/infiniband has no device: leave it out"
    return "" if util.find_spec("deep_ep") else f"the package deep_ep is not installed: {INSTALL}"


def why_not_between(num_ranks: int, ranks_per_node: int) -> str:
    """Return why DeepEP cannot work between so many ranks, or ""."""
    if num_ranks > RANKS_OF_A_NODE:
        if num_ranks % RANKS_OF_A_NODE == ranks_per_node % RANKS_OF_A_NODE == 0:
            return ""
        return f"across nodes it wants {RANKS_OF_A_NODE} ranks of each, not {ranks_per_node} of {num_ranks}"
    if num_ranks in (2, 4, 8) and ranks_per_node >= num_ranks:
        return ""
    return f"it carries between 2, 4 or 8 ranks that share a node, not {num_ranks} with {ranks_per_node} on each"


def imported(asked: str = "dispatch='deepep'") -> Any:
    """Import and return the package `deep_ep`. ConfigError: no import (the message names ``asked``), or no Buffer."""
    try:
        package = importlib.import_module("deep_ep")
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"{asked}: the package deep_ep cannot be imported ({one_line(error)}): {INSTALL}") from None
    if not hasattr(package, "Buffer"):
        raise ConfigError(f"this version of the package deep_ep has no Buffer: {INSTALL}")
    return package


def settings(package: Any, num_ranks: int) -> tuple[Any, Any]:
    """Return DeepEP's configs of dispatch and of combine between so many ranks. ConfigError: it has none that fits."""
    if num_ranks > RANKS_OF_A_NODE:
        between_nodes = getattr(package.Buffer, "internode_dispatch", package.Buffer.dispatch)
        if "num_worst_tokens" not in inspect.signature(between_nodes).parameters:
            raise ConfigError(f"this version of deep_ep takes no num_worst_tokens between nodes: {INSTALL}")
    try:
        return package.Buffer.get_dispatch_config(num_ranks), package.Buffer.get_combine_config(num_ranks)
    except AssertionError:
        raise ConfigError(f"dispatch='deepep' has no settings for {num_ranks} ranks") from None


def refuse_filled_memory() -> None:
    """Raise RuntimeError if torch is set to fill fresh memory: that would overwrite what DeepEP writes there."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise RuntimeError(
            "torch.use_deterministic_algorithms(True) lets torch overwrite what DeepEP receives: set "
            "torch.utils.deterministic.fill_uninitialized_memory = False"
        )


def new_buffer(package: Any, group: dist.ProcessGroup, there: Any, back: Any) -> Any:
    """Make a DeepEP buffer between the ranks of a group, and return it. Collective. For more than 8 ranks it claims
    NVSHMEM; ConfigError: another user has. ``there``, ``back``: of `settings`."""
    asked, rdma = (SIZED_FOR_ROW_BYTES, group.size()), 0
    if group.size() > RANKS_OF_A_NODE:
        if why := claim("DeepEP between nodes", group):
            raise ConfigError(
                f"DeepEP carries between nodes by NVSHMEM: {why}; no buffer for two batches at once, for other "
                "num_sms or another EP group"
            )
        rdma = max(config.get_rdma_buffer_size_hint(*asked) for config in (there, back))
    nvlink = max(config.get_nvl_buffer_size_hint(*asked) for config in (there, back))
    return package.Buffer(group, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)


def shared_buffer(package: Any, group: dist.ProcessGroup, num_sms: int, there: Any, back: Any) -> Any:
    """Return the one DeepEP buffer of this process for these ranks and ``num_sms``, used for tokens and experts. The
    first call makes it (collective), and it is kept to the end of the process."""
    key = id(package), tuple(dist.get_process_group_ranks(group)), num_sms
    if key not in _buffers:
        _buffers[key] = new_buffer(package, group, there, back)
    return _buffers[key]


class DeepEP(Transport):
    """Carries by `deep_ep.Buffer`. Every rank of the group posts equally often, also where it has no messages."""

    def __init__(
        self, group: dist.ProcessGroup, backend: str, device: torch.device, timeout_seconds: float, package: Any = None
    ) -> None:
        if package is None and device.type != "cuda":
            raise TransportError(f"transport 'deepep': {why_not(device)}")
        super().__init__(group, backend, device, timeout_seconds, package)
        self._most_rows = max(1, CHUNK_BYTES // ROW_BYTES // self._num_ranks)  # from one rank to another in a call
        self._stream = SideStream(device)
        self._problem = "it is not warmed up"

    def warm_up(self, deadline: float) -> None:
        package, nodes = self._package, self._gather(node_of_this_rank(), deadline)
        several, asked = self._num_ranks > 1, "transport 'deepep'"
        with failing_together(self._group, self._group_device, deadline):
            if package is None:
                of_node = min(map(nodes.count, nodes))
                if why := why_not(self.device) or (why_not_between(self._num_ranks, of_node) if several else ""):
                    raise TransportError(f"{asked}: {why}")
                package = imported(asked)
            if several:
                package.Buffer.set_num_sms(NUM_SMS)
                self._there, back = settings(package, self._num_ranks)
                refuse_filled_memory()
        if several:
            try:
                self._buffer = shared_buffer(package, self._group, NUM_SMS, self._there, back)
            except (RuntimeError, AssertionError, ConfigError) as error:
                raise TransportError(f"{asked}: {one_line(error)}") from error
        self._problem = ""
        self._try_out(deadline)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        """Send and receive all messages before returning; nothing is pending then. Collective. An error is final."""
        if self._problem:
            raise TransportError(f"DeepEP carries no experts any more: {self._problem}")
        out, into = self._to_others(sends, receives)
        if self._num_ranks > 1:
            self._stream.after_current()
            try:
                rows_RR = -(-self._agree(out, into, time.monotonic() + self._timeout) // ROW_BYTES)
                deadline = time.monotonic() + self._timeout
                for first in range(0, int(rows_RR.max()), self._most_rows):
                    with self._stream():
                        self._call(out, into, (rows_RR - first).clamp(0, self._most_rows), first, deadline)
            except Exception as error:  # CUDA, DeepEP, the group
                self._problem = one_line(error)
                raise TransportError(self._problem) from error
        return Pending()

    def close(self) -> None:
        """Refuse later posts. The buffer stays, since taking it down would wait for all ranks."""
        self._problem = self._problem or "it is closed"

    def _agree(self, sends: Sequence[Message], receives: Sequence[Message], deadline: float) -> Tensor:
        """Return bytes from each rank (first) to each rank, the same on all; afterwards every rank makes the calls."""
        sizes = [[0] * self._num_ranks for _ in range(2)]
        for of_peer, messages in zip(sizes, (sends, receives), strict=True):
            for message in messages:
                of_peer[message.peer] += message.data.numel()
        try:
            sent_RR, awaited_RR = torch.tensor(self._gather(sizes, deadline)).unbind(1)
            # A rank that gave up before does not come to this one, so no GPU waits for it.
            self._gather(None, max(deadline, time.monotonic()) + _GRACE_SECONDS)
        except TransportError as error:
            raise TransportError(f"not every rank has come to this round in time: {error}") from error
        for source, peer in (sent_RR != awaited_RR.T).nonzero().tolist():
            sent, awaited = int(sent_RR[source, peer]), int(awaited_RR[peer, source])
            raise TransportError(f"EP rank {source} sends {sent} bytes where EP rank {peer} waits for {awaited}")
        return sent_RR

    def _call(
        self, sends: Sequence[Message], receives: Sequence[Message], rows_RR: Tensor, first: int, deadline: float
    ) -> None:
        """Carry so many rows from each rank to each, from ``first`` on."""
        going_R, coming_R = rows_RR[self._rank].tolist(), rows_RR[:, self._rank].tolist()
        to_N1 = torch.repeat_interleave(rows_RR[self._rank])[:, None]
        if not len(to_N1):
            to_N1 = torch.full((1, 1), -1)  # where nothing goes, a row to no rank
        to_N1 = to_N1.to(self.device, non_blocking=True)
        rows_NC = torch.empty(len(to_N1), ROW_BYTES, dtype=torch.uint8, device=self.device)
        for own, place in _parts(sends, rows_NC, going_R, first):
            place.copy_(own, non_blocking=True)
        of_node = RANKS_OF_A_NODE
        here = self._rank // of_node * of_node  # what crosses to a node comes by the rank of the same place there
        passing = int(rows_RR[self._rank % of_node :: of_node, here : here + of_node].sum())
        to_ranks, to_nodes, to_experts, in_rank, _ = self._buffer.get_dispatch_layout(to_N1, self._num_ranks)
        arrived_MC, *_ = self._buffer.dispatch(
            rows_NC.view(torch.bfloat16),
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_experts,
            topk_idx=to_N1,
            topk_weights=torch.ones_like(to_N1, dtype=torch.float32),
            # Room for what arrives or passes. Without it the host would wait, inside a node with Python locked.
            num_worst_tokens=max(1, sum(coming_R), passing),
            config=self._there,
        )
        wait_until(self._stream.mark(), deadline, "an exchange by DeepEP")
        for own, place in _parts(receives, arrived_MC.view(torch.uint8), coming_R, first):
            own.copy_(place, non_blocking=True)
        wait_until(self._stream.mark(), deadline, "copying what DeepEP brought")


def _parts(
    messages: Sequence[Message], rows_MC: Tensor, rows_R: Sequence[int], first: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of messages and their places in rows, which are those of each rank, from ``first`` on, in order."""
    begin_R = [ROW_BYTES * rows for rows in accumulate(rows_R, initial=0)]
    next_R = [-ROW_BYTES * first] * len(rows_R)  # where the next message of a rank lies in its rows here
    for message in messages:
        at, size, begin = next_R[message.peer], message.data.numel(), begin_R[message.peer]
        low, high = max(0, at), min(ROW_BYTES * rows_R[message.peer], at + size)
        if low < high:
            yield message.data[low - at : high - at], rows_MC.view(-1)[begin + low : begin + high]
        next_R[message.peer] += size
