"""What every batch does on the device: kernels give what CPU references give, wait for nothing, fit CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import DEVICE, no_host_sync
from support.water_filling_torch import assign_slots

from eplb_runtime.load.counter import HostCopy, LoadCounter
from eplb_runtime.moe import kernel_selection, kernels
from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.dispatch.permute import RowMemory
from eplb_runtime.moe.routing.slots import BatchSplitter
from eplb_runtime.placement import Placement

pytest.importorskip("triton", reason="no triton: pip install triton")
pytestmark = pytest.mark.gpu
CPU = torch.device("cpu")
EXPERTS, TOKENS, TOP_K = 256, 4096, 8
RANKS, SLOTS = 32, 9


def choices(seed: int, dtype: torch.dtype = torch.int64, of: int = EXPERTS) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(TOKENS, TOP_K, generator=generator) ** 2 * of).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_graph_counts_and_looks_up_what_is_put_into_its_memory(dtype: torch.dtype) -> None:
    table = torch.randperm(EXPERTS)
    real = torch.arange(TOKENS) % 5 > 0
    ids, on_device = choices(0, dtype).to(DEVICE), [part.to(DEVICE) for part in (table, real)]
    counts, slots = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE), torch.empty_like(ids, dtype=torch.int64)

    def work() -> None:
        slots.copy_(kernels.count_and_map(ids, on_device[0], counts, on_device[1]))

    work()
    counts.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in (1, 2):
        ids.copy_(choices(seed, dtype))
        table = table.flip(0)  # a migration changes it in place
        on_device[0].copy_(table)
        with no_host_sync():
            graph.replay()
        slots_now = kernel_selection.count_and_map(choices(seed, dtype), table, expected, real)
        assert torch.equal(counts.cpu(), expected) and torch.equal(slots.cpu(), slots_now)


def test_choices_are_dealt_out_in_their_order() -> None:
    copy_slots = torch.randperm(3 * EXPERTS).view(EXPERTS, 3)
    for seed in range(3):
        ids = choices(seed)
        expected = torch.bincount(ids.flatten(), minlength=EXPERTS)
        sent = torch.stack([expected // 2, expected // 3, expected - expected // 2 - expected // 3], dim=1)
        slots = kernels.deal_by_kernels(ids.to(DEVICE), sent.to(DEVICE), copy_slots.to(DEVICE))
        assert torch.equal(slots.cpu(), assign_slots(ids, sent, copy_slots))


@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("me", [0, 5])
def test_what_leaves_and_what_arrives(me: int, dedup: bool) -> None:
    slots_TK = choices(me, of=RANKS * SLOTS)
    on_device = slots_TK.to(DEVICE)
    kernels.leaving(on_device, me, RANKS, SLOTS, dedup=dedup, tag=2**41 + 7)
    with no_host_sync():
        found = kernels.leaving(on_device, me, RANKS, SLOTS, dedup=dedup, tag=2**41 + 7)
    expected = permute.leaving(slots_TK, me, RANKS, SLOTS, dedup=dedup, tag=2**41 + 7)
    sent = int(expected.counts_2RW[0, :, SLOTS].sum()) if dedup else slots_TK.numel()
    assert torch.equal(found.counts_2RW[0].cpu(), expected.counts_2RW[0])
    assert torch.equal(found.token_N[:sent].cpu(), expected.token_N[:sent])
    for name in ("choice_N", "place_TK", *["source_row_N1"] * dedup):
        assert torch.equal(getattr(found, name).cpu(), getattr(expected, name))
    counts_RW = expected.counts_2RW[0].numpy()
    rows = int(counts_RW[:, :SLOTS].sum())
    source_row_M1 = torch.randint(1000, (rows, 1)) if dedup else None
    of_device = None if source_row_M1 is None else source_row_M1.to(DEVICE)
    arrived = kernels.arriving(counts_RW, me, SLOTS, DEVICE, of_device, found.counts_2RW[0])
    for one, other in zip(arrived, permute.arriving(counts_RW, me, SLOTS, CPU, source_row_M1), strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_a_tokens_choices_have_the_bits_of_torch(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    rows = torch.randn(TOKENS * TOP_K, 1100, device=DEVICE).to(dtype)
    place = torch.randperm(TOKENS * TOP_K, device=DEVICE).view(TOKENS, TOP_K)
    weights = None if weight_dtype is None else torch.rand(TOKENS, TOP_K, device=DEVICE).to(weight_dtype)
    found = kernels.sum_choices(rows, place, RowMemory(), weights)
    expected = permute.sum_choices(rows, place, RowMemory(), weights)
    assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_the_first_batch_of_each_kernel_is_that_of_torch_here(caplog: pytest.LogCaptureFixture) -> None:
    chosen = kernel_selection.kernels_for(DEVICE)
    ids = choices(0).to(DEVICE)
    counts = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE)
    assert chosen.count_and_map is not None
    for _ in range(2):
        chosen.count(ids, EXPERTS)
        chosen.count_and_map(ids, torch.arange(EXPERTS, device=DEVICE), counts, None)
        chosen.leaving(ids, 0, 32, 8, dedup=True, tag=1)
    assert not caplog.records and counts.sum() == 2 * ids.numel()


def test_counting_and_closing_a_step_never_wait_for_the_device() -> None:
    counting = LoadCounter(2, EXPERTS, 8, DEVICE)
    ids, real = choices(0).to(DEVICE), torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)
    counting.count(0, ids, real)
    with no_host_sync():
        for _ in range(3):
            counting.count(0, ids)
            counting.count(1, ids, real)
            counting.advance()
        HostCopy(counting.take())


def test_splitting_a_batch_never_waits_for_the_device() -> None:
    """Replicas of the first expert of the next rank."""
    placement = Placement.initial(1, 16, 4, 1)
    map_ = placement.physical_to_logical.copy().reshape(1, 4, -1)
    map_[0, :, -1] = [4, 8, 12, 0]
    splitter = BatchSplitter(Placement(map_.reshape(1, -1), 16, 4, placement.home), DEVICE, 1, 2)
    ids = choices(1, of=16).to(DEVICE)
    counts_RE = np.stack([splitter.counts(choices(rank, of=16).to(DEVICE))[0].cpu().numpy() for rank in range(4)])
    with no_host_sync():
        splitter.counts(ids)
        splitter.route(0, ids, counts_RE)
