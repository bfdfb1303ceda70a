"""Random valid placements, for properties that hold for every one of them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from eplb_runtime.placement import EMPTY, Placement


def some_homes(
    rng: np.random.Generator, layers: int, ranks: int, homes: int, replicas: int, share_empty: float = 0.3
) -> Placement:
    """Homes anywhere, the same number on each rank, or in logical order; this share of replica slots is empty."""
    experts, slots = ranks * homes, homes + replicas
    map_ = np.full((layers, ranks, slots), EMPTY)
    home = np.empty((layers, experts), dtype=np.int64)
    for layer in range(layers):
        order = np.arange(experts) if rng.random() < 0.2 else rng.permutation(experts)
        map_[layer, :, :homes] = order.reshape(ranks, homes)
        at = np.arange(experts)
        home[layer, order] = at // homes * slots + at % homes
        for rank in range(ranks):
            elsewhere = rng.permutation(np.setdiff1d(order, map_[layer, rank, :homes]))[:replicas]
            filled = rng.random(len(elsewhere)) >= share_empty
            map_[layer, rank, homes : homes + len(elsewhere)] = np.where(filled, elsewhere, EMPTY)
    return Placement(map_.reshape(layers, -1), experts, ranks, home)


@st.composite
def home_placements(draw: st.DrawFn) -> Placement:
    rng, empty = np.random.default_rng(draw(st.integers(0, 2**32 - 1))), draw(st.sampled_from([0.0, 0.3, 1.0]))
    return some_homes(rng, *draw(shapes()), empty).with_epoch(draw(st.integers(0, 10**6)))


@st.composite
def free_placements(draw: st.DrawFn) -> Placement:
    layers, ranks, homes, replicas = draw(shapes())
    slots = ranks * (homes + replicas)
    experts = draw(st.integers(1, slots))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = [
        rng.permutation(np.concatenate([np.arange(experts), rng.integers(0, experts, slots - experts)]))
        for _ in range(layers)
    ]
    return Placement(np.stack(rows), experts, ranks, epoch=draw(st.integers(0, 10**6)))


def shapes() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Layers, ranks, homes per rank, replica slots per rank."""
    return st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
