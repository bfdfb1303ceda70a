"""The splitter: exact sums, near the linear program's optimum."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.planner.exact import lowest_peaks
from hypothesis import given, settings
from hypothesis import strategies as st
from support import water_filling_torch
from support.placements import some_homes

from eplb_runtime.moe.routing import slots as slots_module
from eplb_runtime.moe.routing import water_filling
from eplb_runtime.moe.routing.slots import BatchSplitter, SlotTable, record_use
from eplb_runtime.moe.routing.water_filling import SplitTables, split_for_rank
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.topology import Topology


def rank_loads(quota_EC: np.ndarray, slot_EC: np.ndarray, placement: Placement) -> np.ndarray:
    loads = np.zeros(placement.num_ranks, dtype=np.int64)
    there = slot_EC >= 0
    np.add.at(loads, slot_EC[there] // placement.slots_per_rank, quota_EC[there])
    return loads


def planned_for(load: np.ndarray, generator: np.random.Generator) -> tuple[Placement, np.ndarray]:
    """A placement on 32 ranks with 64 replica slots, and totals of batches that differ from what it was planned for."""
    placement = plan(load, Topology(32, 8), slots_per_rank=load.shape[1] // 32 + 2).placement
    batches = [generator.dirichlet(layer / layer.sum() * 4 * load.shape[1] + 1e-9) for layer in load]
    return placement, np.array([generator.multinomial(32 * 8192, batch) for batch in batches])


def every_row(counts_RE: np.ndarray, tables: SplitTables, **options: object) -> np.ndarray:
    """int64 ``[R, E, C]``: what each rank says by itself that it sends."""
    return np.stack([split_for_rank(counts_RE, tables, rank, **options)[0] for rank in range(tables.num_ranks)])  # type: ignore[arg-type]


shapes = st.tuples(st.integers(0, 2**32 - 1), st.integers(2, 8), st.integers(1, 5), st.integers(1, 3))
scales = st.sampled_from([0, 1, 7, 1000, 10**6, 10**12])


@settings(max_examples=30, deadline=None)
@given(shape=shapes, scale=scales)
def test_quotas_sum_exactly(shape, scale) -> None:
    seed, ranks, homes, replicas = shape
    generator = np.random.default_rng(seed)
    placement = some_homes(generator, 1, ranks, homes, replicas)
    tables = SplitTables.of(placement)
    counts = (generator.pareto(1.0, (ranks, ranks * homes)).clip(0, 1) * scale).astype(np.int64)
    per_node = next(n for n in (4, 3, 2, 1) if ranks % n == 0)
    sent = every_row(counts, tables, ranks_per_node=per_node)
    assert np.array_equal(sent.sum(axis=2), counts)
    assert (sent >= 0).all() and (sent[:, tables.copy_slot_LEC[0] < 0] == 0).all()
    assert np.array_equal(sent.sum(axis=0), water_filling.split_totals(counts.sum(0)[None], tables)[0])


@settings(max_examples=15, deadline=None)
@given(shape=shapes, scale=scales)
def test_what_a_rank_receives_is_what_the_others_say_that_they_send(shape, scale) -> None:
    seed, ranks, homes, replicas = shape
    generator = np.random.default_rng(seed)
    placement = some_homes(generator, 1, ranks, homes, replicas)
    tables = SplitTables.of(placement)
    counts = (generator.random((ranks, ranks * homes)) * scale).astype(np.int64)
    sent = every_row(counts, tables, ranks_per_node=1)
    sent_RP = np.zeros((ranks, placement.num_slots), dtype=np.int64)
    expert, copy = np.nonzero(tables.copy_slot_LEC[0] >= 0)
    sent_RP[:, tables.copy_slot_LEC[0, expert, copy]] = sent[:, expert, copy]
    assert sent_RP.sum() == counts.sum()
    for rank in range(ranks):
        _, told = split_for_rank(counts, tables, rank, 1)
        assert np.array_equal(told.received_RS, sent_RP.reshape(ranks, ranks, -1)[:, rank])
        assert np.array_equal(told.sent_P, sent_RP[rank])


@settings(max_examples=40, deadline=None)
@given(shape=shapes, scale=scales)
def test_the_busiest_rank_never_has_more_than_under_an_even_split(shape, scale) -> None:
    seed, ranks, homes, replicas = shape
    generator = np.random.default_rng(seed)
    placement = some_homes(generator, 1, ranks, homes, replicas)
    tables = SplitTables.of(placement)
    totals = (generator.random((1, ranks * homes)) * scale).astype(np.int64)
    slots = tables.copy_slot_LEC[0]
    filled = rank_loads(water_filling.split_totals(totals, tables)[0], slots, placement)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(water_filling, "SWEEPS", 0)
        even = rank_loads(water_filling.split_totals(totals, tables)[0], slots, placement)
    assert filled.max() <= even.max()
    assert filled.sum() == even.sum() == totals.sum()


@pytest.mark.parametrize("seed", range(3))
def test_every_layer_comes_within_half_a_percent_of_the_linear_program(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(seed)
    spread = generator.uniform(0.4, 1.4, (40, 1))
    placement, totals = planned_for(np.exp(spread * generator.standard_normal((40, 256))), generator)
    tables = SplitTables.of(placement)
    best_L = lowest_peaks(totals, tables)

    def above() -> float:
        """Of the layer that is farthest above the optimum, but for two tokens of rounding."""
        quotas = zip(water_filling.split_totals(totals, tables), tables.copy_slot_LEC, strict=True)
        loads_L = np.array([rank_loads(*one, placement).max() for one in quotas])
        return float(((loads_L - 2) / best_L - 1).max())

    assert above() <= 0.005
    monkeypatch.setattr(water_filling, "SWEEPS", 4)
    assert above() > 0.005, "or the loads would say nothing"


def test_tokens_go_to_their_own_rank_first_then_to_their_own_node() -> None:
    placement = Placement([[0, 1, 1, 0, 2, -1, 3, 0]], 4, 4, [[0, 2, 4, 6]])
    tables = SplitTables.of(placement)
    counts = np.array([[0, 0, 0, 0], [30, 0, 0, 0], [30, 0, 0, 0], [30, 0, 0, 0]])
    sent = every_row(counts, tables, ranks_per_node=2)
    assert sent[:, 0].tolist() == [[0, 0, 0], [0, 30, 0], [30, 0, 0], [0, 0, 30]]


def test_a_slow_rank_gets_tokens_by_its_speed() -> None:
    ring = Placement([[0, 1, 1, 2, 2, 3, 3, 0]], 4, 4, [[0, 2, 4, 6]])
    tables, counts = SplitTables.of(ring), np.full((4, 4), 250)
    for speed in ([1.0, 1.0, 0.5, 1.0], [1.0, 0.25, 1.0, 0.25]):
        sent = every_row(counts, tables, ranks_per_node=4, speed_R=np.array(speed))
        loads = rank_loads(sent.sum(axis=0), tables.copy_slot_LEC[0], ring)
        assert np.abs(loads / speed - 4000 / np.sum(speed)).max() <= 8, "equally long, to a few tokens"
        assert np.array_equal(sent.sum(axis=2), counts)


@pytest.mark.parametrize("seed", range(12))
def test_where_slow_ranks_cannot_be_filled_the_others_take_no_longer_than_they_must(seed: int) -> None:
    generator = np.random.default_rng(seed)
    ranks, homes = [(4, 1), (6, 1), (4, 4), (16, 4)][seed % 4]
    placement = some_homes(generator, 1, ranks, homes, 1 + seed % 3)
    totals_E = (generator.pareto(1.0, ranks * homes) * 10**6).astype(np.int64)
    speed_R = generator.choice([1.0, 0.8, 0.5, 0.2], ranks)
    speed_R[0] = 1.0
    tables = SplitTables.of(placement)
    quota_EC = water_filling.split_totals(totals_E[None], tables, speed_R=speed_R)[0]
    assert (quota_EC.sum(axis=1) == totals_E).all()
    slowest = (rank_loads(quota_EC, tables.copy_slot_LEC[0], placement) / speed_R).max()
    assert slowest <= 1.005 * lowest_peaks(totals_E[None], tables, speed_R)[0]


def test_choices_fill_the_copies_in_order_of_tokens() -> None:
    expert = torch.tensor([[0, 1], [0, -1], [1, 0], [0, 1]])
    slots = torch.tensor([[5, 7], [2, -1]])
    sent = torch.tensor([[3, 1], [3, 0]])
    assert water_filling_torch.assign_slots(expert, sent, slots).tolist() == [[5, 2], [5, -1], [2, 5], [7, 2]]


# -- One batch's route: what a rank sends fits what the others expect, whatever the placement


HOME = Placement([[0, 1, 2, -1, 2, 3, 1, 0]], 4, 2, [[0, 1, 4, 5]])


def test_every_choice_goes_to_a_slot_of_its_expert_that_expects_it() -> None:
    splitters = [splitter(HOME, rank) for rank in range(2)]
    chosen = [torch.from_numpy(np.random.default_rng(rank).integers(0, 4, (50, 2))) for rank in range(2)]
    counts_RE = np.stack([one.counts(ids)[0].numpy() for one, ids in zip(splitters, chosen, strict=True)])
    routes = [one.route(0, ids, counts_RE) for one, ids in zip(splitters, chosen, strict=True)]
    in_slot = torch.from_numpy(np.array(HOME.physical_to_logical[0]))
    for rank, (ids, (slots, counts)) in enumerate(zip(chosen, routes, strict=True)):
        assert torch.equal(in_slot[slots], ids.to(in_slot.dtype))
        assert np.array_equal(np.bincount(slots.reshape(-1), minlength=HOME.num_slots), counts.sent_P)
        expected = np.stack([other.sent_P.reshape(2, -1)[rank] for _, other in routes])
        assert np.array_equal(counts.received_RS, expected)


def splitter(placement: Placement, rank: int = 0) -> BatchSplitter:
    return BatchSplitter(placement, torch.device("cpu"), rank, ranks_per_node=1)


PLACEMENTS = (
    Placement([[0, 1, 2, -1, 2, 3, 1, 0]] * 3, 4, 2, [[0, 1, 4, 5]] * 3),
    Placement(
        [[0, 1, 2, -1, 2, 3, 1, 0], [3, 1, 2, 0, 2, 0, 1, 3], [0, 1, 2, 3, 2, 3, 1, 0]],
        4,
        2,
        [[0, 1, 4, 5], [5, 1, 4, 0], [0, 1, 4, 5]],
    ),
    Placement(
        [[0, 1, -1, -1, 2, 3, -1, -1], [3, 1, 2, 0, 2, 0, 1, 3], [0, 2, 1, 3, 1, 3, -1, 0]],
        4,
        2,
        [[0, 1, 4, 5], [5, 1, 4, 0], [0, 4, 1, 5]],
    ),
)


def test_following_placements_gives_what_a_new_splitter_gives() -> None:
    following = splitter(PLACEMENTS[0])
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 4, (50, 2)))
    counts_RE = np.stack([following.counts(ids)[0].numpy(), np.array([7, 30, 1, 62])])
    for placement in (*PLACEMENTS, PLACEMENTS[0]):
        following.prepare(placement, range(placement.num_layers))()
        fresh = splitter(placement)
        for layer in range(3):
            assert following.splits(layer) == fresh.splits(layer) == (placement.copy_count[layer].max() > 1)
            slots, counts = following.route(layer, ids, counts_RE)
            expected_slots, expected = fresh.route(layer, ids, counts_RE)
            assert torch.equal(slots, expected_slots)
            assert np.array_equal(counts.sent_P, expected.sent_P)
            assert np.array_equal(counts.received_RS, expected.received_RS)


# -- Tables that a worker's stream has made are read on the stream that trains, and are not freed under it


def test_memory_on_a_device_is_held_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"training on {device}")
    for kind in ("cuda", "cpu"):
        record_use(SimpleNamespace(device=torch.device(kind), record_stream=held.append))  # type: ignore[arg-type]
    assert held == ["training on cuda"]


@pytest.mark.parametrize("kind", ["table", "splitter"])
def test_a_table_is_held_when_it_is_taken_over_and_not_before(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    used: list[torch.Tensor] = []
    monkeypatch.setattr(slots_module, "record_use", lambda *tensors: used.extend(tensors))
    placement = Placement.initial(1, 4, 2) if kind == "table" else HOME
    maps: Any = SlotTable(placement, torch.device("cpu")) if kind == "table" else splitter(placement)
    used.clear()
    take_over = maps.prepare(placement, [0])
    assert not used
    take_over()
    assert len(used) == (2 if kind == "table" else 1), "the map and its index; the slots"
