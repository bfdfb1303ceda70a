"""Our Triton kernels in the place of plain torch on this rank's GPU, each once it has given the same there.

A kernel that fails to compile, or gives other bits than its reference, is one line in the log, and torch stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

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
from .routing import sources
from .routing.splitter import Counted, OnDevice, count_choices, deal_out
from .routing.tables import SplitTables

logger = logging.getLogger("eplb_runtime")

_CHOICES = (2048, 8)
"""Tokens and choices of a batch that is tried."""

Function = TypeVar("Function")


@dataclass(frozen=True)
class Kernels:
    """What is computed by a kernel, or by plain torch.

    Args:
        count: as `moe.routing.splitter.count_choices`.
        deal: as `moe.routing.splitter.deal_out`.
        hash_blocks: as `utils.checksums.block_hashes`.
        moves: which row goes where, and the sums of a token's choices.
        count_and_look_up: as `moe.routing.kernels.count_and_look_up`; None: the counter and the table, one after the
            other.
        regroup: as `moe.experts.aligned.regroup`.
        split: where counts stay on the device; None: the host splits.
    """

    count: Callable[[Tensor, int], Counted] = count_choices
    deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = deal_out
    hash_blocks: Callable[[Tensor], Tensor] = block_hashes
    moves: Moves = permute.PLAIN
    count_and_look_up: Callable[..., Tensor] | None = None
    regroup: aligned.Regroup = aligned.regroup
    split: OnDevice | None = None


def kernels_for(device: torch.device, num_experts: int, num_ranks: int, slots_per_rank: int) -> Kernels:
    """Kernels for this device, tried out on it; plain torch where there is no GPU or no Triton.

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


def tried(device: torch.device, num_experts: int, num_ranks: int, slots_per_rank: int) -> Kernels:
    """Those of our kernels that give here what plain torch gives; Args as of `kernels_for`."""
    from ..utils.checksums_triton import launch
    from .dispatch import kernels as moves
    from .experts import aligned_kernel
    from .routing import kernels as routing
    from .routing import sources_kernel

    one_pass = if_equal(
        "counting and looking up",
        routing.count_and_look_up,
        routing.torch_count_and_look_up,
        _to_count(device, num_experts),
        _counted,
    )
    ids = [(device, num_ranks, slots_per_rank, dedup) for dedup in (False, True)]
    part = if_equal("rows that stay and that leave", moves.part, _gather_twice, [(device,)], _parted)
    dealing = "dealing choices out to copies", routing.deal_by_kernels, deal_out, _choices(device, num_experts)
    deal = if_equal(*dealing, _counted_and_dealt)
    by_device = OnDevice(sources_kernel.layers_on_device, sources_kernel.sent_by_rank)
    copies = slots_per_rank * num_ranks > num_experts
    splits = _splits(device, num_experts, num_ranks, slots_per_rank)
    split = if_equal("the split over copies", by_device, _BY_NUMBA, splits, _sent) if copies else _BY_NUMBA
    return Kernels(
        count_choices if deal is deal_out else routing.count_by_blocks,
        deal,
        if_equal("hashes of blocks", launch, block_hashes, _blocks(device)),
        Moves(
            if_equal("the order of choices by slot", moves.leaving, permute.leaving, ids, _left),
            if_equal("the order of rows that arrive", moves.arriving, permute.arriving, ids, _arrived),
            if_equal("sums of a token's choices", moves.sum_choices, permute.sum_choices, _to_sum(device)),
            None if part is _gather_twice else part,
        ),
        None if one_pass is routing.torch_count_and_look_up else one_pass,
        if_equal("rows filled up by slot", aligned_kernel.launch, aligned.regroup, _to_regroup(device)),
        None if split is _BY_NUMBA else split,
    )


def if_equal(
    name: str,
    kernel: Function,
    reference: Function,
    examples: Iterable[tuple[Any, ...]],
    seen: Callable[..., Any] = lambda function, *example: function(*example),
) -> Function:
    """The kernel, if it gives what the reference gives for each of the examples; otherwise the reference.

    Args:
        seen: from a function and an example: what it gives, a tensor or several.
    """
    try:
        for example in examples:
            if not _equal(seen(kernel, *example), seen(reference, *example)):
                raise ValueError("it gives something else")
    except Exception as error:
        said = one_line(error)
        logger.warning("kernel for %s: %s; plain torch is used", name, said)
        return reference
    return kernel


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other is None or all(map(_equal, one, other))


def _choices(device: torch.device, experts: int) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
    """Batches with quotas over 1, 2 and 5 copies, some of them empty."""
    generator = torch.Generator().manual_seed(0)
    for copies in (1, 2, 5):
        ids_TK = (torch.rand(_CHOICES, generator=generator) ** 2 * experts).long()
        left_E = torch.bincount(ids_TK.flatten(), minlength=experts)
        sent_EC = torch.zeros(experts, copies, dtype=torch.int64)
        for copy in range(copies - 1):
            sent_EC[:, copy] = left_E // (copy + 2)
            left_E = left_E - sent_EC[:, copy]
        sent_EC[:, -1] = left_E
        slots_EC = torch.randperm(experts * copies, generator=generator).view(experts, copies)
        yield ids_TK.to(device), sent_EC.to(device), slots_EC.to(device)


def _counted_and_dealt(
    function: Callable[..., Tensor], ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor
) -> tuple[Tensor, ...]:
    """Counts, and slots: with what the counting has found, and without."""
    from .routing.kernels import count_by_blocks

    counts_E, begins = (count_choices if function is deal_out else count_by_blocks)(ids_TK, sent_EC.shape[0])
    slots = (function(ids_TK, sent_EC, copy_slot_EC, known) for known in (begins, None))
    return counts_E, *slots


def _blocks(device: torch.device) -> Iterable[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for blocks, skipped in ((0, 0), (3, 0), (1000, 0), (37, 1)):
        data = torch.randint(256, (blocks * HASH_BLOCK_BYTES + skipped,), generator=generator, dtype=torch.uint8)
        yield (data.to(device)[skipped:],)


def _to_count(device: torch.device, experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    table_E = torch.randperm(experts, generator=generator)
    for real_T in (None, torch.rand(_CHOICES[0], generator=generator) > 0.2):
        ids_TK = (torch.rand(_CHOICES, generator=generator) ** 2 * experts).long()
        yield ids_TK.to(device), table_E.to(device), None if real_T is None else real_T.to(device)


def _counted(
    function: Callable[..., Tensor], ids_TK: Tensor, table_E: Tensor, real_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    counts_E = torch.ones_like(table_E)
    return function(ids_TK, table_E, counts_E, real_T), counts_E


def _left(
    function: Callable[..., permute.Leaving], device: torch.device, ranks: int, slots: int, dedup: bool
) -> tuple[Tensor | None, ...]:
    """Of the last rank; what is of this batch."""
    generator = torch.Generator().manual_seed(0)
    slots_TK = (torch.rand(_CHOICES, generator=generator) ** 2 * ranks * slots).long().to(device)
    counts_2RW, *orders, token_N, source_row_N1 = function(slots_TK, ranks - 1, ranks, slots, dedup=dedup, tag=5)
    sent = int(counts_2RW[0, :, slots].sum()) if dedup else token_N.shape[0]
    return counts_2RW[0], *orders, token_N[:sent], source_row_N1


def _arrived(
    function: Callable[..., permute.Arriving], device: torch.device, ranks: int, slots: int, dedup: bool
) -> permute.Arriving:
    counts_RW = np.random.default_rng(0).integers(0, 5000 // ranks, (ranks, slots + 1))
    rows = int(counts_RW[:, :slots].sum())
    source_row_M1 = torch.arange(rows, device=device).view(-1, 1) if dedup else None
    return function(counts_RW, ranks - 1, slots, device, source_row_M1)


def _to_sum(device: torch.device) -> Iterator[tuple[Tensor, Tensor, RowMemory, Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    place_TK = torch.randperm(512, generator=generator).view(64, 8).to(device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        rows_ND = torch.randn(512, 1100, generator=generator).to(dtype).to(device)
        for weight_dtype in (None, torch.float32, dtype):
            weights_TK = None if weight_dtype is None else torch.rand(64, 8, generator=generator).to(weight_dtype)
            yield rows_ND, place_TK, RowMemory(), None if weights_TK is None else weights_TK.to(device)


def _splits(
    device: torch.device, experts: int, ranks: int, slots: int
) -> Iterator[tuple[SplitTables, torch.device, Tensor, int, bool]]:
    """Batches of a layer with as many copies as there may be, of few experts and of many."""
    homes, generator = experts // ranks, np.random.default_rng(0)
    start = Placement.initial(1, experts, ranks, slots - homes)
    for few in (False, True):
        slots_RS = start.physical_to_logical.reshape(ranks, slots).copy()
        for rank in range(ranks):
            elsewhere = np.setdiff1d(np.arange(min(experts, 4 * slots) if few else experts), slots_RS[rank, :homes])
            copied = generator.permutation(elsewhere)[: slots - homes]
            slots_RS[rank, homes : homes + len(copied)] = copied
        tables = SplitTables.of(Placement(slots_RS.reshape(1, -1), experts, ranks, start.home))
        counts_RE = (generator.exponential(size=(ranks, experts)) ** 2 * 100).astype(np.int64)
        for locality in (True, False):
            yield tables, device, torch.from_numpy(counts_RE).to(device), ranks // 2, locality


def _sent(
    split: OnDevice, tables: SplitTables, device: torch.device, counts_RE: Tensor, rank: int, locality: bool
) -> Tensor:
    """To as many copies as there are."""
    (layer,) = split.layers(tables, device)
    ranks_per_node = 2 if tables.num_ranks % 2 == 0 else 1
    sent_EC = split.sent_by_rank(counts_RE, layer, rank, ranks_per_node=ranks_per_node, locality=locality)
    return sent_EC[:, : tables.copy_slot_LEC.shape[2]]


def _sent_by_numba(counts_RE: Tensor, tables: SplitTables, rank: int, *, ranks_per_node: int, locality: bool) -> Tensor:
    counts = counts_RE.cpu().numpy()
    sent_EC, _ = sources.split_for_rank(counts, tables, 0, rank, ranks_per_node=ranks_per_node, locality=locality)
    return torch.from_numpy(sent_EC).to(counts_RE.device)


_BY_NUMBA = OnDevice(lambda tables, device: [tables], _sent_by_numba)


def _to_regroup(device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, int]]:
    """To slots of a multiple of 16 rows, and back."""
    counts_S = SlotCounts.of([300, 0, 17, 128, 1], device)
    aligned_S, places = aligned.aligned(counts_S, 16, 446)
    for dtype, width in ((torch.bfloat16, 1100), (torch.float32, 1)):
        for rows, one, other in ((446, counts_S, aligned_S), (places, aligned_S, counts_S)):
            source = torch.arange(rows * width, device=device).view(rows, width).to(dtype)
            yield source, one.offsets_S, other.offsets_S, counts_S.offsets_S, 446 + places - rows


def _gather_twice(source: Tensor, index_U: Tensor, staying: Tensor, leaving: Tensor) -> None:
    permute.gather(source, index_U[: staying.shape[0]], staying)
    permute.gather(source, index_U[staying.shape[0] :], leaving)


def _parted(function: Callable[..., None], device: torch.device) -> list[Tensor]:
    """Rows of one column, and of more than a program moves."""
    found = []
    for width in (1, 1100):
        source = torch.arange(300 * width, device=device).view(300, width)
        index_U = torch.arange(299, -1, -1, device=device)
        found += [source.new_zeros(90, width), source.new_zeros(210, width)]
        function(source, index_U, *found[-2:])
    return found
