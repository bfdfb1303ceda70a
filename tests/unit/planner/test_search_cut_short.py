"""What the planner saves time by changes nothing: a search is cut short without searching again, slots are dealt out
for all ranks at once, layers that stay are not judged twice.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.planner.policies.incremental import Trajectory
from eplb_runtime.planner.search.align import align
from eplb_runtime.planner.search.explore import Starts, search_layer
from eplb_runtime.topology import Topology

incremental = sys.modules[Trajectory.__module__]
EXPERTS, RANKS = 64, 16


def loads(windows: int = 10, layers: int = 2, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    mean = random.lognormal(0.0, 0.8, size=(layers, EXPERTS))
    return np.asarray(1e5 * mean * random.lognormal(0.0, 0.4, size=(windows, layers, EXPERTS)))


def searches(monkeypatch: pytest.MonkeyPatch, replicas: int, **terms: Any) -> list[tuple[Any, ...]]:
    """What `search_layer` is asked by a plan, and what it finds."""
    asked: list[tuple[Any, ...]] = []
    search = incremental.search_layer

    def listened(*question: Any) -> Any:
        found = search(*question)
        asked.append((question, found))
        return found

    monkeypatch.setattr(incremental, "search_layer", listened)
    current, slots = Placement.initial(2, EXPERTS, RANKS, replicas), EXPERTS // RANKS + replicas
    plan(loads(), Topology(RANKS, 4), slots_per_rank=slots, current=current, **terms)
    return asked


CROSSING = CostModel(home_bytes=10**6, replica_bytes=10**6, step_seconds=4.0, crossing_seconds=2.0)


@pytest.mark.parametrize(("replicas", "terms"), [(1, {}), (2, {}), (0, {}), (1, {"cost": CROSSING})])
def test_a_search_cut_short_ends_where_one_with_fewer_steps_does(
    monkeypatch: pytest.MonkeyPatch, replicas: int, terms: dict[str, Any]
) -> None:
    cut = 0
    for (*question, limits, starts), found in searches(monkeypatch, replicas, **terms):
        assert (found.after(found.steps).home_E == found.home_E).all()
        assert (found.after(found.steps).replica_RK == found.replica_RK).all()
        begin = Starts(starts.home_XE[found.start, None].copy(), starts.replica_XRK[found.start, None].copy())
        if terms:
            continue  # steps that bring experts nearer come after the others, however few those were
        for steps in range(found.steps):
            fewer = search_layer(*question, limits._replace(max_steps=steps), begin)
            assert fewer.steps == steps
            assert (found.after(steps).home_E == fewer.home_E).all()
            assert (found.after(steps).replica_RK == fewer.replica_RK).all()
            cut += 1
    assert bool(terms) == (cut == 0)


rows = st.integers(1, 3).flatmap(
    lambda slots: st.lists(
        st.tuples(*[st.lists(st.integers(-1, 9), min_size=slots, max_size=slots)] * 2), min_size=1, max_size=6
    )
)


def once(row: list[int]) -> list[int]:
    """An expert stands once on a rank."""
    return [expert if expert not in row[:place] else EMPTY for place, expert in enumerate(row)]


@settings(deadline=None)
@given(rows)
def test_replicas_that_stay_keep_their_slots_and_others_fill_up_in_order(drawn: list[tuple[list[int], ...]]) -> None:
    old, wanted = ([once(of_rank[which]) for of_rank in drawn] for which in (0, 1))
    ranks, slots = len(drawn), len(old[0])
    homes = np.arange(10, 10 + ranks)[:, None]  # none of the experts that are copied
    experts = 10 + ranks
    rest = np.full((10, 1 + slots), EMPTY)  # ranks where these are at home
    rest[:, 0] = np.arange(10)
    table = np.concatenate([rest, np.concatenate([homes, np.array(old)], axis=1)])
    home = (np.arange(experts) * (1 + slots)).astype(np.int32)
    start = Placement(table.reshape(1, -1), experts, experts, home[None])
    replicas = np.concatenate([rest[:, 1:], np.array(wanted)]).astype(np.int32)
    made = align(start, start.home_rank, replicas[None]).replicas_LRK[0, 10:].tolist()
    for before, asked, after in zip(old, wanted, made, strict=True):
        coming = iter(sorted(expert for expert in asked if expert != EMPTY and expert not in before))
        kept = [expert if expert in asked else EMPTY for expert in before]
        assert after == [next(coming, EMPTY) if expert == EMPTY else expert for expert in kept]


def test_layers_that_stay_are_not_judged_twice_and_have_the_imbalance_that_they_had() -> None:
    from eplb_runtime.planner.evaluate import imbalance_by_scenario, imbalance_with_changes
    from eplb_runtime.planner.planning import _asked
    from eplb_runtime.planner.terms import Settled
    from eplb_runtime.planner.traffic import choose

    load = loads(layers=4)
    current, slots = Placement.initial(4, EXPERTS, RANKS, 1), EXPERTS // RANKS + 1
    whole = plan(load, Topology(RANKS), slots_per_rank=slots, current=current).placement
    part = choose(np.array([True, False, True, False]), whole, current)
    request = _asked(load, Topology(RANKS), slots, current, "incremental", None, Settled())
    before_WL = imbalance_by_scenario(request, current)
    for placement in (current, part, whole):
        found_WL = imbalance_with_changes(request, placement, current, before_WL)
        assert (found_WL == imbalance_by_scenario(request, placement)).all()
    of_part_WL = imbalance_with_changes(request, part, current, before_WL + 1.0)
    assert (of_part_WL[:, [1, 3]] == before_WL[:, [1, 3]] + 1.0).all(), "taken over"
