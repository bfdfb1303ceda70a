"""Plans that move experts for the sake of moving them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement

IntArray = NDArray[np.int32]


def shuffled(current: Placement, load: NDArray[np.float64]) -> Placement:
    """Every home changes places with one on another rank, from odd epochs half of them, since two ranks that exchange
    everything are soon back where they began; replica slots hold the hottest of the others by float64 load ``[L, E]``.

    In pairs, because a pair is the least that can be committed by itself: staging stays small however many move.
    """
    maps, homes = [], []
    for layer in range(current.num_layers):
        generator = np.random.default_rng([current.epoch, layer])
        home_E = _swapped(current, layer, generator)
        maps.append(_filled(home_E, load[layer], current))
        homes.append(home_E)
    return Placement(np.stack(maps), current.num_experts, current.num_ranks, np.stack(homes), current.epoch)


def _swapped(current: Placement, layer: int, generator: np.random.Generator) -> IntArray:
    """int32 ``[E]``: new home slots. Ranks in random order, each one's experts in random order; then the first half of
    that row changes places with the second, so a pair is on one rank only where the number of ranks is odd. From an
    odd epoch every second pair does, and those that are left change slots within their rank."""
    assert current.home is not None
    home_E: IntArray = current.home[layer].copy()
    ranks = generator.permutation(current.num_ranks)
    of_rank = [generator.permutation(np.flatnonzero(current.home_rank[layer] == rank)) for rank in ranks]
    row = np.concatenate(of_rank)
    half = len(row) // 2
    every = 1 + current.epoch % 2
    first, second = row[:half:every], row[half : 2 * half : every]
    home_E[first], home_E[second] = home_E[second], home_E[first]
    for rank in range(current.num_ranks) if every == 2 else ():
        stay = np.flatnonzero((home_E == current.home[layer]) & (current.home_rank[layer] == rank))
        home_E[stay] = np.roll(home_E[stay], 1)
    return home_E


def _filled(home_E: IntArray, load_E: NDArray[np.float64], current: Placement) -> IntArray:
    """int32 ``[P]``: the homes, and in each rank's replica slots the hottest experts of other ranks."""
    slots, homes = current.slots_per_rank, current.homes_per_rank
    map_P = np.full(current.num_slots, EMPTY, dtype=np.int32)
    map_P[home_E] = np.arange(current.num_experts, dtype=np.int32)
    hottest_first = np.lexsort((np.arange(len(load_E)), -load_E))
    for rank in range(current.num_ranks):
        elsewhere = hottest_first[home_E[hottest_first] // slots != rank][: slots - homes]
        map_P[rank * slots + homes : rank * slots + homes + len(elsewhere)] = elsewhere
    return map_P
