"""Kernels on the device give what their references give on the CPU, wait for nothing, and go on in a CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import DEVICE, no_host_sync

from eplb_runtime import checksum_kernel
from eplb_runtime.checksum import block_hashes
from eplb_runtime.dispatch import padded
from eplb_runtime.kernels_in_use import Kernels, kernels_for
from eplb_runtime.placement import Placement
from eplb_runtime.routing import kernels, water_filling, water_filling_kernel
from eplb_runtime.routing.tables import SplitTables
from eplb_runtime.routing.water_filling_torch import assign_slots

pytest.importorskip("triton", reason="no triton: pip install triton")
pytestmark = pytest.mark.gpu
EXPERTS, TOKENS, TOP_K = 256, 4096, 8


def choices(seed: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(TOKENS, TOP_K, generator=generator) ** 2 * EXPERTS).long()
    return torch.where(torch.rand(TOKENS, TOP_K, generator=generator) < 0.01, -1, ids).to(dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_a_graph_counts_and_looks_up_what_is_put_into_its_memory(dtype: torch.dtype) -> None:
    table = torch.randperm(EXPERTS)
    real = torch.arange(TOKENS) % 5 > 0
    ids, on_device = choices(0, dtype).to(DEVICE), [part.to(DEVICE) for part in (table, real)]
    counts, slots = torch.zeros(EXPERTS, dtype=torch.int64, device=DEVICE), torch.empty_like(ids, dtype=torch.int64)

    def work() -> None:
        counts.zero_()
        kernels.count_and_look_up(ids, on_device[0], counts, slots, on_device[1])

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for seed in (1, 2):
        ids.copy_(choices(seed, dtype))
        with no_host_sync():
            graph.replay()
        expected = torch.zeros(EXPERTS, dtype=torch.int64), torch.empty(TOKENS, TOP_K, dtype=torch.int64)
        kernels.torch_count_and_look_up(choices(seed, dtype), table, *expected, real)
        assert torch.equal(counts.cpu(), expected[0]) and torch.equal(slots.cpu(), expected[1])


def test_attach_takes_kernels_that_give_the_same_as_torch_here() -> None:
    taken = kernels_for(DEVICE, EXPERTS)
    assert taken == Kernels(kernels.deal_by_kernels, checksum_kernel.launch)


def test_choices_are_dealt_out_in_their_order() -> None:
    dealer = kernels.Dealer(EXPERTS, TOKENS * TOP_K, DEVICE)
    copy_slots = torch.randperm(3 * EXPERTS).view(EXPERTS, 3)
    for seed in range(3):
        ids = choices(seed)
        counts, slots = torch.empty(EXPERTS, dtype=torch.int64, device=DEVICE), torch.empty_like(ids, device=DEVICE)
        dealer.count(ids.to(DEVICE), counts)
        expected = torch.bincount(ids[ids >= 0], minlength=EXPERTS)
        assert torch.equal(counts.cpu(), expected)
        sent = torch.stack([expected // 2, expected // 3, expected - expected // 2 - expected // 3], dim=1)
        dealer.deal(ids.to(DEVICE), sent.to(DEVICE), copy_slots.to(DEVICE), slots)
        assert torch.equal(slots.cpu(), assign_slots(ids, sent, copy_slots))


@pytest.mark.parametrize("seed", range(8))
def test_a_split_has_the_integers_of_numba(seed: int) -> None:
    """64 ranks, 320 slots; a copy on each rank, of an expert of others."""
    generator = np.random.default_rng(seed)
    ranks, homes, layers = 64, 4, 4
    start = Placement.initial(layers, ranks * homes, ranks, 1)
    slots = start.physical_to_logical.reshape(layers, ranks, -1).copy()
    slots[:, :, homes] = (np.arange(ranks) * homes + generator.integers(homes, 24, (layers, ranks))) % (ranks * homes)
    placement = Placement(slots.reshape(layers, -1), ranks * homes, ranks, start.home)
    tables = SplitTables.of(placement)
    totals = (generator.exponential(size=(layers, ranks * homes)) ** 2 * 1e4).astype(np.int64)
    expected = water_filling.split_totals(totals, tables)
    found = torch.empty(expected.shape, dtype=torch.int64, device=DEVICE)
    on_device, counts = water_filling_kernel.KernelTables.of(tables, DEVICE), torch.from_numpy(totals).to(DEVICE)
    water_filling_kernel.launch_split_totals(counts, on_device, found)
    with no_host_sync():
        water_filling_kernel.launch_split_totals(counts, on_device, found)
    assert np.array_equal(found.cpu().numpy(), expected)


def test_rows_are_padded_and_come_back() -> None:
    counts = torch.tensor([300, 0, 17, 128, 1])
    offsets = counts.cumsum(0).int().to(DEVICE)
    ends = padded.padded_ends(offsets, 128)
    source = torch.randn(500, 1000, device=DEVICE, dtype=torch.bfloat16)
    index = torch.randperm(500)[: int(counts.sum())].to(DEVICE)
    found, expected = torch.empty(2, padded.most_rows(len(index), 5, 128), 1000, dtype=source.dtype, device=DEVICE)
    with no_host_sync():
        padded.pad(source, index, offsets, ends, found)
    padded.torch_pad(source, index, offsets, ends, expected)
    assert torch.equal(found, expected)
    back = torch.empty(len(index), 1000, dtype=source.dtype, device=DEVICE)
    padded.unpad(found, offsets, ends, back)
    assert torch.equal(back, source[index])


def test_blocks_have_the_hashes_of_checksums() -> None:
    data = torch.randint(0, 256, (1024 * 1001,), dtype=torch.uint8)
    assert torch.equal(checksum_kernel.fast_block_hashes(data.to(DEVICE)).cpu(), block_hashes(data))
