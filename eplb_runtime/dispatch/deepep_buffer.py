"""DeepEP's first interface, `deep_ep.Buffer`, as a carrier of rows: NVLink inside a node, RDMA between nodes.

Here stands what DeepEP asks of whoever calls it (sizes of its buffers, widths, dtypes, numbers of ranks) and nothing of
what the rows mean. Loaded when it is asked for: this package does not need it.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ConfigError
from .lanes import Lane, Lanes

INSTALL = "build it from github.com/deepseek-ai/DeepEP for this torch and CUDA (dispatch/README.md)"
RANKS_OF_A_NODE = 8
"""Ranks of one node in DeepEP's kernels where there are several nodes."""
_MOST_ROW_BYTES = 15 << 10
"""A row is staged in a warp's 16 KiB of shared memory, with its ids and weights; wider ones go in several calls."""
_SIZED_FOR_ROW_BYTES = 16 << 10
"""So that one buffer serves layers of all widths."""
_MOST_LOCAL_EXPERTS = 1024


@dataclass(frozen=True, eq=False)
class Arrival:
    """Rows that have come here: ordered by source rank, then by their position there.

    Args:
        rows_UC: bfloat16 ``[U, C]``.
        slots_UK: int64, of each row the local slots that it is for, -1 where a choice is elsewhere.
        counts: choices for each local slot.
        ticket: for `BufferCarrier.again` and `back`.
    """

    rows_UC: Tensor
    slots_UK: Tensor
    counts: list[int]
    ticket: Any


def missing(device: torch.device | None = None) -> str:
    """Why this process cannot use DeepEP, in a line; empty: it can. Imports nothing.

    Args:
        device: the model's; None: the one that torch sees.
    """
    if device is not None and device.type != "cuda":
        return f"it carries between GPUs, and this model is on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is for Hopper and newer"
    if util.find_spec("deep_ep") is None:
        return f"the package deep_ep is not installed: {INSTALL}"
    return ""


def unfit(num_ranks: int, ranks_per_node: int) -> str:
    """Why DeepEP cannot carry between so many ranks, in a line; empty: it can.

    Args:
        num_ranks: R of the EP group.
        ranks_per_node: of them that share a node.
    """
    if num_ranks <= RANKS_OF_A_NODE:
        if num_ranks not in (2, 4, 8):
            return f"it carries between 2, 4 or 8 ranks of a node, not {num_ranks}"
        if ranks_per_node < num_ranks:
            return (
                f"up to {RANKS_OF_A_NODE} ranks must share a node, and these {num_ranks} have {ranks_per_node} on each"
            )
    elif num_ranks % RANKS_OF_A_NODE or ranks_per_node % RANKS_OF_A_NODE:
        return f"across nodes it wants {RANKS_OF_A_NODE} ranks of each, not {ranks_per_node} of {num_ranks}"
    return ""


class BufferCarrier:
    """One EP group's way through DeepEP. Every method is collective over the group.

    Args:
        group: the EP group, on GPUs; DeepEP hands addresses around in it (as pickles) when buffers are made.
        slots_per_rank: S; physical slots are DeepEP's experts.
        num_sms: multiprocessors that its kernels take; even.
        lanes: two batches that travel at once have buffers of their own.
        package: `deep_ep`; None: imported.

    Raises:
        ConfigError: DeepEP is not there, or does not know so many ranks or slots.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        num_sms: int,
        lanes: Lanes | None = None,
        package: Any = None,
    ) -> None:
        self._package = package if package is not None else imported()
        self._lanes = lanes or Lanes(Lane(group, group))
        self._num_ranks = group.size()
        self._num_experts = group.size() * slots_per_rank
        if slots_per_rank > _MOST_LOCAL_EXPERTS:
            raise ConfigError(f"dispatch='deepep' knows up to {_MOST_LOCAL_EXPERTS} slots a rank, not {slots_per_rank}")
        self._package.Buffer.set_num_sms(num_sms)
        # They hold the number of multiprocessors: made after it was set.
        self._there, self._back = settings(self._package, self._num_ranks)
        self._buffers: dict[Lane, Any] = {}

    def carry(self, rows_NC: Tensor, slots_NK: Tensor) -> Arrival:
        """Send each row once to every rank where it has a slot. One host sync, DeepEP's own.

        Args:
            rows_NC: bfloat16; any bytes, they are copied.
            slots_NK: int64, physical slots.
        """
        buffer = self._buffer(rows_NC.device)
        slots_NK = slots_NK.contiguous()
        to_ranks, to_nodes, to_experts, in_rank, _ = buffer.get_dispatch_layout(slots_NK, self._num_experts)
        first, *more = parts(rows_NC)
        # Weights go behind the rows' other bytes: those that are given here would not go when a handle is used again.
        unused = torch.zeros(slots_NK.shape, dtype=torch.float32, device=rows_NC.device)
        rows, slots_UK, _, counts, handle, _ = buffer.dispatch(
            first,
            num_tokens_per_rank=to_ranks,
            num_tokens_per_rdma_rank=to_nodes,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=to_experts,
            topk_idx=slots_NK,
            topk_weights=unused,
            config=self._there,
        )
        rows = whole([rows, *(self._again(buffer, part, handle) for part in more)])
        return Arrival(rows, slots_UK, counts, handle)

    def again(self, rows_NC: Tensor, ticket: Any) -> Tensor:
        """Other rows, the way of an earlier `carry`; no sync."""
        buffer = self._buffer(rows_NC.device)
        return whole([self._again(buffer, part, ticket) for part in parts(rows_NC)])

    def back(self, rows_UC: Tensor, ticket: Any) -> Tensor:
        """``[N, C]``: rows go back the way that they came, and those of one row are added up in float32."""
        buffer = self._buffer(rows_UC.device)
        return whole([buffer.combine(part, ticket, config=self._back)[0] for part in parts(rows_UC)])

    def _again(self, buffer: Any, part: Tensor, handle: Any) -> Tensor:
        rows: Tensor = buffer.dispatch(part, handle=handle, config=self._there)[0]
        return rows

    def _buffer(self, device: torch.device) -> Any:
        refuse_filled_memory()
        lane = self._lanes.here()
        if lane not in self._buffers:
            sizes = [
                (
                    config.get_nvl_buffer_size_hint(_SIZED_FOR_ROW_BYTES, self._num_ranks),
                    config.get_rdma_buffer_size_hint(_SIZED_FOR_ROW_BYTES, self._num_ranks)
                    if self._num_ranks > RANKS_OF_A_NODE
                    else 0,
                )
                for config in (self._there, self._back)
            ]
            nvlink, rdma = (max(column) for column in zip(*sizes, strict=True))
            self._buffers[lane] = self._package.Buffer(lane.tokens, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)
        return self._buffers[lane]


def imported(interface: str = "Buffer") -> Any:
    """The package `deep_ep`.

    Raises:
        ConfigError: it cannot be imported, or does not have this interface.
    """
    try:
        package = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        raise ConfigError(f"dispatch='deepep' needs the package deep_ep (no module {error.name}): {INSTALL}") from None
    except (ImportError, OSError, AssertionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"dispatch='deepep': the package deep_ep cannot be imported ({reason}): {INSTALL}") from None
    if not hasattr(package, interface):
        raise ConfigError(f"this version of the package deep_ep has no {interface}: {INSTALL}")
    return package


def settings(package: Any, num_ranks: int) -> tuple[Any, Any]:
    """DeepEP's own for so many ranks: there, and back.

    Raises:
        ConfigError: it has none.
    """
    try:
        return package.Buffer.get_dispatch_config(num_ranks), package.Buffer.get_combine_config(num_ranks)
    except AssertionError:
        raise ConfigError(f"dispatch='deepep' has no settings for {num_ranks} ranks") from None


def refuse_filled_memory() -> None:
    """DeepEP's kernels write on a stream of their own, and torch would fill the same memory on the first one."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise RuntimeError(
            "dispatch='deepep' and torch.use_deterministic_algorithms(True): set "
            "torch.utils.deterministic.fill_uninitialized_memory = False, or fresh memory is filled over what arrives"
        )


def parts(rows_NC: Tensor) -> list[Tensor]:
    """In columns that one call takes."""
    most = _MOST_ROW_BYTES // rows_NC.element_size()
    if rows_NC.shape[1] <= most:
        return [rows_NC.contiguous()]
    return [part.contiguous() for part in rows_NC.split(most, dim=1)]


def whole(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
