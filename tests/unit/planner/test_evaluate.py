"""What a placement makes of a load, without anything that is compiled where no copies stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.moe.routing.tables import SplitTables
from eplb_runtime.moe.routing.water_filling import split_totals
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner import evaluate
from eplb_runtime.planner.evaluate import UNITS, in_units, predicted_imbalance, rank_load


@st.composite
def _loads(draw: st.DrawFn) -> tuple[np.ndarray, Placement]:
    ranks, homes, layers = draw(st.integers(1, 8)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    load = generator.lognormal(0.0, 2.0, (layers, ranks * homes)) * (generator.random((layers, ranks * homes)) > 0.2)
    start = Placement.initial(layers, ranks * homes, ranks, draw(st.integers(0, 2)))
    orders = np.stack([generator.permutation(ranks * homes) for _ in range(layers)])
    stands = start.physical_to_logical
    slots = np.where(stands == EMPTY, EMPTY, np.take_along_axis(orders, np.maximum(stands, 0), axis=1))
    home = np.take_along_axis(start.require_homes(), np.argsort(orders, axis=1), axis=1)
    return load * draw(st.sampled_from([1.0, 1e6])), Placement(slots, ranks * homes, ranks, home)


@given(_loads())
def test_without_copies_rank_loads_are_those_of_the_split(drawn: tuple[np.ndarray, Placement]) -> None:
    load, placement = drawn
    tables = SplitTables.of(placement)
    split = tables.sum_by_rank(split_totals(in_units(load), tables)) / UNITS * load.sum(axis=1, keepdims=True)
    assert np.allclose(rank_load(load, placement), split)


def test_without_copies_nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "split_totals", None)
    load = np.array([[4.0, 2.0, 1.0, 1.0]])
    assert predicted_imbalance(load, Placement.initial(1, 4, 2, replica_slots=1)).tolist() == [1.5]
