"""Plans of few moves beside the best there are, by mixed-integer programs (HiGHS)."""

from __future__ import annotations

import sys
from itertools import product

import numpy as np
import pytest
from benchmarks.planner.windows import judge

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.policies.incremental import Trajectory
from eplb_runtime.planner.search.budget import share_out
from eplb_runtime.topology import Topology

pytest.importorskip("scipy")

SHAPES = ((4, 3, 1), (4, 3, 2), (4, 2, 1), (3, 4, 1), (3, 3, 1), (3, 4, 2), (4, 2, 2), (3, 3, 2))
"""Ranks, homes a rank, replica slots a rank."""
INSTANCES = 25
WORTH_MOVING = 0.005
"""Imbalance that must be to gain: for less no layer moves."""


def somewhere(generator: np.random.Generator, ranks: int, homes: int, slots: int) -> Placement:
    """Homes and replicas anywhere, a third of the replica slots empty."""
    experts = ranks * homes
    slot_RS = np.full((ranks, homes + slots), EMPTY)
    slot_RS[:, :homes] = generator.permutation(experts).reshape(ranks, homes)
    for rank in range(ranks):
        foreign = generator.permutation(np.setdiff1d(np.arange(experts), slot_RS[rank]))[:slots]
        slot_RS[rank, homes:] = np.where(generator.random(slots) < 0.67, foreign, EMPTY)
    home_E = np.empty(experts, dtype=int)
    for rank in range(ranks):
        home_E[slot_RS[rank, :homes]] = rank * (homes + slots) + np.arange(homes)
    return Placement(slot_RS.reshape(1, -1), experts, ranks, home_E[None])


def least_imbalance(load_E: np.ndarray, current: Placement, most_moves: int) -> float:
    """The imbalance of the best home layout within so many moves of ``current``, by a mixed-integer program.

    Variables: home and replica (0 or 1) and tokens of each expert on each rank, and the busiest rank.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    ranks, experts = current.num_ranks, len(load_E)
    share_E = load_E / load_E.sum() * ranks
    pairs = experts * ranks
    home_ER, replica_ER, tokens_ER = np.arange(3 * pairs).reshape(3, experts, ranks)
    peak = 3 * pairs
    held_ER = np.zeros((experts, ranks), dtype=bool)
    held_ER[np.arange(experts), current.home_rank[0]] = True
    at_home_ER = held_ER.copy()
    for rank, replica_K in enumerate(current.replicas_LRK[0]):
        held_ER[replica_K[replica_K != EMPTY], rank] = True
    rows, low, high = [], [], []

    def demand(least: float, most: float, *terms: tuple[np.ndarray, float]) -> None:
        row = np.zeros(peak + 1)
        for variables, factor in terms:
            row[variables] += factor
        rows.append(row)
        low.append(least)
        high.append(most)

    for expert in range(experts):
        demand(1, 1, (home_ER[expert], 1))
        demand(share_E[expert], share_E[expert], (tokens_ER[expert], 1))
        for rank in range(ranks):
            here = (home_ER[expert, rank], replica_ER[expert, rank])
            demand(0, 1, *((variable, 1) for variable in here))
            demand(
                -np.inf,
                0,
                (tokens_ER[expert, rank], 1),
                *((variable, -share_E[expert]) for variable in here),
            )
    for rank in range(ranks):
        demand(experts // ranks, experts // ranks, (home_ER[:, rank], 1))
        demand(0, current.replica_slots, (replica_ER[:, rank], 1))
        demand(-np.inf, 0, (tokens_ER[:, rank], 1), (np.array([peak]), -1))
    demand(0, most_moves, (home_ER[~at_home_ER], 1), (replica_ER[~held_ER], 1))
    solved = milp(
        np.eye(peak + 1)[peak],
        constraints=LinearConstraint(np.array(rows), low, high),
        integrality=np.r_[np.ones(2 * pairs), np.zeros(pairs + 1)],
        bounds=Bounds(0, np.r_[np.ones(2 * pairs), np.full(pairs + 1, np.inf)]),
    )
    return float(solved.fun)


def instances(most_moves: int) -> list[tuple[np.ndarray, Placement, float, float]]:
    """Load, current placement, its imbalance and the least within the budget."""
    found = []
    for index in range(INSTANCES):
        generator = np.random.default_rng([2, most_moves, index])
        ranks, homes, slots = SHAPES[index % len(SHAPES)]
        load = np.floor(generator.lognormal(0, 1, (1, ranks * homes)) * 1000)
        current = somewhere(generator, ranks, homes, slots)
        before, least = judge(current, load[None])[0].item(), least_imbalance(load[0], current, most_moves)
        if before - least > WORTH_MOVING:
            found.append((load, current, before, least))
    return found


def share_left(load: np.ndarray, current: Placement, before: float, least: float, most_moves: int) -> float:
    """Share of the possible gain that the planner leaves."""
    made = plan(
        load,
        Topology(current.num_ranks),
        slots_per_rank=current.slots_per_rank,
        current=current,
        max_moves=most_moves,
    )
    assert made.moved_slots <= most_moves
    return float((judge(made.placement, load[None])[0].item() - least) / (before - least))


@pytest.mark.parametrize(("most_moves", "prefix_leaves"), [(1, 0.05), (2, 0.02), (4, 0.005)])
def test_few_moves_gain_nearly_all_that_so_few_can(
    monkeypatch: pytest.MonkeyPatch, most_moves: int, prefix_leaves: float
) -> None:
    asked = instances(most_moves)
    assert len(asked) >= 15
    left = np.mean([share_left(*one, most_moves) for one in asked])
    monkeypatch.setattr(sys.modules[Trajectory.__module__], "MOST_MOVES", 0)
    prefix = np.mean([share_left(*one, most_moves) for one in asked])
    assert left <= 0.05
    assert prefix > max(left, prefix_leaves), "control: a prefix of the long search"


def test_few_moves_are_shared_out_over_layers_at_best() -> None:
    generator = np.random.default_rng(0)
    for most_moves in (1, 2, 3, 5, 8):
        moves = [np.append(0, np.sort(generator.choice(np.arange(1, 9), 4, replace=False))) for _ in range(3)]
        value = [2.0 - np.sort(generator.random(5)) for _ in range(3)]
        taken = share_out(value, [of_layer[:, None] for of_layer in moves], (most_moves,))

        def spent(steps: tuple[int, ...], moves: list[np.ndarray] = moves) -> int:
            return sum(int(of_layer[step]) for of_layer, step in zip(moves, steps, strict=True))

        def gained(steps: tuple[int, ...], value: list[np.ndarray] = value) -> float:
            return sum(float(of_layer[0] - of_layer[step]) for of_layer, step in zip(value, steps, strict=True))

        best = max(gained(steps) for steps in product(range(5), repeat=3) if spent(steps) <= most_moves)
        assert spent(tuple(taken)) <= most_moves
        assert gained(tuple(taken)) == pytest.approx(best)


def test_a_swap_in_one_layer_goes_before_a_replica_that_gains_more_a_move_in_another() -> None:
    value, moves = [np.array([1.5, 1.3, 1.25]), np.array([1.5, 1.12])], [np.array([0, 1, 2]), np.array([0, 2])]
    assert share_out(value, [of_layer[:, None] for of_layer in moves], (2,)).tolist() == [0, 1]
    by_rate = share_out(value, [of_layer[:, None] for of_layer in moves], (100,))
    assert by_rate.tolist() == [2, 1], "control: where there is enough for all"
