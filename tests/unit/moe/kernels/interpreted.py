"""Kernels give what their references in torch and numba give.

`test_kernels.py` runs this in Triton's interpreter.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks import kernels as bench
from support.water_filling_torch import assign_slots
from torch import Tensor

from eplb_runtime.load.counter import LoadCounter
from eplb_runtime.moe import kernel_selection, kernels
from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.dispatch.permute import RowMemory
from eplb_runtime.moe.routing.slots import SlotTable
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
        assert torch.equal(slots, kernel_selection.count_and_map(ids, table, expected, mask))
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


# -- Kernels of dispatch give what `permute` gives, bit for bit


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
JOBS = [(2, 4), (1, 5), (3, 1), (5, 3), (1, 1)]
"""(ranks, slots of each)."""
LEAVING = [(0, 3), (1, 1), (100, 1), (1, 6), (17, 4), (43, 3)]
"""(tokens, choices); a block is 64 choices, and may begin in the middle of a token's."""


def slots_of(tokens: int, top_k: int, slots: int, seed: int = 0) -> Tensor:
    """The first slots more often."""
    generator = torch.Generator().manual_seed(seed + tokens)
    return (torch.rand(tokens, top_k, generator=generator) ** 2 * slots).long()


def same(found: tuple, expected: tuple) -> None:
    for name, one, other in zip(type(expected)._fields, found, expected, strict=True):
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other), name


def leave_alike(slots_TK: Tensor, me: int, ranks: int, slots: int, dedup: bool, tag: int | None) -> None:
    found, expected = (
        function(slots_TK, me, ranks, slots, dedup=dedup, tag=tag) for function in (kernels.leaving, permute.leaving)
    )
    sent = int(expected.counts_2RW[0, :, slots].sum()) if dedup else slots_TK.numel()
    same(*(one._replace(counts_2RW=one.counts_2RW[0], token_N=one.token_N[:sent]) for one in (found, expected)))


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize(
    ("tokens", "top_k", "ranks", "slots"),
    [*((*batch, 5, 3) for batch in LEAVING), *((43, 3, *job) for job in JOBS if job != (5, 3))],
)
def test_what_leaves(tokens: int, top_k: int, ranks: int, slots: int, dedup: bool) -> None:
    slots_TK = slots_of(tokens, top_k, ranks * slots)
    for me in {0, ranks // 2, ranks - 1}:
        leave_alike(slots_TK, me, ranks, slots, dedup, (3 << 40) + 1 if me else None)


def test_what_leaves_where_all_choose_one_slot_and_where_choices_do_not_lie_in_a_row() -> None:
    leave_alike(torch.full((150, 4), 3), 1, 2, 4, True, 0)
    leave_alike(slots_of(4, 150, 8).T, 1, 2, 4, True, 0)
    leave_alike(slots_of(150, 8, 8)[:, ::2], 0, 2, 4, True, 0)


@pytest.mark.parametrize("dedup", [True, False])
def test_what_leaves_in_more_blocks_and_for_more_slots_than_are_counted_at_once(
    dedup: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "AT_ONCE", 2)
    leave_alike(slots_of(150, 2, 70), 1, 7, 10, dedup, None)


@pytest.mark.parametrize("slot", [-1, 8])
def test_a_slot_that_there_is_not_is_noticed_on_the_device(slot: int, asserting: None) -> None:
    kernels.leaving(slots_of(90, 3, 8), 0, 2, 4, dedup=True)
    slots_TK = slots_of(90, 3, 8)
    slots_TK[40, 1] = slot
    with pytest.raises(Exception, match="a slot that does not exist"):
        kernels.leaving(slots_TK, 0, 2, 4, dedup=True)


@pytest.mark.parametrize("meant", [True, False])
@pytest.mark.parametrize(("ranks", "slots", "most"), [*((*job, 900) for job in JOBS), (2, 4, 0), (3, 1, 3)])
def test_what_arrives(ranks: int, slots: int, most: int, meant: bool) -> None:
    generator = np.random.default_rng(ranks + most)
    counts_RW = generator.integers(0, most + 1, (ranks, slots + 2)) * generator.integers(0, 2, (ranks, slots + 2))
    rows = int(counts_RW[:, :slots].sum())
    source_row_M1 = torch.randint(1000, (rows, 1)) if meant else None
    for first, told in ((0, None), (ranks - 1, torch.from_numpy(counts_RW))):
        found, expected = (
            function(counts_RW, first, slots, CPU, source_row_M1, told)
            for function in (kernels.arriving, permute.arriving)
        )
        same(found, expected)
        assert (found.row_M is found.arrived_M) == (not meant)


def test_a_group_of_more_rows_than_its_programs_number_at_once() -> None:
    counts_RW = np.array([[9000, 1], [0, 5000]])
    same(kernels.arriving(counts_RW, 1, 2, CPU), permute.arriving(counts_RW, 1, 2, CPU))


@pytest.mark.parametrize("weight_dtype", [None, *DTYPES], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_a_tokens_choices(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    for tokens, top_k, width in ((0, 2, 8), (1, 1, 1), (2, 3, 1100), (2, 2, 0)):
        generator = torch.Generator().manual_seed(top_k)
        rows = torch.randn(tokens * top_k, width, generator=generator).to(dtype)
        place = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
        weights = None if weight_dtype is None else torch.rand(top_k, tokens, generator=generator).to(weight_dtype).T
        found = kernels.sum_choices(rows, place, RowMemory(), weights)
        expected = permute.sum_one_by_one(rows, place, RowMemory(), weights)
        assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_of_the_choices_that_are_here(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, out: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    for tokens, top_k, width in ((0, 3, 4), (3, 1, 1), (2, 6, 1100)):
        rows = torch.randn(tokens * top_k, width, generator=generator).to(dtype)
        place = torch.randperm(tokens * top_k, generator=generator).view(tokens, top_k)
        place = torch.where(torch.rand(place.shape, generator=generator) < 0.4, -1, place)
        weights = None if weight_dtype is None else torch.rand(len(rows), generator=generator).to(weight_dtype)
        found, expected = (one.sum_local_choices(rows, place, weights, out) for one in (kernels, permute))
        assert found.dtype == expected.dtype == out and torch.equal(found, expected)
    nothing = kernels.sum_local_choices(rows[:0], torch.full((3, 2), -1), None, out)
    assert nothing.shape == (3, 1100) and not nothing.any()


def test_a_row_of_no_number_that_is_nobodys_is_not_summed() -> None:
    rows, place = torch.tensor([[float("nan")], [2.0]]), torch.tensor([[1, -1], [-1, -1]])
    for one in (kernels, permute):
        assert one.sum_local_choices(rows, place, torch.tensor([float("inf"), 3.0])).tolist() == [[6.0], [0.0]]


# -- Where Triton's interpreter is not what a GPU is


@pytest.fixture(autouse=True)
def rounding_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter cuts float32 to bfloat16; what is compiled rounds (`compiled_kernels.py` looks for that)."""
    from triton import language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: np.ndarray, of: tl.dtype, to: tl.dtype, mode: object) -> np.ndarray:
        if (of, to) != (tl.float32, tl.bfloat16):
            return convert(data, of, to, mode)
        return torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


@pytest.fixture
def asserting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter leaves out what kernels assert, whatever a launch says; what is compiled has it."""
    from triton.runtime.interpreter import interpreter_builder

    monkeypatch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, debug=True))
