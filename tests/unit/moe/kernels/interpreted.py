"""Kernels give what their references in torch and numba give.

`test_kernels.py` runs this in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks import kernels as bench
from water_filling_torch import assign_slots

from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.moe.routing import kernels
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.placement import Placement

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
    with pytest.raises(Exception, match="an expert that does not exist"):
        kernels.count_and_map(ids, table, torch.zeros_like(table))
    with pytest.raises(Exception, match="an expert or a slot that does not exist"):
        kernels.count_by_blocks(ids, 16)


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


def test_the_benchmark_runs_each_of_them() -> None:
    found = bench.run(CPU, repeats=1, tokens=40, top_k=2, experts=16, ranks_of_job=4, hidden=64, calls=1)
    names = [row["kernel"] for row in found["kernels"]]
    assert len(names) == len(set(names)) == 6
    assert all(row[key] > 0 for row in found["kernels"] for key in ("us", "reference_us", "least_us", "ratio"))
