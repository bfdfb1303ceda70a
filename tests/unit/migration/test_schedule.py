"""A schedule leads from one placement to another through valid ones, within its byte budget."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.migration.schedule import TransferSchedule, make_schedule
from eplb_runtime.placement import EMPTY, Placement

EXPERT_BYTES = 10


def random_placement(seed: int, layers: int, experts: int, ranks: int, replica_slots: int) -> Placement:
    """Any home placement: homes anywhere, some replica slots filled."""
    rng = np.random.default_rng(seed)
    homes = experts // ranks
    slots = homes + replica_slots
    map_ = np.full((layers, ranks, slots), EMPTY)
    home = np.empty((layers, experts), dtype=np.int64)
    for layer in range(layers):
        order = rng.permutation(experts).reshape(ranks, homes)
        map_[layer, :, :homes] = order
        for rank in range(ranks):
            home[layer, order[rank]] = rank * slots + np.arange(homes)
            others = np.setdiff1d(np.arange(experts), order[rank])
            filled = rng.integers(0, min(replica_slots, len(others)) + 1)
            map_[layer, rank, homes : homes + filled] = rng.choice(others, filled, replace=False)
    return Placement(map_.reshape(layers, -1), experts, ranks, home)


shapes = st.tuples(
    st.integers(1, 3),  # layers
    st.sampled_from([(4, 2), (8, 2), (8, 4), (12, 4), (6, 6), (5, 1)]),  # experts, ranks
    st.integers(0, 2),  # replica slots
)


def placed(seed: int, shape: tuple) -> Placement:
    layers, (experts, ranks), replica_slots = shape
    return random_placement(seed, layers, experts, ranks, replica_slots)


def replay(current: Placement, schedule: TransferSchedule) -> tuple[np.ndarray, Placement]:
    """Carry the rounds out on a simulated cluster: who stands in each home slot, and the placement after the last."""
    slots = np.where(home_slots(current), current.physical_to_logical, EMPTY).copy()
    standing = current
    for round_ in schedule.rounds:
        staged = [(t, slots[t.layer, t.source_slot]) for t in round_.transfers]
        for transfer, expert in staged:
            assert expert == transfer.expert, "a transfer reads a slot whose expert has gone already"
            slots[transfer.layer, transfer.destination_slot] = expert
        map_, home = standing.physical_to_logical.copy(), standing.home.copy()
        for layer, change in round_.after.items():
            map_[layer], home[layer] = change.physical_to_logical, change.home
        standing = Placement(map_, current.num_experts, current.num_ranks, home)  # raises if it is not valid
        assert (slots == np.where(home_slots(standing), map_, EMPTY)).all()
    return slots, standing


def home_slots(placement: Placement) -> np.ndarray:
    return np.arange(placement.num_slots) % placement.slots_per_rank < placement.homes_per_rank


@given(shapes, st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 80))
def test_the_rounds_lead_to_the_target_through_valid_placements(shape: tuple, a: int, b: int, budget: int) -> None:
    current, target = placed(a, shape), placed(b, shape)
    schedule = make_schedule(current, target, [EXPERT_BYTES] * current.num_layers, budget)
    _, standing = replay(current, schedule)
    assert standing.digest() == target.digest()


@given(shapes, st.integers(0, 10_000), st.integers(0, 10_000), st.integers(1, 80))
def test_a_round_keeps_the_budget_unless_one_cycle_needs_more(shape: tuple, a: int, b: int, budget: int) -> None:
    current, target = placed(a, shape), placed(b, shape)
    schedule = make_schedule(current, target, [EXPERT_BYTES] * current.num_layers, budget)
    for round_ in schedule.rounds:
        sent, received = np.zeros((2, current.num_ranks), dtype=int)
        for t in round_.transfers:
            source, destination = t.source_slot // current.slots_per_rank, t.destination_slot // current.slots_per_rank
            received[destination] += t.nbytes
            sent[source] += t.nbytes * (source != destination)
        if max(sent.max(), received.max()) > budget:
            assert is_one_cycle([(t.layer, t.source_slot, t.destination_slot) for t in round_.transfers])


def is_one_cycle(transfers: list[tuple[int, int, int]]) -> bool:
    following = {source: destination for _, source, destination in transfers}
    start = next(iter(following))
    slot, length = following[start], 1
    while slot != start:
        slot, length = following[slot], length + 1
    return length == len(transfers) and len({layer for layer, _, _ in transfers}) == 1


@given(shapes, st.integers(0, 10_000), st.integers(0, 10_000))
def test_with_room_each_moved_expert_travels_once(shape: tuple, a: int, b: int) -> None:
    current, target = placed(a, shape), placed(b, shape)
    schedule = make_schedule(current, target, [EXPERT_BYTES] * current.num_layers, 10**9)
    assert len(schedule.rounds) <= 1
    moved = {(t.layer, t.expert) for t in schedule.transfers}
    assert len(moved) == len(schedule.transfers)
    assert moved == set(map(tuple, np.argwhere(current.home != target.home).tolist()))


def test_the_digest_tells_schedules_apart() -> None:
    current, target = random_placement(1, 2, 8, 4, 1), random_placement(2, 2, 8, 4, 1)
    one = make_schedule(current, target, [10, 10], 1000)
    assert one.digest() == make_schedule(current, target, [10, 10], 1000).digest()
    assert one.digest() != make_schedule(current, target, [10, 11], 1000).digest()
    assert one.digest() != make_schedule(current, target, [10, 10], 10).digest()
    assert one.digest() != make_schedule(current, random_placement(3, 2, 8, 4, 1), [10, 10], 1000).digest()


def test_nothing_to_do_is_no_round() -> None:
    placement = random_placement(1, 2, 8, 4, 1)
    assert make_schedule(placement, placement, [10, 10], 100).rounds == ()
