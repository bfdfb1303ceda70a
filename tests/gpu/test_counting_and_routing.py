"""What every batch does on the device: right, without a host sync, and in memory that CUDA graphs can hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import DEVICE, no_host_sync

from eplb_runtime import Placement
from eplb_runtime.load.counter import HostCopy, LoadCounter
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings

pytestmark = pytest.mark.gpu
LAYERS, EXPERTS, RANKS, TOKENS, TOP_K = 3, 16, 4, 512, 4


def choices(seed: int, tokens: int = TOKENS) -> torch.Tensor:
    """Logical ids ``[T, K]`` on the CPU, the first experts more often."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.arange(EXPERTS, 0, -1, dtype=torch.float64).expand(tokens, -1)
    return torch.multinomial(weight, TOP_K, generator=generator)


def counter() -> LoadCounter:
    return LoadCounter(LAYERS, EXPERTS, 8, DEVICE)


def captured(work: object) -> torch.cuda.CUDAGraph:
    """A graph of ``work``, which has run once before on a side stream, as capture wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()  # type: ignore[operator]
    return graph


def test_counting_and_closing_a_step_never_wait_for_the_device() -> None:
    counting = counter()
    ids, real = choices(0).to(DEVICE), torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)
    counting.count(0, ids, real)
    with no_host_sync():
        for _ in range(3):
            for layer in range(LAYERS):
                counting.count(layer, ids)
                counting.count(layer, ids, real)
            counting.advance()
        HostCopy(counting.take())


def test_a_captured_graph_goes_on_counting() -> None:
    counting = counter()
    ids, real = choices(0).to(DEVICE), torch.ones(TOKENS, dtype=torch.bool, device=DEVICE)

    def work() -> None:
        counting.count(0, ids)
        counting.count(1, ids, real)

    graph = captured(work)
    counting.advance()
    counting.take()
    expected = torch.zeros(EXPERTS, dtype=torch.int64)
    for seed in range(1, 4):
        ids.copy_(choices(seed))
        graph.replay()
        expected += torch.bincount(choices(seed).reshape(-1), minlength=EXPERTS)
    counts = counting.counts.cpu()
    assert torch.equal(counts[0], expected)
    assert torch.equal(counts[1], expected)
    assert not counts[2].any()


def rotated(placement: Placement, by: int) -> Placement:
    """Every expert ``by`` slots further."""
    map_ = np.roll(placement.physical_to_logical, by, axis=1)
    return Placement(map_, EXPERTS, RANKS, map_.argsort(axis=1), placement.epoch + 1)


def test_a_captured_graph_follows_a_committed_placement() -> None:
    first = Placement.initial(LAYERS, EXPERTS, RANKS)
    table = SlotTable(first, DEVICE)
    ids = choices(0).to(DEVICE)
    slots = torch.empty_like(ids)
    graph = captured(lambda: slots.copy_(table.slots(1, ids)))
    for placement in (first, rotated(first, 3), rotated(first, 7)):
        table.update(placement)
        graph.replay()
        assert placement.home is not None
        assert torch.equal(slots.cpu(), torch.from_numpy(placement.home[1].astype("int64"))[choices(0)])


def with_copies() -> Placement:
    """Two replica slots a rank: the busy experts are copied to the ranks after their own."""
    map_ = Placement.initial(LAYERS, EXPERTS, RANKS, 2).physical_to_logical.copy().reshape(LAYERS, RANKS, -1)
    for rank in range(RANKS):
        others = [expert for expert in range(EXPERTS) if expert // (EXPERTS // RANKS) != rank]
        map_[0, rank, -2:] = others[:2]
        map_[1, rank, -1] = others[0]
    home = Placement.initial(LAYERS, EXPERTS, RANKS, 2).home
    return Placement(map_.reshape(LAYERS, -1), EXPERTS, RANKS, home)


def splitter(device: torch.device, rank: int) -> BatchSplitter:
    return BatchSplitter(with_copies(), device, rank, SplitSettings(ranks_per_node=2, least_tokens=64))


def test_splitting_a_batch_never_waits_for_the_device() -> None:
    on_device = splitter(DEVICE, 1)
    ids = choices(1).to(DEVICE)
    counts_RE = np.stack([on_device.counts(choices(rank).to(DEVICE))[0].cpu().numpy() for rank in range(RANKS)])
    with no_host_sync():
        on_device.counts(ids)
        on_device.route(0, ids, counts_RE)
