"""Kernels give what their references in torch and numba give.

`test_kernels_interpreted.py` runs this in Triton's interpreter.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import kernels as bench
from water_filling_torch import assign_slots

from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.moe import kernel_selection
from eplb_runtime.moe.dispatch import kernels as moves
from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.routing import kernels, sources_kernel, water_filling, water_filling_kernel
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.moe.routing.sources import split_for_rank
from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.utils import checksums_triton
from eplb_runtime.utils.checksums import block_hashes

CPU = torch.device("cpu")


def ids_of(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Choices, the first experts more often."""
    generator = torch.Generator().manual_seed(tokens + top_k)
    return (torch.rand(tokens, top_k, generator=generator) ** 2 * experts).to(dtype)


BATCHES = [(100, 1, 7), (64, 8, 64), (0, 4, 16), (100, 3, 1), (50, 6, 200), (1, 1, 2)]
"""(tokens, choices, experts): less than a block of 256 choices, whole blocks, none, and two of which one is cut."""


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "dtype"), [*((*batch, torch.int64) for batch in BATCHES), (50, 6, 200, torch.int32)]
)
def test_counting_and_looking_up_in_one_pass(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    ids = ids_of(tokens, top_k, experts, dtype)
    table = torch.randperm(experts, generator=torch.Generator().manual_seed(1)) + 5
    real = torch.arange(2 * tokens) % 3 > 0
    for mask in (None, real[:tokens], real[::2]):
        counts, expected = torch.full((2, experts), 9)
        slots = kernels.count_and_map(ids, table, counts, mask)
        assert torch.equal(slots, kernels.torch_count_and_map(ids, table, expected, mask))
        assert torch.equal(counts, expected)
        assert counts.sum() == 9 * experts + (ids if mask is None else ids[mask]).numel()
    wide = torch.stack([ids, ids + 1], dim=2).flatten(1)[:, ::2]  # does not lie in a row
    assert torch.equal(kernels.count_and_map(wide, table, counts), table[ids.long()])


def test_counting_and_looking_up_is_what_counter_and_table_do() -> None:
    placement = Placement.initial(2, 6, 2, 0)
    table, counters = SlotTable(placement, CPU), [LoadCounter(2, 6, 10, CPU) for _ in range(2)]
    ids, real = ids_of(50, 3, 6, torch.int64), torch.arange(50) % 4 > 0
    counters[0].count(1, ids, real)
    slots = kernels.count_and_map(ids, table.home_of_experts(1), counters[1].counts[1], real)
    assert torch.equal(slots, table.slots(1, ids)) and torch.equal(counters[0].counts, counters[1].counts)


@pytest.mark.parametrize("expert", [-1, 16])
def test_an_id_of_no_expert_is_noticed_on_the_device(expert: int, asserting: None) -> None:
    ids, table = ids_of(90, 3, 16, torch.int64), torch.arange(16)
    kernels.count_and_map(ids, table, torch.zeros_like(table))
    ids[40, 1] = expert
    with pytest.raises(Exception, match="an expert that there is not"):
        kernels.count_and_map(ids, table, torch.zeros_like(table))
    with pytest.raises(Exception, match="an expert that there is not"):
        kernels.count_by_blocks(ids, 16)


def test_what_is_tried_out_at_attach_is_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for sums: in float32 a CPU need not round its products. A smaller batch than that of a job takes seconds."""
    for size, smaller in (("_TOKENS", 16), ("_TOP_K", 4), ("_LONG", 300)):
        monkeypatch.setattr(kernel_selection, size, smaller)
    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        taken = kernel_selection.tried(CPU, 12, 3, 5)
    assert (taken.count, taken.deal) == (kernels.count_by_blocks, kernels.deal_by_kernels)
    assert taken.hash_blocks is checksums_triton.launch
    assert taken.count_and_map is kernels.count_and_map
    assert taken.moves == replace(moves.MOVES, sum_choices=permute.sum_choices)
    assert taken.split is not None and taken.split.sent_by_rank is sources_kernel.sent_by_rank
    assert [record.getMessage() for record in caplog.records] == [
        "kernel for sums of a token's choices: it gives something else; plain torch is used"
    ]


DEALT = [*((*batch, 2, torch.int64) for batch in BATCHES), (50, 6, 200, 1, torch.int64), (50, 6, 20, 5, torch.int32)]
"""(tokens, choices, experts, copies of each, dtype)."""


@pytest.mark.parametrize(("tokens", "top_k", "experts", "copies", "dtype"), DEALT)
def test_choices_are_dealt_out_by_quota_in_their_order(
    tokens: int, top_k: int, experts: int, copies: int, dtype: torch.dtype
) -> None:
    deal_alike(tokens, top_k, experts, copies, dtype)


def test_a_batch_of_more_blocks_than_begin_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "AT_ONCE", 2)
    deal_alike(300, 4, 20, 2, torch.int64)


def deal_alike(tokens: int, top_k: int, experts: int, copies: int, dtype: torch.dtype) -> None:
    ids = ids_of(tokens, top_k, experts, dtype)
    counts, begins = kernels.count_by_blocks(ids, experts)
    assert torch.equal(counts, torch.bincount(ids.flatten(), minlength=experts))
    share = torch.rand(experts, copies, generator=torch.Generator().manual_seed(2))
    sent = (counts[:, None] * share / share.sum(1, keepdim=True)).long()
    sent[:, -1] += counts - sent.sum(1)
    slots_of_copies = torch.randperm(experts * copies).view(experts, copies)
    for known in (begins, None):  # nothing of a batch is left for the next
        slots = kernels.deal_by_kernels(ids, sent, slots_of_copies, known)
        assert torch.equal(slots, assign_slots(ids, sent, slots_of_copies))


def with_copies(seed: int, layers: int, ranks: int, homes: int, replicas: int, hot: float) -> Placement:
    """Homes in logical order; copies where they may stand, of the first experts for the most part."""
    generator = np.random.default_rng(seed)
    start = Placement.initial(layers, ranks * homes, ranks, replicas)
    slots = start.physical_to_logical.reshape(layers, ranks, -1).copy()
    weight = 1.0 / np.arange(1, ranks * homes + 1) ** hot
    for layer in range(layers):
        for rank in range(ranks):
            foreign = np.setdiff1d(np.arange(ranks * homes), slots[layer, rank])
            order = generator.random(len(foreign)) ** (1 / weight[foreign])
            chosen = foreign[np.argsort(-order)][:replicas]
            slots[layer, rank, homes : homes + len(chosen)] = np.where(
                generator.random(len(chosen)) < 0.9, chosen, EMPTY
            )
    return Placement(slots.reshape(layers, -1), ranks * homes, ranks, start.home)


SPLITS = {
    "one copy each": (2, 4, 4, 0, 0.0, 1e3),
    "few copies": (2, 8, 4, 1, 0.0, 1e4),
    "many copies of few": (2, 8, 2, 3, 2.0, 1e4),
    "three ranks": (3, 3, 3, 2, 0.5, 100.0),
    "one rank": (1, 1, 5, 2, 0.0, 50.0),
    "counts that leave few bits": (1, 8, 4, 2, 0.5, 2.0**51),
    "no tokens": (1, 4, 2, 1, 0.0, 0.0),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_has_the_integers_of_numba(case: str) -> None:
    *shape, tokens = SPLITS[case]
    placement = with_copies(7, *shape)
    tables = SplitTables.of(placement)
    on_device = water_filling_kernel.KernelTables.of(tables)
    generator = np.random.default_rng(3)
    totals = (generator.exponential(size=(placement.num_layers, placement.num_experts)) ** 2 * tokens).astype(np.int64)
    for sweeps in (water_filling.SWEEPS, 3, 0):
        expected = water_filling.split_totals(totals, tables, sweeps=sweeps)
        found = torch.full(expected.shape, -7)
        water_filling_kernel.launch_split_totals(torch.from_numpy(totals), on_device, found, sweeps=sweeps)
        assert np.array_equal(found.numpy(), expected), sweeps


def test_control_an_even_split_has_other_integers() -> None:
    tables = SplitTables.of(with_copies(7, 1, 8, 4, 2, 0.5))
    totals = (np.random.default_rng(3).exponential(size=(1, 32)) ** 2 * 1e4).astype(np.int64)
    assert not np.array_equal(
        water_filling.split_totals(totals, tables), water_filling.split_totals(totals, tables, mode="even")
    )


@pytest.mark.parametrize("blocks", [0, 1, 16, 21])
def test_blocks_have_the_hashes_of_checksums(blocks: int) -> None:
    data = torch.randint(0, 256, (blocks * 1024 + 8,), dtype=torch.uint8)
    for row in (data[: blocks * 1024], data[8:], data[3 : 3 + blocks * 1024]):
        assert torch.equal(checksums_triton.launch(row), block_hashes(row))
    if blocks:
        row = data[:1024].clone()
        row[5] ^= 1
        assert not torch.equal(checksums_triton.launch(row), block_hashes(data[:1024]))


@pytest.mark.parametrize(
    ("case", "ranks_per_node"),
    [("few copies", 2), ("many copies of few", 4), ("three ranks", 1), ("one rank", 1), ("no tokens", 2)],
)
def test_a_rank_sends_to_copies_what_numba_says(case: str, ranks_per_node: int) -> None:
    _, ranks, *shape, tokens = SPLITS[case]
    tables = SplitTables.of(with_copies(11, 2, ranks, *shape))
    on_device = sources_kernel.layers_on_device(tables, CPU)[1]
    experts, copies = tables.copy_slot_LEC.shape[1:]
    # Of wider rows, as they come with a word behind.
    wide_RE = np.random.default_rng(5).exponential(size=(ranks, experts + 1)) ** 2 * tokens / experts
    counts_RE, given = wide_RE.astype(np.int64)[:, :-1], torch.from_numpy(wide_RE.astype(np.int64))[:, :-1]
    ways = (True, "water_filling"), (False, "water_filling"), (True, "even")
    for rank, (locality, mode) in zip((ranks - 1, 0, ranks // 2), ways, strict=True):
        options = {"ranks_per_node": ranks_per_node, "locality": locality, "mode": mode}
        found = sources_kernel.sent_by_rank(given, on_device, rank, **options)
        expected, _ = split_for_rank(counts_RE, tables, 1, rank, **options)
        assert np.array_equal(found[:, :copies].numpy(), expected) and not found[:, copies:].any()
    few = int(counts_RE.sum()) + 1
    home = sources_kernel.sent_by_rank(given, on_device, 0, ranks_per_node=1, least_tokens=few)
    assert np.array_equal(home[:, 0].numpy(), counts_RE[0]) and not home[:, 1:].any()


def test_the_benchmark_runs_each_of_them() -> None:
    found = bench.run(CPU, repeats=1, tokens=40, top_k=2, experts=16, ranks_of_job=4, hidden=64, calls=1)
    names = [row["kernel"] for row in found["kernels"]]
    assert len(names) == len(set(names)) == 11
    assert all(row[key] > 0 for row in found["kernels"] for key in ("us", "reference_us", "least_us", "ratio"))
