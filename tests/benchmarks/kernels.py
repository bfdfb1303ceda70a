"""The Triton kernels on this GPU, each beside its reference and beside a plain copy of what it reads and a launch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from eplb_runtime.moe import kernel_selection, kernels
from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.dispatch.permute import RowMemory
from eplb_runtime.moe.routing.slots import assign_slots, count_choices
from eplb_runtime.moe.routing.water_filling import SplitTables
from eplb_runtime.planner import plan
from eplb_runtime.tools.bench import timed
from eplb_runtime.topology import Topology
from eplb_runtime.utils.triton import triton

from .harness import command

CALLS = 20
"""Of a kernel, waited for together."""


@dataclass(frozen=True)
class _Kernel:
    """Args:
    name: what it does.
    launch, reference: the same by it, and without it.
    least: a copy of as much as it reads, and where that is little, a launch.
    """

    name: str
    launch: Callable[[], object]
    reference: Callable[[], object]
    least: Callable[[], object]


def run(
    device: torch.device,
    repeats: int = 20,
    *,
    tokens: int = 4096,
    top_k: int = 8,
    experts: int = 256,
    ranks_of_job: int = 64,
    hidden: int = 7168,
    calls: int = CALLS,
) -> dict[str, Any]:
    """A batch of one rank with one replica slot, as kernels see it; bfloat16 rows, on a GPU, or a CPU in Triton's
    interpreter. The three ways of a kernel take turns, the least of ``repeats`` timings of ``calls`` each counts.

    JSON-able; ``"kernels"``: a row for each with ``kernel``, ``us`` (of a call, launching and waiting included),
    ``reference_us`` (in plain torch on the device), ``least_us`` and ``ratio`` (``us`` by ``least_us``)."""
    rows = []
    for kernel in _kernels(device, tokens, top_k, experts, ranks_of_job, hidden):
        ways = [partial(_repeatedly, way, calls) for way in (kernel.launch, kernel.reference, kernel.least)]
        seconds = timed(ways, repeats, device) / calls
        us, reference, least = (1e6 * seconds.min(dim=0).values).tolist()
        rows.append(
            {"kernel": kernel.name, "us": us, "reference_us": reference, "least_us": least, "ratio": us / least}
        )
    sizes = {"tokens": tokens, "top_k": top_k, "experts": experts, "ranks": ranks_of_job, "hidden": hidden}
    return {"device": device.type, **sizes, "kernels": rows}


def _repeatedly(way: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        way()


def _kernels(device: torch.device, tokens: int, top_k: int, experts: int, ranks: int, hidden: int) -> Iterator[_Kernel]:
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).to(device)
    room_TK, word = torch.empty_like(ids_TK), torch.zeros(1, device=device)

    def copy_ids() -> None:
        room_TK.copy_(ids_TK)
        word.add_(1)

    table_E = torch.randperm(experts, generator=generator).to(device)
    counts_E = torch.zeros_like(table_E)
    yield _Kernel(
        "count load and look up slots",
        partial(kernels.count_and_map, ids_TK, table_E, counts_E),
        partial(kernel_selection.count_and_map, ids_TK, table_E, counts_E),
        copy_ids,
    )
    yield from _of_copies(ids_TK, experts, ranks, copy_ids)
    yield from _of_order(ids_TK, experts // ranks, ranks, copy_ids)
    yield from _of_rows(device, ids_TK.numel(), top_k, hidden, generator)


def _of_copies(ids_TK: torch.Tensor, experts: int, ranks: int, copy_ids: Callable[[], object]) -> Iterator[_Kernel]:
    """What layers with copies of experts have besides."""
    device = ids_TK.device
    load = np.random.default_rng(0).lognormal(0.0, 1.0, (1, experts))
    topology = Topology(ranks, 8 if ranks % 8 == 0 else ranks)
    tables = SplitTables.of(plan(load, topology, slots_per_rank=experts // ranks + 1).placement)
    copy_slot_EC = torch.from_numpy(tables.copy_slot_LEC[0].astype(np.int64)).to(device)
    known_E, blocks = kernels.count_by_blocks(ids_TK, experts)
    sent_EC = torch.zeros_like(copy_slot_EC)
    sent_EC[:, 0] = known_E
    yield _Kernel(
        "count for a split",
        partial(kernels.count_by_blocks, ids_TK, experts),
        partial(count_choices, ids_TK, experts),
        copy_ids,
    )
    yield _Kernel(
        "deal choices out to copies",
        partial(kernels.deal_by_kernels, ids_TK, sent_EC, copy_slot_EC, blocks),
        partial(assign_slots, ids_TK, sent_EC, copy_slot_EC, None),
        copy_ids,
    )


def _of_order(ids_TK: torch.Tensor, slots: int, ranks: int, copy_ids: Callable[[], object]) -> Iterator[_Kernel]:
    """Which row goes where; experts stand in logical order, and each rank is sent what this one sends it."""
    given = ids_TK, 0, ranks, slots
    yield _Kernel(
        "order of choices by slot",
        partial(kernels.leaving, *given, dedup=True, tag=1),
        partial(permute.leaving, *given, dedup=True, tag=1),
        copy_ids,
    )
    left = kernels.leaving(*given, dedup=False)
    counts = left.counts_2RW[0]
    counts_RW = counts.cpu().numpy()
    arrives = counts_RW, 0, slots, ids_TK.device, None, counts
    yield _Kernel(
        "order of rows that arrive", partial(kernels.arriving, *arrives), partial(permute.arriving, *arrives), copy_ids
    )


def _of_rows(device: torch.device, rows: int, top_k: int, hidden: int, generator: torch.Generator) -> Iterator[_Kernel]:
    """What moves rows, a row for each choice."""
    source_ND = torch.randn(rows, hidden, generator=generator).to(device, torch.bfloat16)
    room_ND = torch.empty_like(source_ND)
    copy_rows = partial(room_ND.copy_, source_ND)
    index_N = torch.randperm(rows, generator=generator).to(device)
    place_TK, memory = index_N.view(-1, top_k), RowMemory()
    weights_TK = torch.rand(place_TK.shape, generator=generator).to(device)
    yield _Kernel(
        "sum of a token's choices",
        partial(kernels.sum_choices, source_ND, place_TK, memory, weights_TK),
        partial(permute.sum_choices, source_ND, place_TK, memory, weights_TK),
        copy_rows,
    )


if __name__ == "__main__":
    if triton is None or not torch.cuda.is_available():
        raise SystemExit("it needs Triton (pip install triton) and a GPU: nothing was measured")
    command(run, ranks=1)
