"""Kernels give what their references in torch and numba give.

`test_kernels.py` runs this in a process of its own, in Triton's interpreter: Triton must be told before it is imported,
and serves no GPU then.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eplb_runtime import checksum_kernel, kernels_in_use
from eplb_runtime.checksum import block_hashes
from eplb_runtime.dispatch import padded
from eplb_runtime.kernels_in_use import if_equal
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.routing import kernels, water_filling, water_filling_kernel
from eplb_runtime.routing.splitter import deal_out
from eplb_runtime.routing.tables import SplitTables
from eplb_runtime.routing.water_filling_torch import assign_slots


def ids_of(tokens: int, top_k: int, experts: int, dtype: torch.dtype, absent: float = 0.1) -> torch.Tensor:
    """Choices, the first experts more often, some absent."""
    generator = torch.Generator().manual_seed(tokens + top_k)
    ids = (torch.rand(tokens, top_k, generator=generator) ** 2 * experts).long()
    return torch.where(torch.rand(tokens, top_k, generator=generator) < absent, -1, ids).to(dtype)


BATCHES = [(100, 1, 7), (64, 8, 64), (0, 4, 16), (333, 3, 1), (130, 6, 200)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), BATCHES)
def test_counting_and_looking_up_in_one_pass(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    ids = ids_of(tokens, top_k, experts, dtype)
    table = torch.randperm(experts, generator=torch.Generator().manual_seed(1)) + 5
    real = torch.arange(tokens) % 3 > 0
    for mask in (None, real):
        found, expected = [(torch.full((experts,), 9), torch.empty(ids.shape, dtype=torch.int64)) for _ in range(2)]
        kernels.launch_count_and_look_up(ids, table, *found, mask)
        kernels.torch_count_and_look_up(ids, table, *expected, mask)
        assert all(map(torch.equal, found, expected))
        counted = ids if mask is None else ids[mask]
        assert found[0].sum() == 9 * experts + int((counted >= 0).sum())


def test_what_is_tried_out_at_attach_is_taken() -> None:
    choices = kernels_in_use._choices(torch.device("cpu"), 60)
    assert if_equal("dealing", kernels.deal_by_kernels, deal_out, choices) is kernels.deal_by_kernels
    blocks = kernels_in_use._blocks(torch.device("cpu"))
    assert if_equal("hashes", checksum_kernel.launch, block_hashes, blocks) is checksum_kernel.launch


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("copies", [1, 2, 5])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [*BATCHES, (8400, 4, 20)])
def test_choices_are_dealt_out_by_quota_in_their_order(
    tokens: int, top_k: int, experts: int, copies: int, dtype: torch.dtype
) -> None:
    if copies > 1 and tokens > 1000 and dtype == torch.int32:
        pytest.skip("the large batch once for each number of copies")
    ids = ids_of(tokens, top_k, experts, dtype)
    dealer = kernels.Dealer(experts, ids.numel(), ids.device)
    counts, expected = torch.full((experts,), -5), torch.empty(experts, dtype=torch.int64)
    kernels.torch_count(ids, expected)
    for _ in range(2):  # nothing of a batch is left for the next
        dealer.launch_count(ids, counts)
        assert torch.equal(counts, expected)
    share = torch.rand(experts, copies, generator=torch.Generator().manual_seed(2))
    sent = (counts[:, None] * share / share.sum(1, keepdim=True)).long()
    sent[:, -1] += counts - sent.sum(1)
    slots_of_copies = torch.randperm(experts * copies).view(experts, copies)
    slots = torch.empty(ids.shape, dtype=torch.int64)
    dealer.launch_deal(ids, sent, slots_of_copies, slots)
    assert torch.equal(slots, assign_slots(ids, sent, slots_of_copies))


def test_a_dealer_refuses_a_batch_that_it_has_no_room_for() -> None:
    dealer = kernels.Dealer(8, 256, torch.device("cpu"))
    with pytest.raises(ValueError, match="257 choices, and there is room for 256"):
        dealer.count(torch.zeros(257, 1, dtype=torch.int64), torch.zeros(8, dtype=torch.int64))


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
    "one copy each": (3, 4, 4, 0, 0.0, 1e3),
    "few copies": (4, 8, 4, 1, 0.0, 1e4),
    "many copies of few": (4, 8, 2, 3, 2.0, 1e4),
    "three ranks": (3, 3, 3, 2, 0.5, 100.0),
    "one rank": (2, 1, 5, 2, 0.0, 50.0),
    "counts that leave few bits": (2, 8, 4, 2, 0.5, 2.0**51),
    "no tokens": (2, 4, 2, 1, 0.0, 0.0),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_has_the_integers_of_numba(case: str) -> None:
    *shape, tokens = SPLITS[case]
    placement = with_copies(7, *shape)
    tables = SplitTables.of(placement)
    on_device = water_filling_kernel.KernelTables.of(tables)
    generator = np.random.default_rng(3)
    totals = (generator.exponential(size=(placement.num_layers, placement.num_experts)) ** 2 * tokens).astype(np.int64)
    ballast = generator.integers(0, int(tokens) + 1, (placement.num_layers, placement.num_ranks))
    warm = np.asarray(water_filling.split_totals(totals[:, ::-1].copy(), tables))
    choices: list[dict] = [{}, {"sweeps": 3}, {"sweeps": 0}, {"ballast_LR": ballast}]
    choices += [{"warm_LEC": warm}] if warm.max(initial=0) < 2**47 else []
    for options in choices:
        expected = water_filling.split_totals(totals, tables, **options)
        found = torch.full(expected.shape, -7)
        of_torch = {n: torch.from_numpy(o) if isinstance(o, np.ndarray) else o for n, o in options.items()}
        water_filling_kernel.launch_split_totals(torch.from_numpy(totals), on_device, found, **of_torch)
        assert np.array_equal(found.numpy(), expected), options


def test_control_an_even_split_has_other_integers() -> None:
    tables = SplitTables.of(with_copies(7, 1, 8, 4, 2, 0.5))
    totals = (np.random.default_rng(3).exponential(size=(1, 32)) ** 2 * 1e4).astype(np.int64)
    assert not np.array_equal(
        water_filling.split_totals(totals, tables), water_filling.split_totals(totals, tables, mode="even")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("counts", "width"), [((3, 0, 17, 16, 1), 200), ((0, 0, 0), 8), ((5,), 128), ((0, 40), 7)], ids=str
)
def test_rows_are_padded_for_grouped_products_and_come_back(
    counts: tuple[int, ...], width: int, dtype: torch.dtype
) -> None:
    rows, multiple = sum(counts), 16
    offsets = torch.tensor(counts).cumsum(0).int()
    ends = padded.padded_ends(offsets, multiple)
    assert all(end % multiple == 0 for end in ends.tolist())
    places = padded.most_rows(rows, len(counts), multiple)
    assert int(ends[-1]) <= places
    source = torch.randint(1, 100, (rows + 3, width)).to(dtype)
    index = torch.randperm(rows + 3)[:rows]
    found, expected = torch.full((2, places, width), -1).to(dtype)
    padded.launch_pad(source, index, offsets, ends, found)
    padded.torch_pad(source, index, offsets, ends, expected)
    assert torch.equal(found, expected)
    assert int((found != 0).sum()) == rows * width, "zeros where no row is"
    for slot, (end, count) in enumerate(zip(ends.tolist(), counts, strict=True)):
        begin = 0 if slot == 0 else int(ends[slot - 1])
        first = sum(counts[:slot])
        assert end - begin < count + multiple
        assert torch.equal(found[begin : begin + count], source[index[first : first + count]])
    for take_out in (padded.launch_unpad, padded.torch_unpad):
        back = torch.zeros(rows, width, dtype=dtype)
        take_out(found, offsets, ends, back)
        assert torch.equal(back, source[index])


@pytest.mark.parametrize("blocks", [0, 1, 16, 37])
def test_blocks_have_the_hashes_of_checksums(blocks: int) -> None:
    data = torch.randint(0, 256, (blocks * 1024 + 8,), dtype=torch.uint8)
    for row in (data[: blocks * 1024], data[8:], data[3 : 3 + blocks * 1024]):
        assert torch.equal(checksum_kernel.launch(row), block_hashes(row))
    if blocks:
        row = data[:1024].clone()
        row[5] ^= 1
        assert not torch.equal(checksum_kernel.launch(row), block_hashes(data[:1024]))
