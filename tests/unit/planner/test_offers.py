"""Parts of a plan: what fewer moves would bring, and the part that the gate takes by seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, plan
from eplb_runtime.planner.cost import HYSTERESIS
from eplb_runtime.planner.evaluate import moves_between, predicted_imbalance
from eplb_runtime.planner.weighing import MOST_OFFERS, _most_left
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS = 14, 16, 4
TOPOLOGY = Topology(RANKS, 2)
INITIAL = Placement.initial(LAYERS, EXPERTS, RANKS)
LOAD = 1e4 * np.random.default_rng(3).lognormal(0.0, np.linspace(0.05, 1.2, LAYERS)[:, None], (LAYERS, EXPERTS))
"""From layers that are nearly even to layers with much to gain."""


def cost_of(home_bytes: float, stall: float = 0.0) -> CostModel:
    return CostModel(int(home_bytes), step_seconds=1.0, moe_share=0.4, horizon_steps=100, stall_seconds=stall)


def planned(cost: CostModel | None, gate: str = "payoff", policy: str = "incremental", **terms: Any) -> Plan:
    slots = EXPERTS // RANKS
    return plan(LOAD, TOPOLOGY, slots_per_rank=slots, current=INITIAL, policy=policy, cost=cost, gate=gate, **terms)  # type: ignore[arg-type]


def left(saved: float, spent: float) -> float:
    return saved - HYSTERESIS * spent


def placed_by(offer_layers: tuple[int, ...], whole: Placement) -> Placement:
    """The whole placement in these layers, the initial one in others."""
    stay = np.array([layer not in offer_layers for layer in range(LAYERS)])
    assert whole.home is not None and INITIAL.home is not None
    return Placement(
        np.where(stay[:, None], INITIAL.physical_to_logical, whole.physical_to_logical),
        EXPERTS,
        RANKS,
        np.where(stay[:, None], INITIAL.home, whole.home),
    )


@pytest.mark.parametrize("policy", ["swaps", "incremental"])
def test_an_offer_is_what_its_layers_alone_would_be(policy: str) -> None:
    cost = cost_of(1e9, stall=0.01)
    whole = planned(cost, gate="off", policy=policy)
    assert whole.offers[0].layers == () and whole.offers[0].moved_slots == 0 and whole.offers[0].seconds_spent == 0
    assert whole.offers[-1].moved_slots == whole.moved_slots and len(whole.offers) <= MOST_OFFERS
    assert whole.offers[-1].seconds_saved == pytest.approx(whole.seconds_saved)
    for offer in whole.offers[1:]:
        placement = placed_by(offer.layers, whole.placement)
        moves = moves_between(INITIAL, placement, TOPOLOGY)
        gain = predicted_imbalance(LOAD, INITIAL).sum() - predicted_imbalance(LOAD, placement).sum()
        assert offer.seconds_saved == pytest.approx(gain * cost.seconds_per_imbalance(LAYERS))
        stall = cost.stall_seconds if len(moves) else 0.0
        assert offer.seconds_spent == pytest.approx(cost.transfer_seconds(moves, TOPOLOGY, 4) + stall)
        assert offer.imbalance == pytest.approx(predicted_imbalance(LOAD, placement).mean())


@settings(max_examples=30)
@given(st.floats(6.0, 12.0), st.sampled_from([0.0, 0.05]))
def test_what_pays_takes_the_part_with_most_seconds_left(exponent: float, stall: float) -> None:
    cost = cost_of(10**exponent, stall)
    made = planned(cost)
    best = max(left(offer.seconds_saved, offer.seconds_spent) for offer in made.offers)
    if made.decision == "stay":
        assert best <= 1e-9
        return
    assert left(made.seconds_saved, made.seconds_spent) == pytest.approx(best)
    moving = tuple(sorted(set(made.moves[:, 0].tolist())))
    assert moving in [offer.layers for offer in made.offers]
    stays = np.setdiff1d(np.arange(LAYERS), moving)
    assert made.imbalance_before is not None
    assert (made.imbalance_after[stays] == made.imbalance_before[stays]).all()
    assert (made.placement.physical_to_logical[stays] == INITIAL.physical_to_logical[stays]).all()


def test_layers_on_other_links_pay_together_without_one_between_them_that_does_not() -> None:
    saved, stall = np.array([1.0, 0.95, 0.9]), 0.4
    links = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    first_ones = [left(saved[:end].sum(), links[:end].sum(axis=0).max() + stall) for end in (1, 2, 3)]
    assert max(first_ones) < 0 < left(1.9, 1.0 + stall)
    assert _most_left(saved, links, stall).tolist() == [True, False, True]


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.3, 1.0]))
def test_no_other_layer_in_or_out_would_leave_more(seed: int, stall: float) -> None:
    random = np.random.default_rng(seed)
    number, links = random.integers(0, 9), random.integers(2, 9)
    saved_M = random.normal(1.0, 1.2, number)
    links_MN = random.exponential(0.6, (number, links)) * (random.random((number, links)) < 0.5)

    def of(chosen_M: np.ndarray) -> float:
        spent = links_MN[chosen_M].sum(axis=0).max() + stall if chosen_M.any() else 0.0
        return left(saved_M[chosen_M].sum(), spent)

    found_M = _most_left(saved_M, links_MN, stall)
    others = [found_M ^ (np.arange(number) == layer) for layer in range(number)]
    first_ones = [np.arange(number) < end for end in range(number + 1)]
    assert of(found_M) >= max(map(of, [*others, *first_ones])) - 1e-6


def test_dear_bytes_leave_out_layers_with_little_to_gain() -> None:
    cheap, dear, dearest = (planned(cost_of(size)) for size in (1e6, 3e10, 1e14))
    assert len(cheap.offers[-1].layers) == len(set(cheap.moves[:, 0]))
    moving = set(dear.moves[:, 0].tolist())
    assert 0 < len(moving) < len(cheap.offers[-1].layers)
    assert dearest.decision == "stay"
    control = planned(cost_of(3e10), gate="off")
    assert left(control.seconds_saved, control.seconds_spent) < left(dear.seconds_saved, dear.seconds_spent)
