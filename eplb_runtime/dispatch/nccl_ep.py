"""NVIDIA's `nccl.ep` (package `nccl-extensions`, 0.1.0) as a carrier of rows, by its kernels for high throughput. What
rows mean stands elsewhere, and whether the package is there in `nccl_ep_package.py`.

Sizes are exact: a handle is made for a batch's slots, its counts come to the host, and what arrives has memory for as
many rows. (With a fixed maximum nobody would wait for counts, but each layer would keep as many rows as could ever
arrive for its backward.) A handle serves again for gradients and recompute; once nobody needs its way any more, the
next batch takes it.

Rows that have one slot each arrive by slot, then by source rank and position there; rows that may have several arrive
by source rank and position. Its sums are in float32; inside a node by rank.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import ConfigError
from ..migration.transports.base import TransportError
from ..migration.transports.meeting import tell_all
from . import nccl_ep_package
from .carrier import Arrival, agreed, grown, parts, whole
from .lanes import Lane, Lanes

logger = logging.getLogger("eplb_runtime")

_MOST_ROW_BYTES = 32 << 10
"""16,384 columns of bfloat16, its largest hidden size; wider rows go in several calls."""
_SPARE_BYTES = 512
"""A row that comes back may be so much wider than it went: gradients of router weights take twice their bytes."""
_MOST_LOCAL_EXPERTS = 256
"""That rows are put in order by."""
_FILL = 4
"""Its kernels copy the float32 weights of a rank's experts, and its maps of rows, 16 bytes at once."""


@dataclass(frozen=True, eq=False)
class Ticket:
    """The way that rows have gone.

    Args:
        experts_NK: int64, of each row the experts that it was for: another group can be told the same way.
        sizes: rows and bytes of a row that a group must be made for, equal on all ranks.
        arrived: rows that came here.
        handles: of each lane where it was used, the group and its handle.
    """

    experts_NK: Tensor
    sizes: tuple[int, ...]
    arrived: int
    handles: dict[Lane, tuple[_Group, Any]]


class NcclEPCarrier:
    """One EP group's way through `nccl.ep`. Every method is collective over the group.

    Args:
        group: the EP group, on GPUs; `nccl.ep` makes communicators of its own between the same ranks.
        slots_per_rank: S; physical slots are its experts.
        num_sms: multiprocessors that its kernels take.
        lanes: two batches that travel at once have communicators and buffers of their own.
        package: `nccl.ep`; None: imported.

    Raises:
        ConfigError: the package is not there, or does not know so many slots.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        slots_per_rank: int,
        num_sms: int,
        lanes: Lanes | None = None,
        package: Any = None,
    ) -> None:
        if slots_per_rank > _MOST_LOCAL_EXPERTS:
            raise ConfigError(
                f"dispatch='nccl_ep' knows up to {_MOST_LOCAL_EXPERTS} slots a rank, not {slots_per_rank}"
            )
        self._package = package if package is not None else nccl_ep_package.imported()
        self._lanes = lanes or Lanes(Lane(group, group))
        self._slots, self._experts = slots_per_rank, _filled(slots_per_rank)
        self._num_sms = num_sms
        self._ways: dict[tuple[Lane, bool], _Way] = {}

    def carry(self, rows_NC: Any, slots_NK: Tensor, most_rows: int = 0) -> Arrival:
        """As `Carrier.carry`; a row may not name a slot twice. Three host syncs: for the most rows of a rank, for the
        counts of those that arrive, and one of the package's own."""
        first, *more = parts(rows_NC, _MOST_ROW_BYTES)
        lane, device = self._lanes.here(), slots_NK.device
        way = self._way(lane, slots_NK)
        rows, row_bytes, *in_use = agreed([len(slots_NK), _widest(first), *way.in_use], device, lane)
        sizes = (max(1, rows), row_bytes)
        way.end_retired(sizes, in_use)
        # The package reads them one row behind another, whatever their strides.
        slots_NK = slots_NK.contiguous()
        experts_NK = slots_NK // self._slots * self._experts + slots_NK % self._slots
        group = way.group(sizes)
        counts = torch.zeros(self._experts + 1, dtype=torch.int32, device=device)
        handle = group.take(experts_NK, counts)
        *of_experts, arrived = counts.tolist()
        ticket = Ticket(experts_NK, sizes, arrived, {lane: (group, handle)})
        weakref.finalize(ticket, _give_back, ticket.handles, slots_NK.shape[1]).atexit = False
        rows_UC, slots_UK = group.send_first(handle, first, slots_NK.shape, counts[:-1], arrived)
        rows_UC = whole([rows_UC, *(group.send(handle, part, arrived) for part in more)])
        return Arrival(rows_UC, slots_UK, of_experts[: self._slots], ticket, by_slot=group.by_slot)

    def again(self, rows_NC: Any, ticket: Ticket) -> Any:
        """As `Carrier.again`; one host sync a call, the package's own."""
        group, handle = self._handle(ticket)
        return whole([group.send(handle, part, ticket.arrived) for part in parts(rows_NC, group.row_bytes)])

    def back(self, rows_UC: Tensor, ticket: Ticket) -> Tensor:
        """As `Carrier.back`; no sync."""
        group, handle = self._handle(ticket)
        rows = len(ticket.experts_NK)
        return whole([group.send_back(handle, part, rows) for part in parts(rows_UC, group.row_bytes)])

    def close(self, deadline: float) -> None:
        """As `Carrier.close`: groups and communicators, if all ranks come for it; else the process keeps them. Ways of
        before cannot be gone again."""
        ways, self._ways = self._ways, {}
        # In one order on all ranks, whichever a rank's threads came to first.
        in_order = sorted(ways.items(), key=lambda way: (not self._lanes.is_first(way[0][0]), way[0][1]))
        with contextlib.suppress(TransportError):
            for (lane, _), way in in_order:
                tell_all(lane.tokens, way.device, b"", deadline)
                try:
                    way.end()
                except Exception as error:  # the others wait for this rank in what comes next
                    logger.warning("dispatch='nccl_ep': the process keeps what could not be ended: %s", error)

    def _way(self, lane: Lane, experts_NK: Tensor) -> _Way:
        key = lane, experts_NK.shape[1] == 1
        if key not in self._ways:
            settings = {"num_experts": lane.tokens.size() * self._experts, "max_num_sms": self._num_sms}
            self._ways[key] = _Way(self._package, lane, experts_NK.device, key[1], settings)
        return self._ways[key]

    def _handle(self, ticket: Ticket) -> tuple[_Group, Any]:
        """Of the lane that this thread is in: a batch in another one is not disturbed."""
        lane = self._lanes.here()
        if lane not in ticket.handles:
            way = self._way(lane, ticket.experts_NK)
            if way.has_retired(ticket.sizes):  # where only gradients go this way, nobody else ends them
                way.end_retired(ticket.sizes, agreed(way.in_use, way.device, lane))
            group = way.group(ticket.sizes)
            ticket.handles[lane] = group, group.take(ticket.experts_NK)
        group, handle = ticket.handles[lane]
        if group.ended:
            raise RuntimeError(
                "the balancer was closed between this batch's forward and its backward, and dispatch='nccl_ep' has "
                "ended the way that its rows went: close after the backward pass"
            )
        return group, handle


class _Way:
    """What there is of `nccl.ep` in one lane: a communicator, and a group that is made anew when batches grow.

    Args:
        by_slot: rows have one slot each.
        settings: of its groups, whatever their sizes.
    """

    def __init__(self, package: Any, lane: Lane, device: torch.device, by_slot: bool, settings: dict[str, int]) -> None:
        self.device = device
        self._package, self._by_slot, self._settings = package, by_slot, settings
        self._communicator = package.interop.torch.get_nccl_comm_from_group(lane.tokens)
        self._groups: list[_Group] = []
        self._most = (0, 0)

    @property
    def in_use(self) -> tuple[int, int]:
        """1 if somebody needs handles of groups that became too small, else 0; and of the one that serves now."""
        *retired, now = [False, *(group.in_use for group in self._groups)]
        return int(any(retired)), int(now)

    def group(self, wanted: Sequence[int]) -> _Group:
        """One that is large enough; made anew, on all ranks alike, if there is none."""
        if self._too_small(wanted):
            rows, row_bytes = grown(self._most, wanted)
            sizes = _filled(rows), row_bytes
            self._groups.append(
                _Group(self._package, self._communicator, self.device, sizes, self._by_slot, self._settings)
            )
            self._most = sizes
        return self._groups[-1]

    def has_retired(self, wanted: Sequence[int]) -> bool:
        """Whether there are groups that are too small for what came since, or for what is ``wanted``; equal on all
        ranks."""
        return len(self._groups) > 1 or (bool(self._groups) and self._too_small(wanted))

    def end_retired(self, wanted: Sequence[int], in_use: Sequence[int]) -> None:
        """End groups that serve nobody any more, ahead of `group`, so that there is memory for both at once only where
        both are needed. On all ranks at once.

        Args:
            wanted: as of `group`.
            in_use: as `in_use` says, of the rank that says most.
        """
        retired_in_use, now_in_use = in_use
        if retired_in_use:
            return
        stay = len(self._groups) if self._too_small(wanted) and not now_in_use else len(self._groups) - 1
        for group in self._groups[:stay]:
            group.end()
        del self._groups[:stay]

    def _too_small(self, wanted: Sequence[int]) -> bool:
        have = self._groups[-1].sizes if self._groups else (0, 0)
        return any(want > had for want, had in zip(wanted, have, strict=True))

    def end(self) -> None:
        """On all ranks at once."""
        while self._groups:
            self._groups.pop().end()
        self._communicator.destroy()


class _Group:
    """A group of `nccl.ep` with its handles.

    Args:
        sizes: rows of a rank, and bytes of a row.
        by_slot: rows have one slot each and arrive by slot.
    """

    def __init__(
        self,
        package: Any,
        communicator: Any,
        device: torch.device,
        sizes: tuple[int, int],
        by_slot: bool,
        settings: dict[str, int],
    ) -> None:
        self.sizes, self.by_slot = sizes, by_slot
        rows, self.row_bytes = sizes
        self._package, self._device = package, device
        config = package.GroupConfig(
            algorithm=package.Algorithm.HIGH_THROUGHPUT,
            max_dispatch_tokens_per_rank=rows,
            max_recv_tokens_per_rank=0,  # what arrives has memory for as much
            max_token_bytes=self.row_bytes,
            num_topk=int(by_slot),  # asked for by slot; elsewhere it would only make buffers larger
            **settings,
        )
        self._group = package.Group.create(communicator, config)
        self._handles: list[Any] = []
        self._free: dict[int, list[Any]] = {}
        self.ended = False

    @property
    def in_use(self) -> bool:
        """Whether somebody needs one of its handles."""
        return len(self._handles) > sum(map(len, self._free.values()))

    def take(self, experts_NK: Tensor, counts: Tensor | None = None) -> Any:
        """A handle for these experts.

        Args:
            counts: int32, where the rows of each local expert are to stand, and behind them their sum; None: known.
        """
        info = None
        if counts is not None:
            of_experts, arrived = self._tensor(counts[:-1]), self._tensor(counts[-1:])
            info = self._package.LayoutInfo(expert_counters=of_experts, recv_total_counter=arrived)
        experts = self._tensor(experts_NK)
        try:
            handle = self._free.setdefault(experts_NK.shape[1], []).pop()
        except IndexError:
            layout = self._package.Layout.EXPERT_MAJOR if self.by_slot else self._package.Layout.FLAT
            handle = self._group.create_handle(layout, experts, layout_info=info, stream=self._stream())
            self._handles.append(handle)
            return handle
        handle.update(experts, layout_info=info, stream=self._stream())
        return handle

    def give_back(self, handle: Any, choices: int) -> None:
        """Nobody needs its way any more. What still goes it goes ahead of what is sent next."""
        self._free[choices].append(handle)

    def send_first(
        self, handle: Any, rows_NC: Any, shape: torch.Size, counts: Tensor, arrived: int
    ) -> tuple[Any, Tensor]:
        """Rows there: what arrives, and int64 ``[U, K]``, the local slots that each is for.

        Args:
            shape: N and K.
            counts: int32, rows of each local expert.
            arrived: U.
        """
        package, choices = self._package, shape[1]
        # Experts come in their own order, each with its weight; by weights that count choices they get back to theirs.
        which_NK = torch.arange(choices, dtype=torch.float32, device=counts.device).expand(shape).contiguous()
        if self.by_slot:
            weights_U = which_NK.new_empty(arrived)
            rows = self._send(handle, rows_NC, arrived, which_NK, topk_weights=self._tensor(weights_U))
            return rows, torch.repeat_interleave(counts, output_size=arrived).long().unsqueeze(1)
        which_UK = which_NK.new_empty(arrived, choices)
        experts_UK = torch.empty(arrived, choices, dtype=torch.int64, device=counts.device)
        there = {"topk_weights": self._tensor(which_UK), "topk_idx": self._tensor(experts_UK)}
        local = package.LayoutInfo(recv_topk_idx_kind=package.ExpertIdKind.LOCAL)
        rows = self._send(handle, rows_NC, arrived, which_NK, local, **there)
        # One place more than choices: what is elsewhere goes there.
        place_UK = torch.where(experts_UK >= 0, which_UK.long(), choices)
        slots_UK = experts_UK.new_full((arrived, choices + 1), -1).scatter_(1, place_UK, experts_UK)
        return rows, slots_UK[:, :choices].contiguous()

    def send(self, handle: Any, rows_NC: Any, arrived: int) -> Any:
        """Rows there, the way of an earlier `send_first`: as gradients go, without weights."""
        return self._send(handle, rows_NC, arrived, None)

    def send_back(self, handle: Any, rows_UC: Tensor, rows: int) -> Tensor:
        """``[N, C]``, N = ``rows``: what comes back for each row, added up."""
        package, sums_NC = self._package, rows_UC.new_empty(rows, rows_UC.shape[1])
        there, here = self._tensor(rows_UC), self._tensor(sums_NC)
        handle.combine(package.CombineInputs(tokens=there), package.CombineOutputs(tokens=here), stream=self._stream())
        return sums_NC

    def end(self) -> None:
        """Destroy it, on all ranks at once."""
        self.ended = True
        while self._handles:
            self._handles.pop().destroy()
        self._group.destroy()

    def _send(
        self, handle: Any, rows_NC: Any, arrived: int, weights_NK: Tensor | None, info: Any = None, **there: Any
    ) -> Any:
        package = self._package
        rows, scales = rows_NC if isinstance(rows_NC, tuple) else (rows_NC, None)
        into = torch.empty(arrived, rows.shape[1], dtype=rows.dtype, device=rows.device)
        into_scales = None if scales is None else scales.new_empty(arrived, scales.shape[1])
        recipes, directions = package.DispatchQuantizationRecipe, package.PassDir
        handle.dispatch(
            package.DispatchInputs(
                tokens=self._tensor(rows),
                topk_weights=self._tensor(weights_NK),
                scales=self._tensor(scales),
            ),
            package.DispatchOutputs(tokens=self._tensor(into), scales=self._tensor(into_scales), **there),
            layout_info=info,
            config=package.DispatchConfig(
                pass_direction=directions.BWD if weights_NK is None else directions.FWD,
                quantization_recipe=recipes.NONE if scales is None else recipes.FWD,
            ),
            stream=self._stream(),
        )
        return into if scales is None else (into, into_scales)

    def _tensor(self, values: Tensor | None) -> Any:
        return None if values is None else self._package.Tensor(values)

    def _stream(self) -> int:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0


def _give_back(handles: dict[Lane, tuple[_Group, Any]], choices: int) -> None:
    for group, handle in handles.values():
        group.give_back(handle, choices)


def _filled(number: int) -> int:
    return -(-number // _FILL) * _FILL


def _widest(rows: Any) -> int:
    """Bytes of a row, there or back: float8 comes back in bfloat16."""
    if not isinstance(rows, tuple):
        return int(rows.shape[1] * rows.element_size()) + _SPARE_BYTES
    own, scales = (one.shape[1] * one.element_size() for one in rows)
    return max(own + scales, 2 * own) + _SPARE_BYTES
