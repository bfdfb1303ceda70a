"""Selection of Triton kernels for this rank's GPU.

A trial batch runs through a layer's counting, routing and moving of rows: by plain torch, then once with each kernel. A
kernel that fails to compile or changes a bit is reported in one line of the log; torch stays in its place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import starmap
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..placement import Placement
from ..utils.checksums import HASH_BLOCK_BYTES, block_hashes
from ..utils.errors import one_line
from .dispatch import permute
from .dispatch.memory import RowMemory
from .dispatch.permute import Moves
from .experts import aligned
from .experts.compute import SlotCounts
from .routing.splitter import BatchSplitter, Counted, OnDevice, SplitSettings, count_choices, deal_out

logger = logging.getLogger("eplb_runtime")

_TOKENS, _TOP_K, _WIDTH = 80, 8, 1100
"""Size of the trial batch: several blocks of choices, and more columns than one program moves."""
_LONG = 4200
"""Tokens of the trial for one busy slot: more rows of it than all programs of a slot take in one pass."""
_SUMS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.float64, torch.float32),
    (torch.float64, torch.float64),
)
"""dtypes of rows and of the router's weights whose sums are tried beside the rows that are sent."""


@dataclass(frozen=True)
class Kernels:
    """Functions that a kernel or plain torch computes.

    Args:
        count: as `moe.routing.splitter.count_choices`.
        deal: as `moe.routing.splitter.deal_out`.
        hash_blocks: as `utils.checksums.block_hashes`.
        moves: order of rows, and sums of a token's choices.
        count_and_map: as `moe.routing.kernels.count_and_map`; None: the counter, then the table.
        regroup: as `moe.experts.aligned.regroup`.
        split: splits by counts on the device; None: the host splits.
    """

    count: Callable[[Tensor, int], Counted] = count_choices
    deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = deal_out
    hash_blocks: Callable[[Tensor], Tensor] = block_hashes
    moves: Moves = permute.PLAIN
    count_and_map: Callable[..., Tensor] | None = None
    regroup: aligned.Regroup = aligned.regroup
    split: OnDevice | None = None


def kernels_for(device: torch.device, num_experts: int, num_ranks: int, slots_per_rank: int) -> Kernels:
    """Select the kernels that pass a trial on this device; plain torch where there is no GPU or no Triton.

    Args:
        num_experts: E, logical experts of a layer.
        num_ranks, slots_per_rank: R and S, of an EP group.
    """
    if device.type != "cuda":
        logger.warning("kernels=True has no effect on %s: they are for GPUs, and plain torch is used", device.type)
        return Kernels()
    from ..utils.triton import triton

    if triton is None:
        logger.warning("kernels=True: there is no Triton here, so plain torch is used: pip install triton")
        return Kernels()
    return tried(device, num_experts, num_ranks, slots_per_rank)


@dataclass(frozen=True)
class Candidate:
    """A kernel to try.

    Args:
        name: of what it computes, for the log.
        fields: what it replaces in `Kernels`.
        moves: what it replaces in `Moves`.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    moves: dict[str, Any] = field(default_factory=dict)

    def added_to(self, kernels: Kernels) -> Kernels:
        """Return the kernels with this one among them."""
        return replace(kernels, moves=replace(kernels.moves, **self.moves), **self.fields)


def tried(device: torch.device, num_experts: int, num_ranks: int, slots_per_rank: int) -> Kernels:
    """Try all kernels on a device; Args as of `kernels_for`."""
    from ..utils.checksums_triton import launch
    from .dispatch import kernels as moves
    from .experts import aligned_kernel
    from .routing import kernels as routing
    from .routing import sources_kernel

    candidates = [
        Candidate("counting and looking up", {"count_and_map": routing.count_and_map}),
        Candidate("hashes of blocks", {"hash_blocks": launch}),
        Candidate("the order of choices by slot", moves={"leaving": moves.leaving}),
        Candidate("the order of rows that arrive", moves={"arriving": moves.arriving}),
        Candidate("rows that stay and that leave", moves={"part": moves.part}),
        Candidate("rows filled up by slot", {"regroup": aligned_kernel.launch}),
        Candidate("sums of a token's choices", moves={"sum_choices": moves.sum_choices}),
        Candidate("sums of the choices that are here", moves={"sum_here": moves.sum_here}),
    ]
    if slots_per_rank * num_ranks > num_experts:
        by_device = OnDevice(sources_kernel.layers_on_device, sources_kernel.sent_by_rank)
        dealing = {"count": routing.count_by_blocks, "deal": routing.deal_by_kernels}
        candidates.append(Candidate("dealing choices out to copies", dealing))
        candidates.append(Candidate("the split over copies", {"split": by_device}))
    return select(candidates, TrialBatch.of(device, num_experts, num_ranks, slots_per_rank))


def select(candidates: Iterable[Candidate], batch: TrialBatch) -> Kernels:
    """Return plain torch, with each candidate that keeps every bit of the batch in its place."""
    selected, expected = Kernels(), batch.run(Kernels())
    for candidate in candidates:
        try:
            found = batch.run(candidate.added_to(Kernels()))
            if not all(starmap(_equal, zip(found, expected, strict=True))):
                raise ValueError("it gives something else")
        except Exception as error:
            logger.warning("kernel for %s: %s; plain torch is used", candidate.name, one_line(error))
        else:
            selected = candidate.added_to(selected)
    return selected


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """A batch of the last rank, with as many replicas as there may be. The other ranks send to this one what it sends
    to them, so rows arrive in the order in which they leave.

    Args:
        ids_TK: int64, choices, the first experts more often; on the device.
        real_T: bool, False for padding; on the device.
        counts_RE: int64, choices of each rank; this rank's row is not used.
        placement: one layer.
    """

    ids_TK: Tensor
    real_T: Tensor
    counts_RE: Tensor
    placement: Placement

    @classmethod
    def of(cls, device: torch.device, num_experts: int, num_ranks: int, slots_per_rank: int) -> TrialBatch:
        """Make the batch for a device; Args as of `kernels_for`."""
        homes, generator = num_experts // num_ranks, np.random.default_rng(0)
        start = Placement.initial(1, num_experts, num_ranks, slots_per_rank - homes)
        slots_RS = start.physical_to_logical.reshape(num_ranks, slots_per_rank).copy()
        for rank in range(num_ranks):
            # Few experts, so that some have several replicas.
            others = np.setdiff1d(np.arange(min(num_experts, 4 * slots_per_rank)), slots_RS[rank, :homes])
            replicas = generator.permutation(others)[: slots_per_rank - homes]
            slots_RS[rank, homes : homes + len(replicas)] = replicas
        ids_TK = (generator.random((_TOKENS, _TOP_K)) ** 2 * num_experts).astype(np.int64)
        counts_RE = (generator.exponential(size=(num_ranks, num_experts)) ** 2 * 100).astype(np.int64)
        real_T = generator.random(_TOKENS) > 0.2
        return cls(
            torch.from_numpy(ids_TK).to(device),
            torch.from_numpy(real_T).to(device),
            torch.from_numpy(counts_RE).to(device),
            Placement(slots_RS.reshape(1, -1), num_experts, num_ranks, start.home),
        )

    def run(self, kernels: Kernels) -> list[Tensor]:
        """Run the batch end to end; returns every result on the way."""
        slots_TK, results = self._slots(kernels)
        results += self._rows(kernels, slots_TK, torch.bfloat16, _WIDTH, dedup=True)
        results += self._rows(kernels, slots_TK, torch.float32, _WIDTH, dedup=False)
        results += self._rows(kernels, self._busy_slot(), torch.float32, 1, dedup=True)
        results += _sums(kernels, slots_TK)
        return results

    def _busy_slot(self) -> Tensor:
        """int64 ``[T, 1]``: nearly all tokens of the trial for one busy slot go to the second slot here."""
        begin = (self.placement.num_ranks - 1) * self.placement.slots_per_rank
        slot_T = torch.full((_LONG, 1), begin + min(1, self.placement.slots_per_rank - 1), device=self.ids_TK.device)
        slot_T[::100] = begin
        slot_T[1::1000] = 0
        return slot_T

    def _slots(self, kernels: Kernels) -> tuple[Tensor, list[Tensor]]:
        """Count, and find the slot of each choice."""
        from .routing.kernels import torch_count_and_map

        placement, device = self.placement, self.ids_TK.device
        assert placement.home is not None
        home_E = torch.from_numpy(placement.home[0].astype(np.int64)).to(device)
        look_up = kernels.count_and_map or torch_count_and_map
        padded_E, counted_E = torch.ones(2, placement.num_experts, dtype=torch.int64, device=device)
        slots_TK = look_up(self.ids_TK, home_E, counted_E, None)
        padded_TK = look_up(self.ids_TK, home_E, padded_E, self.real_T)
        results = [slots_TK, padded_TK, counted_E, padded_E]
        if placement.num_slots == placement.num_experts:
            return slots_TK, results
        crowded = _with_one_crowded_expert(placement)
        for locality, counted, current in ((False, False, placement), (True, True, crowded), (True, True, placement)):
            slots_TK, counts_E = self._split(kernels, current, locality, counted)
            results += [counts_E, slots_TK]
        return slots_TK, results

    def _split(self, kernels: Kernels, current: Placement, locality: bool, counted: bool) -> tuple[Tensor, Tensor]:
        """Split the batch over replicas of a placement; ``counted``: who deals is told what the counting found."""
        splitter = BatchSplitter(
            current,
            self.ids_TK.device,
            current.num_ranks - 1,
            SplitSettings(2 if current.num_ranks % 2 == 0 else 1, locality=locality),
            count=kernels.count,
            deal=kernels.deal,
            on_device=kernels.split,
        )
        counts_E, begins = splitter.counts(self.ids_TK)
        begins = begins if counted else None
        counts_RE = torch.cat([self.counts_RE[:-1], counts_E.unsqueeze(0)])
        if splitter.wants_counts:
            return splitter.route(0, self.ids_TK, counts_RE.cpu().numpy(), begins)[0], counts_E
        return splitter.route_on_device(0, self.ids_TK, counts_RE, begins), counts_E

    def _rows(self, kernels: Kernels, slots_TK: Tensor, dtype: torch.dtype, width: int, *, dedup: bool) -> list[Tensor]:
        """Send rows out, fill each slot's up to a multiple of 16, send them back and sum each token's."""
        moves, device = kernels.moves, slots_TK.device
        ranks, slots = self.placement.num_ranks, self.placement.slots_per_rank
        generator = torch.Generator().manual_seed(0)
        hidden_TD = torch.randn(slots_TK.shape[0], width, generator=generator).to(device, dtype)
        weights_TK = torch.rand(slots_TK[:_TOKENS].shape, generator=generator).to(device)

        leaving = moves.leaving(slots_TK, ranks - 1, ranks, slots, dedup=dedup, tag=5)
        counts_RW = leaving.counts_2RW[0].cpu().numpy()
        sent_R = counts_RW[:, slots] if dedup else counts_RW[:, :slots].sum(axis=1)
        token_N = leaving.token_N[: sent_R.sum()]
        arriving = moves.arriving(counts_RW, ranks - 1, slots, device, leaving.source_row_N1, leaving.counts_2RW[0])
        order = [leaving.counts_2RW[0], leaving.choice_N, leaving.place_TK, token_N, *arriving]

        rows_ND = hidden_TD.new_empty(token_N.shape[0], width)
        staying, leaving_rows = rows_ND[: sent_R[-1]], rows_ND[sent_R[-1] :]
        (moves.part or _gather_twice)(hidden_TD, token_N, staying, leaving_rows)
        rows_MD = rows_ND.index_select(0, arriving.row_M)
        packed_S = SlotCounts.of(counts_RW[:, :slots].sum(axis=0).tolist(), device)
        aligned_S, places = aligned.aligned(packed_S, 16, rows_MD.shape[0])
        packed, filled = packed_S.offsets_S, aligned_S.offsets_S
        filled_PD = kernels.regroup(rows_MD, packed, filled, packed, places)
        out_MD = kernels.regroup(filled_PD, filled, packed, packed, rows_MD.shape[0])
        out_ND = out_MD.index_select(0, arriving.slot_place_M)
        place_TK = leaving.place_TK[:_TOKENS]
        sums = [moves.sum_choices(out_ND, place_TK, RowMemory(), weights) for weights in (None, weights_TK)]
        data = rows_MD.reshape(-1).view(torch.uint8)
        whole = data.shape[0] // HASH_BLOCK_BYTES * HASH_BLOCK_BYTES
        at_odd_address = torch.cat([data[:1], data[:whole]])[1:]
        hashes = [kernels.hash_blocks(hashed) for hashed in (data[:whole], at_odd_address, data[:0])]
        return [*order, rows_ND, filled_PD, out_MD, *sums, *hashes]


def _with_one_crowded_expert(placement: Placement) -> Placement:
    """The same homes, and the first expert in every replica slot of a rank that is not its own."""
    assert placement.home is not None
    homes = placement.num_experts // placement.num_ranks
    slots_RS = placement.physical_to_logical.reshape(placement.num_ranks, placement.slots_per_rank).copy()
    for rank in range(placement.num_ranks):
        if 0 not in slots_RS[rank]:
            slots_RS[rank, homes] = 0
    return Placement(slots_RS.reshape(1, -1), placement.num_experts, placement.num_ranks, placement.home)


def _sums(kernels: Kernels, slots_TK: Tensor) -> list[Tensor]:
    """Sum rows of all dtypes over each token's choices."""
    generator, results = torch.Generator().manual_seed(0), []
    rows_NW = torch.randn(slots_TK.numel(), 3, generator=generator)
    weights_TK = torch.rand(slots_TK.shape, generator=generator)
    place_TK = torch.randperm(slots_TK.numel(), generator=generator).view(slots_TK.shape).to(slots_TK.device)
    here_TK = torch.where(place_TK % 3 == 0, -1, place_TK)  # in places no row of a token's
    for rows, weights in _SUMS:
        of_rows, of_weights = rows_NW.to(slots_TK.device, rows), weights_TK.to(slots_TK.device, weights)
        results.append(kernels.moves.sum_choices(of_rows, place_TK, RowMemory(), of_weights))
        results.append(kernels.moves.sum_choices(of_rows, place_TK, RowMemory(), None))
        for weights_N, dtype in ((of_weights.reshape(-1), torch.bfloat16), (None, torch.float32)):
            results.append(kernels.moves.sum_here(of_rows, here_TK, weights_N, dtype))
    return results


def _gather_twice(source: Tensor, index_U: Tensor, staying: Tensor, leaving: Tensor) -> None:
    """Do in plain torch as `Moves.part`."""
    permute.gather(source, index_U[: staying.shape[0]], staying)
    permute.gather(source, index_U[staying.shape[0] :], leaving)
