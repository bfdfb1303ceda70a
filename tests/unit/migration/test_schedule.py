"""A schedule leads from one placement to another through valid ones, within its byte budget."""

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.placements import some_homes

from eplb_runtime.distributed.consensus import Ballot, Verdict
from eplb_runtime.migration.engine import MigrationProgress, PreparedMigration
from eplb_runtime.migration.exchange import DIRECT_BYTES, Records, RoundExecutor, chains_of, packed_bytes, segments_of
from eplb_runtime.migration.overlapped import LATE, InFlightRound, Overlapped, next_rounds
from eplb_runtime.migration.schedule import Round, TransferSchedule, cut_into_permutations, make_schedule
from eplb_runtime.moe.experts.registry import ExpertTensor, Record, RecordFormat
from eplb_runtime.placement import EMPTY, Placement

shapes = st.tuples(
    st.integers(1, 3),  # layers
    st.sampled_from([(4, 2), (8, 2), (8, 4), (12, 4), (6, 6), (5, 1), (24, 3)]),  # experts, ranks
    st.integers(0, 2),  # replica slots
)
seeds = st.integers(0, 10_000)
sizes = st.lists(st.integers(1, 12), min_size=3, max_size=3)


def placed(seed: int, shape: tuple) -> Placement:
    layers, (experts, ranks), replica_slots = shape
    return some_homes(np.random.default_rng(seed), layers, ranks, experts // ranks, replica_slots)


def replay(schedule: TransferSchedule) -> Placement:
    """Carry the rounds out on a simulated cluster; who stands in the home slots must be who the placement says."""
    standing = schedule.current
    homes = np.arange(standing.num_slots) % standing.slots_per_rank < standing.homes_per_rank
    slots = np.where(homes, standing.physical_to_logical, EMPTY)
    for round_ in schedule.rounds:
        layer, expert, source, destination = round_.transfers.T
        assert (slots[layer, source] == expert).all(), "a transfer reads a slot whose expert has gone already"
        slots[layer, destination] = expert
        before, standing = standing, schedule.after(standing, round_)
        checked = Placement(  # raises if it is not valid
            standing.physical_to_logical, standing.num_experts, standing.num_ranks, standing.home, standing.epoch
        )
        assert (slots == np.where(homes, checked.physical_to_logical, EMPTY)).all()
        differs = (before.physical_to_logical != standing.physical_to_logical).any(axis=1)
        assert set(np.flatnonzero(differs)) <= set(round_.layers)
        for finished in round_.finished:
            assert (standing.physical_to_logical[finished] == schedule.target.physical_to_logical[finished]).all()
    return standing


@given(shapes, seeds, seeds, st.integers(1, 80), sizes, st.sampled_from([1, 2, 3]))
def test_the_rounds_lead_to_the_target_through_valid_placements_within_the_budget(
    shape: tuple, a: int, b: int, budget: int, nbytes: list[int], parts: int
) -> None:
    """Also where the homes of a rank are divided over several."""
    current, target = placed(a, shape), placed(b, shape)
    parts = parts if current.homes_per_rank % parts == 0 else 1
    rows = current.home_rows(parts)
    schedule = make_schedule(current, target, nbytes[: current.num_layers], budget, parts=parts)
    standing = replay(schedule)
    assert standing.digest() == target.digest()
    assert standing.epoch == current.epoch + len(schedule.rounds), "an epoch names one placement"
    for round_, said in zip(schedule.rounds, schedule.load, strict=False):
        sent, received = np.zeros((2, current.num_ranks * parts), dtype=int)
        source, destination = rows.rank_of(round_.transfers[:, 2:]).T
        comes = source != destination
        of_transfer = np.array(nbytes)[round_.transfers[comes, 0]]
        np.add.at(sent, source[comes], of_transfer)
        np.add.at(received, destination[comes], of_transfer)
        assert received.max(initial=0) <= max(budget, *nbytes)
        assert (sent == received).all() and (received == said).all()
        assert round_.moved(rows) == comes.sum()


@given(shapes, seeds, seeds, st.integers(1, 80), sizes)
def test_rounds_of_single_layers_lead_there_in_any_order_of_the_layers(
    shape: tuple, a: int, b: int, budget: int, nbytes: list[int]
) -> None:
    current, target = placed(a, shape), placed(b, shape)
    schedule = make_schedule(current, target, nbytes[: current.num_layers], budget, by_layer=True)
    assert replay(schedule).digest() == target.digest()
    assert all(len(round_.layers) == 1 for round_ in schedule.rounds)
    assert schedule.load.shape[0] == len(schedule.rounds)
    standing = current
    for round_ in sorted(schedule.rounds, key=lambda r: (-r.layers[0], r.number)):
        standing = schedule.after(standing, round_)
    assert standing.digest() == target.digest()


@given(shapes, seeds, seeds, st.integers(1, 80))
def test_an_expert_travels_between_ranks_once_if_its_rank_changes_and_else_never(
    shape: tuple, a: int, b: int, budget: int
) -> None:
    current, target = placed(a, shape), placed(b, shape)
    transfers = make_schedule(current, target, [10] * current.num_layers, budget).transfers
    between = current.rank_of(transfers[:, 3]) != current.rank_of(transfers[:, 4])
    travelled = [tuple(row) for row in transfers[between, 1:3].tolist()]
    assert len(set(travelled)) == len(travelled)
    assert set(travelled) == set(map(tuple, np.argwhere(current.home_rank != target.home_rank).tolist()))


@given(shapes, seeds, seeds)
def test_with_room_all_is_one_round_and_nobody_changes_slots_in_vain(shape: tuple, a: int, b: int) -> None:
    current, target = placed(a, shape), placed(b, shape)
    schedule = make_schedule(current, target, [10] * current.num_layers, 10**9)
    assert len(schedule.rounds) <= 1
    moved = [tuple(row) for row in schedule.transfers[:, 1:3].tolist()]
    assert sorted(moved) == sorted(map(tuple, np.argwhere(current.home != target.home).tolist()))


@pytest.mark.parametrize(("experts", "ranks"), [(128, 8), (128, 64), (64, 64), (256, 64)])
def test_rounds_of_one_expert_a_rank_keep_the_busiest_rank_busy(experts: int, ranks: int) -> None:
    """All homes change places: the bytes of the rounds' busiest ranks are within 6 % of what one rank has to carry."""
    current, target = (placed(seed, (20, (experts, ranks), 0)) for seed in (1, 2))
    schedule = make_schedule(current, target, [600] * 20, 256)
    taken, least = schedule.load.max(axis=1).sum(), schedule.load.sum(axis=0).max()
    assert least == 600 * max(np.bincount(target.home_rank[current.home_rank != target.home_rank], minlength=ranks))
    assert least <= taken <= 1.06 * least
    assert len(schedule.rounds) == taken // 600


@given(seed=seeds, ranks=st.integers(2, 7), homes=st.integers(1, 6), layers=st.integers(1, 3))
def test_cycles_visit_a_rank_at_most_once(seed: int, ranks: int, homes: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    source = np.tile(np.repeat(np.arange(ranks), homes), layers)
    destination = np.concatenate([rng.permutation(ranks * homes) // homes for _ in range(layers)])
    layer = np.repeat(np.arange(layers), ranks * homes)
    moves = source != destination
    source, destination, layer = source[moves], destination[moves], layer[moves]
    cycles = cut_into_permutations(np.searchsorted(layer, np.arange(layers + 1)), source, destination, ranks)
    assert sorted(set(cycles.tolist())) == list(range(cycles.max(initial=-1) + 1))
    for cycle in range(cycles.max(initial=-1) + 1):
        own = cycles == cycle
        assert len(set(layer[own])) == 1
        assert len(set(source[own])) == own.sum(), "a rank sends twice"
        assert sorted(source[own]) == sorted(destination[own])
        following, rank, visited = dict(zip(source[own], destination[own], strict=True)), source[own][0], set()
        while rank not in visited:
            visited.add(rank)
            rank = following[rank]
        assert len(visited) == own.sum(), "two cycles under one number"


# -- Rounds that travel beside a step


def round_of(number: int, layer: int) -> Round:
    return Round(number, np.zeros((0, 4), dtype=np.int64), (layer,), (layer,))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.integers(0, 40))
def test_as_many_bytes_as_may_travel_from_the_last_layers_on(sizes: list[int], most: int) -> None:
    rounds = {layer: [round_of(layer, layer)] for layer in range(len(sizes))}
    taken, waited_for = next_rounds(rounds, sizes, {}, most)
    layers = [round_.layers[0] for round_ in taken]
    assert not waited_for and layers == sorted(layers) and layers[-1] == len(sizes) - 1
    assert len(taken) == 1 or sum(sizes[layer] for layer in layers) <= most
    left_out = [size for layer, size in enumerate(sizes) if layer not in layers]
    assert len(left_out) == 0 or min(left_out) > most - sum(sizes[layer] for layer in layers)


def test_a_layer_sends_one_round_after_another_and_what_was_late_by_itself_is_waited_for_if_no_other_is_left() -> None:
    rounds = {0: [round_of(0, 0), round_of(2, 0)], 1: [round_of(1, 1)]}
    taken, waited_for = next_rounds(rounds, [1] * 3, {0: 0, 1: 1}, 100)
    assert [round_.number for round_ in taken] == [0] and not waited_for
    taken, waited_for = next_rounds({1: rounds[1]}, [1] * 3, {1: 1}, 100)
    assert [round_.number for round_ in taken] == [1] and waited_for


def test_rounds_without_bytes_that_are_late_every_time_come_to_an_end() -> None:
    current, slots = Placement.initial(2, 4, 2), np.array([[1, 0, 2, 3]] * 2)
    schedule = make_schedule(current, Placement(slots, 4, 2, slots), [8, 8], 64, by_layer=True)
    engine = Mock(bytes_per_step=64, executor=Mock(transport=Mock(in_order=False)), in_flight_bytes=lambda _: 64)
    engine.progress, ready = (lambda placement, *_: MigrationProgress(placement)), Future[Any]()
    ready.set_result((PreparedMigration(schedule, Records({}, (8, 8), (0, 0)), current), Verdict(True)))
    config = Mock(timeout_seconds=1.0, migration=Mock(max_pause_seconds=0.5))
    driver = Overlapped(engine, Mock(worker=Mock(submit=lambda _: ready)), Mock(layers=[]), MagicMock(), config)
    driver.begin(current, schedule.target, "key")
    while driver.in_flight and driver._batches < 20:
        progress = driver.advance()
        for flight in driver._flights:
            flight.verdict = Verdict(False, "late", kind=LATE)
            assert flight.patience == 0.5
    assert "5 times" in progress.cause
    driver._flights, driver._open = [InFlightRound(schedule.rounds[0], Ballot(""), True, 0.0)], {}
    driver._flights[0].verdict = broken = Verdict(False, "late", True, LATE)
    assert driver._close_rounds().verdict == broken, "it is not only sent again"


def test_a_round_of_other_ranks_keeps_none_of_this_rank_from_leaving() -> None:
    flights = [InFlightRound(round_of(layer, layer), Ballot(""), layer > 0, 0.0) for layer in range(3)]
    Overlapped._post_ahead(Mock(), flights, Mock())
    assert all(flight.posted for flight in flights)


def test_copies_have_come_before_their_homes_are_written_and_are_made_anew_after() -> None:
    of = MagicMock()
    driver = Overlapped(of.engine, Mock(), MagicMock(), MagicMock(replicas=of.replicas), Mock())
    driver._commit(Mock(layer=3))
    calls = [f"{name}{args}" for name, args, _ in of.mock_calls if name.count(".") == 1 and "unfailing" not in name]
    assert calls[0] == "replicas.wait(3,)" and calls[-1] == "replicas.refresh([3],)" and "engine.commit" in calls[1]


# -- Moves within a rank overwrite nothing before it is read; messages of a record hold every byte of it once


CPU = torch.device("cpu")


@st.composite
def moves_within(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Slots of a rank, and moves between them that are part of a permutation: what is not moved on has left."""
    slots = draw(st.integers(1, 8))
    after = draw(st.permutations(range(slots)))
    moved = [(source, to) for source, to in enumerate(after) if source != to]
    stay_away = draw(st.sets(st.sampled_from([source for source, _ in moved]))) if moved else set()
    return slots, draw(st.permutations([move for move in moved if move[0] not in stay_away]))


@given(moves_within())
def test_chains_bring_every_slot_where_it_goes(example: tuple[int, list[tuple[int, int]]]) -> None:
    slots, moves = example
    rows, expected = list(range(slots)), list(range(slots))
    for source, to in moves:
        expected[to] = source
    chains = chains_of(moves)
    assert sorted(move for chain in chains for move in chain) == sorted(moves)
    for chain in chains:
        end = chain[0][1]
        ring = chain[-1][0] == end
        aside = rows[end]
        for source, to in chain:
            rows[to] = aside if ring and source == end else rows[source]
    written = {to for _, to in moves}
    assert [rows[slot] for slot in written] == [expected[slot] for slot in written]


def record_of(*tensors: ExpertTensor) -> Record:
    return RecordFormat(tensors).row(1)


LARGE = DIRECT_BYTES // 4


@pytest.mark.parametrize(
    ("widths", "direct"),
    [
        ((3, 5), [False]),
        ((LARGE, LARGE), [True, True]),
        ((3, LARGE, 5, 7, LARGE), [False, True, False, True]),
        ((LARGE, 1), [True, False]),
    ],
)
def test_large_rows_are_sent_from_their_place_and_small_ones_together(
    widths: tuple[int, ...], direct: list[bool]
) -> None:
    record = record_of(*(ExpertTensor(f"t{i}", torch.zeros(2, width), "buffer") for i, width in enumerate(widths)))
    runs = segments_of(record, CPU)
    assert [run.direct for run in runs] == direct
    covered = torch.zeros(record.nbytes, dtype=torch.int64)
    for run in runs:
        covered[run.first : run.end] += 1
    for shard in record.shards:
        assert (covered[shard.offset : shard.end] == 1).all()
    assert packed_bytes(runs) == sum(run.end - run.first for run in runs if not run.direct)
    assert [run.direct for run in segments_of(record, torch.device("meta"))] == [False], "rows of another device"


def test_memory_of_a_migration_is_reserved_without_a_look_at_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four experts change ranks in the first layer, and two rows of this rank change places in the second."""
    current = Placement.initial(2, 4, 2, 0)
    slots = np.array([[0, 2, 1, 3], [1, 0, 2, 3]], dtype=np.int32)
    schedule = make_schedule(current, Placement(slots, 4, 2, slots), (128, 128), 1 << 20)
    up, down = torch.zeros(2, 3), torch.zeros(2, 5, dtype=torch.float64)
    of_layer = RecordFormat((ExpertTensor("up", up, "parameter"), ExpertTensor("down", down, "parameter")))
    records = Records({0: of_layer, 1: of_layer}, (128, 128), (0, 0))
    host: Any = SimpleNamespace(device=torch.device("cpu"), empty=lambda size: torch.empty(size, dtype=torch.uint8))
    executor = RoundExecutor(host, current.home_rows(), 0, host.device, 0)
    monkeypatch.setattr(RecordFormat, "piece", Mock(side_effect=AssertionError("an expert by itself")))
    executor.reserve(schedule, records)
    assert [memory.numel() for memory in executor.memory] == [128, 128, 40]
