"""Policies: pure functions from a ``PlanRequest`` to a ``Placement``, by name; and a shuffle, to show that experts can
move."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...placement import EMPTY, Placement
from ..types import PlanError, PlanRequest
from .deepseek import deepseek
from .free import free
from .incremental import incremental


def static(request: PlanRequest) -> Placement:
    """Return the current placement; without one, experts in logical order. Each layer's reason in ``request.held``
    becomes ``"static"``. PlanError: there is no current placement, in the free layout."""
    if request.current is None and request.layout == "free":
        raise PlanError("policy 'static' has no free placement to keep: give current=, or layout='home'")
    request.held.update(dict.fromkeys(range(request.num_layers), "static"))
    return request.start


POLICIES: dict[str, tuple[Callable[[PlanRequest], Placement], tuple[str, ...]]] = {
    "static": (static, ("home", "free")),
    "deepseek": (deepseek, ("free", "home")),
    "free": (free, ("free",)),
    "hierarchical": (free, ("free",)),
    "incremental": (incremental, ("home",)),
}
"""Every policy by the name that users give, and the layouts that it plans; the first is its default."""


def shuffled(current: Placement, load: NDArray[np.float64]) -> Placement:
    """Return a random placement, seeded by epoch and layer, of the same epoch: the caller counts it up. Homes change
    places in pairs on two ranks: all of them in even epochs; in odd epochs half, and the others change slots within
    their rank, since two ranks that exchange everything are soon back. Replica slots hold the experts of other ranks
    with most load (float64 ``[L, E]``), `EMPTY` if too few. A pair commits by itself: staging stays small."""
    slots, homes, experts = current.slots_per_rank, current.homes_per_rank, current.num_experts
    home_LE = np.stack([_swapped(current, layer) for layer in range(current.num_layers)])
    map_LP = np.full(current.physical_to_logical.shape, EMPTY, dtype=np.int32)
    np.put_along_axis(map_LP, home_LE, np.arange(experts, dtype=np.int32)[None], axis=1)
    for map_P, home_E, hottest_E in zip(map_LP, home_LE, np.argsort(-load, axis=1, kind="stable"), strict=True):
        for rank_S, rank in zip(map_P.reshape(-1, slots), range(current.num_ranks), strict=True):
            others = hottest_E[home_E[hottest_E] // slots != rank][: slots - homes]
            rank_S[homes : homes + len(others)] = others
    return Placement(map_LP, experts, current.num_ranks, home_LE, current.epoch)


def _swapped(current: Placement, layer: int) -> NDArray[np.int32]:
    """int32 ``[E]``: new home slots. Ranks in random order, each one's experts in random order; then the first half of
    that row changes places with the second, so a pair is on one rank only where the number of ranks is odd. From an
    odd epoch every second pair does, and those that are left change slots within their rank."""
    generator, rank_E = np.random.default_rng([current.epoch, layer]), current.home_rank[layer]
    now_E = current.require_homes()[layer]
    home_E: NDArray[np.int32] = now_E.copy()
    ranks = generator.permutation(current.num_ranks)
    row = np.concatenate([generator.permutation(np.flatnonzero(rank_E == rank)) for rank in ranks])
    half, every = len(row) // 2, 1 + current.epoch % 2
    first, second = row[:half:every], row[half : 2 * half : every]
    home_E[first], home_E[second] = home_E[second], home_E[first]
    for rank in range(current.num_ranks) if every == 2 else ():
        stay = np.flatnonzero((home_E == now_E) & (rank_E == rank))
        home_E[stay] = np.roll(home_E[stay], 1)
    return home_E
