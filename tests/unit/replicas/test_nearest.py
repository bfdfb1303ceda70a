"""Where copies get their weights from: those of an expert cross to a node once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eplb_runtime.placement import EMPTY
from eplb_runtime.replicas.nearest import nearest_sources


def test_the_lowest_copy_of_another_node_hands_on() -> None:
    """Nodes of two ranks, three slots a rank: the home of the expert is on rank 0, copies are on all others."""
    home_RK = np.array([[EMPTY], [0], [0], [0], [EMPTY], [0]])
    assert nearest_sources(home_RK, 3, 2).tolist() == [[EMPTY], [0], [0], [2], [EMPTY], [0]]
    assert nearest_sources(home_RK, 3, 6).tolist() == [[EMPTY], [0], [0], [0], [EMPTY], [0]], "on one node, from home"


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_every_expert_enters_a_node_once_and_comes_from_who_has_it(
    seed: int, nodes: int, per_node: int, replicas: int
) -> None:
    rng, ranks, slots = np.random.default_rng(seed), nodes * per_node, 2 + replicas
    home_RK = np.full((ranks, replicas), EMPTY)
    for rank in range(ranks):
        homes = [r * slots + local for r in range(ranks) if r != rank for local in range(2)]
        chosen = rng.permutation(homes)[:replicas]
        home_RK[rank, : len(chosen)] = np.where(rng.random(len(chosen)) < 0.7, chosen, EMPTY)
    source_RK = nearest_sources(home_RK, slots, per_node)
    crossings = set()
    for rank, replica in np.argwhere(home_RK != EMPTY):
        home, source = home_RK[rank, replica], source_RK[rank, replica]
        assert source == home // slots or home in home_RK[source]
        if source != home // slots:
            holder = list(home_RK[source]).index(home)
            assert source_RK[source, holder] == home // slots, "who hands on got it from the home"
        if source // per_node != rank // per_node:
            assert (home, rank // per_node) not in crossings
            crossings.add((home, rank // per_node))
    assert (source_RK[home_RK == EMPTY] == EMPTY).all()
