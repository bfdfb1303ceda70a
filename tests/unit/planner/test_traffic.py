"""Tokens that cross nodes: counted as they are really sent, and fewer where experts stand near their sources."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.placements import some_homes

from eplb_runtime.moe.routing.water_filling import SplitTables, split_for_rank, split_totals
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, Plan, evaluate, plan
from eplb_runtime.planner.api import checked_sources
from eplb_runtime.planner.evaluate import UNITS, crossing_share, in_units, predicted_imbalance, rank_load, received
from eplb_runtime.topology import Topology

TOPOLOGY = Topology(8, 4)
LAYERS, EXPERTS = 3, 64
COST = CostModel(home_bytes=1, replica_bytes=1, step_seconds=1.0, moe_share=0.5, crossing_seconds=0.25)


def domains(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Loads ``[4, L, E]``, and sources ``[2, L, E]``: each expert is mostly asked for by one of two nodes."""
    generator = np.random.default_rng(seed)
    load = generator.lognormal(0.0, 0.6, (LAYERS, EXPERTS)) * generator.normal(1.0, 0.05, (4, LAYERS, EXPERTS)) * 1e4
    mostly = generator.random((LAYERS, EXPERTS)) < 0.5
    share = np.where(mostly, 0.9, 0.1)
    return load, np.stack([share, 1 - share]) * load.mean(axis=0)


@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_crossing_tokens_are_those_that_routing_sends_to_other_nodes(replicas: int) -> None:
    load, by_node = domains()
    current = Placement.initial(LAYERS, EXPERTS, 8, replicas)
    placement = plan(load, TOPOLOGY, slots_per_rank=8 + replicas, current=current).placement
    tables = SplitTables.of(placement)
    counts_LRE = np.repeat(by_node / 4, 4, axis=0).transpose(1, 0, 2).round().astype(np.int64)
    totals = counts_LRE.sum(axis=1).astype(float)
    by_rank = counts_LRE.transpose(1, 0, 2)
    share = checked_sources(by_rank.reshape(2, 4, LAYERS, EXPERTS).sum(axis=1), LAYERS, EXPERTS, TOPOLOGY)
    come = received(totals, placement, TOPOLOGY, share)
    rank_LEC = tables.copy_slot_LEC // tables.slots_per_rank
    node_of_copy = np.where(rank_LEC < 0, -1, rank_LEC // 4)
    for layer in range(LAYERS):
        sent = [split_for_rank(counts_LRE[layer], tables.of_layer(layer), r, 4)[0] for r in range(8)]
        far = sum(sent[r][(node_of_copy[layer] != r // 4) & (node_of_copy[layer] >= 0)].sum() for r in range(8))
        own = sum(sent[r][rank_LEC[layer] == r].sum() for r in range(8))
        assert come[layer, :, 1].sum() == pytest.approx(far, abs=8 * EXPERTS)
        assert totals[layer].sum() - come[layer].sum() == pytest.approx(own, abs=16 * EXPERTS)
    free = plan(load, TOPOLOGY, slots_per_rank=8 + max(replicas, 1), policy="free").placement
    alike = crossing_share(totals, free, TOPOLOGY)
    assert (alike <= 0.5).all() and (alike > 0.2).all()


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_experts_stand_near_their_sources_where_crossing_costs(replicas: int, first: bool) -> None:
    load, by_node = domains()
    current = None if first else Placement.initial(LAYERS, EXPERTS, 8, replicas)
    asked = {"slots_per_rank": 8 + replicas, "current": current}
    blind = plan(load, TOPOLOGY, sources=by_node, **asked)
    near = plan(load, TOPOLOGY, sources=by_node, cost=COST, **asked)
    crosses, by_chance = (crossing(load.mean(axis=0), made, by_node) for made in (near, blind))
    assert by_chance > 0.4, "half of the tokens"
    assert crosses < 0.2, "a tenth at best"
    assert near.imbalance_after.mean() < blind.imbalance_after.mean() + 0.03
    assert first or near.reason.endswith(f" -> {crosses:.1%}"), near.reason


def crossing(load: np.ndarray, made: Plan, by_node: np.ndarray) -> float:
    share_LNE = checked_sources(by_node, LAYERS, EXPERTS, TOPOLOGY)
    return float(crossing_share(load, made.placement, TOPOLOGY, share_LNE).mean())


def test_a_link_carries_what_comes_and_what_leaves() -> None:
    moves = np.array([[0, 0, 0, 4, 1], [0, 2, 1, 5, 1]])  # from ranks 0 and 1 to rank 2
    assert CostModel(home_bytes=10).transfer_seconds(moves, Topology(3, 3, intra_node_bandwidth=10.0), 2) == 2.0


def test_a_move_for_nearness_alone_is_taken_when_it_pays_and_left_when_it_does_not() -> None:
    _, by_node = domains()
    load = by_node.sum(axis=0)
    balanced = plan(load, TOPOLOGY, slots_per_rank=9).placement
    asked = {"slots_per_rank": 9, "current": balanced, "sources": by_node, "gate": "payoff"}
    cost = {"home_bytes": 10**9, "replica_bytes": 10**8, "step_seconds": 1.0, "crossing_seconds": 0.25}
    pays = plan(load, TOPOLOGY, cost=CostModel(**cost, horizon_steps=1000), **asked)
    assert pays.decision == "rebalance"
    assert crossing(load, pays, by_node) < 0.5 * crossing_share(load, balanced, TOPOLOGY).mean()
    assert pays.seconds_saved > 10
    assert plan(load, TOPOLOGY, cost=CostModel(**cost, horizon_steps=1), **asked).decision == "stay"


# -- What a placement makes of a load, without anything that is compiled where no copies stand


@given(
    st.integers(0, 2**32),
    st.tuples(st.integers(1, 4), st.integers(1, 8), st.integers(1, 6), st.integers(0, 2)),
    st.sampled_from([1.0, 1e6]),
)
def test_without_copies_rank_loads_are_those_of_the_split(seed: int, shape: tuple[int, ...], scale: float) -> None:
    rng = np.random.default_rng(seed)
    placement = some_homes(rng, *shape, share_empty=1.0)
    load = rng.lognormal(0.0, 2.0, placement.home.shape) * (rng.random(placement.home.shape) > 0.2) * scale
    tables = SplitTables.of(placement)
    split = tables.sum_by_rank(split_totals(in_units(load), tables)) / UNITS * load.sum(axis=1, keepdims=True)
    assert np.allclose(rank_load(load, placement), split)


def test_without_copies_nothing_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "split_totals", None)
    load = np.array([[4.0, 2.0, 1.0, 1.0]])
    assert predicted_imbalance(load, Placement.initial(1, 4, 2, replica_slots=1)).tolist() == [1.5]
