"""The part of a plan that the gate takes by seconds: the layers with which most are left."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, plan
from eplb_runtime.planner.cost import HYSTERESIS
from eplb_runtime.topology import Topology

LAYERS, EXPERTS, RANKS = 14, 16, 4
TOPOLOGY = Topology(RANKS, 2)
INITIAL = Placement.initial(LAYERS, EXPERTS, RANKS)
LOAD = 1e4 * np.random.default_rng(3).lognormal(0.0, np.linspace(0.05, 1.2, LAYERS)[:, None], (LAYERS, EXPERTS))
"""From layers that are nearly even to layers with much to gain."""


def planned(home_bytes: float, gate: str = "payoff", stall: float = 0.0) -> Plan:
    cost = CostModel(int(home_bytes), step_seconds=1.0, moe_share=0.4, horizon_steps=100, stall_seconds=stall)
    return plan(LOAD, TOPOLOGY, slots_per_rank=EXPERTS // RANKS, current=INITIAL, cost=cost, gate=gate)  # type: ignore[arg-type]


def left(made: Plan) -> float:
    return made.seconds_saved - HYSTERESIS * made.seconds_spent


@given(st.floats(6, 14), st.sampled_from([0.0, 0.1, 3.0]))
def test_what_is_taken_pays_and_the_other_layers_stay(exponent: float, stall: float) -> None:
    made = planned(10**exponent, stall=stall)
    assert (made.decision == "rebalance") == (len(made.moves) > 0) == (left(made) > 0)
    stays = np.setdiff1d(np.arange(LAYERS), made.moves[:, 0])
    assert made.imbalance_before is not None
    assert (made.imbalance_after[stays] == made.imbalance_before[stays]).all()
    assert (made.placement.physical_to_logical[stays] == INITIAL.physical_to_logical[stays]).all()


def test_dear_bytes_leave_out_layers_with_little_to_gain() -> None:
    cheap, dear, dearest = (set(planned(size).moves[:, 0].tolist()) for size in (1e6, 3e10, 1e14))
    assert 0 < len(dear) < len(cheap) and not dearest
    assert min(dear) > min(cheap), "later layers have more to gain"
    assert left(planned(3e10, "off")) < left(planned(3e10))
