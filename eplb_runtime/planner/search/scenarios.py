"""One layer under several loads at once: where experts stand, how each load is split over them, what a step changes.

A scenario is a load that may come: the forecast, off by as much as some past window was off its own. A placement is as
good as its busiest rank over all of them, by water-filling. The split of every scenario is kept and goes along with
each step, so that judging a step takes a few sweeps.

Shape suffixes here: W scenarios, E logical experts, R ranks, H homes a rank, K replica slots a rank, N experts with
copies, C copies of one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...moe.routing.water_filling import sweep_copies, sweep_until_optimal
from ...placement import EMPTY
from ...utils.jit import jit

FIRST_SWEEPS = 16


class LayerLoads(NamedTuple):
    """Arrays that change in place.

    Args:
        load_WE: int64, tokens of each expert in each scenario; sums below 2 ** 56.
        homes_RH: int32, the experts at home on each rank.
        replica_RK: int32, the experts in the replica slots, -1 for none.
        home_E: int32, the home rank of each expert.
        row_E: int32, the row of each expert that has copies, -1 for the others.
        expert_N: int32, the expert of each row.
        ranks_NC: int32, the ranks of its copies, home first.
        count_N: int32, how many they are.
        share_WNC: int64, its tokens on each.
        ballast_WR: int64, tokens that each rank counts beside its own, so that a slow one gets less.
        load_WR: int64, tokens of each rank, its ballast with them.
        used: int64 ``[1]``, rows in use; these come first.
    """

    load_WE: NDArray[np.int64]
    homes_RH: NDArray[np.int32]
    replica_RK: NDArray[np.int32]
    home_E: NDArray[np.int32]
    row_E: NDArray[np.int32]
    expert_N: NDArray[np.int32]
    ranks_NC: NDArray[np.int32]
    count_N: NDArray[np.int32]
    share_WNC: NDArray[np.int64]
    ballast_WR: NDArray[np.int64]
    load_WR: NDArray[np.int64]
    used: NDArray[np.int64]


@jit(error_model="numpy")
def empty_layer(load_WE: NDArray[np.int64], ballast_WR: NDArray[np.int64], slots: int, max_copies: int) -> LayerLoads:
    """Room for a layer; nothing stands anywhere yet."""
    scenarios, experts = load_WE.shape
    ranks = ballast_WR.shape[1]
    rows = max(min(ranks * slots, experts), 1)
    return LayerLoads(
        load_WE,
        np.empty((ranks, experts // ranks), dtype=np.int32),
        np.full((ranks, slots), EMPTY, dtype=np.int32),
        np.empty(experts, dtype=np.int32),
        np.full(experts, -1, dtype=np.int32),
        np.full(rows, -1, dtype=np.int32),
        np.full((rows, max_copies), -1, dtype=np.int32),
        np.zeros(rows, dtype=np.int32),
        np.empty((scenarios, rows, max_copies), dtype=np.int64),
        ballast_WR,
        np.zeros((scenarios, ranks), dtype=np.int64),
        np.zeros(1, dtype=np.int64),
    )


@jit(error_model="numpy")
def place_experts(layer: LayerLoads, home_E: NDArray[np.int32], replica_RK: NDArray[np.int32]) -> None:
    """Put experts where these say, and split every scenario; replicas beyond the most copies are dropped."""
    ranks, slots = layer.replica_RK.shape
    filled_R = np.zeros(ranks, dtype=np.int32)
    layer.row_E[:] = -1
    layer.count_N[:] = 0
    layer.home_E[:] = home_E
    layer.replica_RK[:] = replica_RK
    for expert in range(home_E.size):
        rank = home_E[expert]
        layer.homes_RH[rank, filled_R[rank]] = expert
        filled_R[rank] += 1
    used = 0
    for rank in range(ranks):
        for slot in range(slots):
            expert = layer.replica_RK[rank, slot]
            if expert == EMPTY:
                continue
            row = layer.row_E[expert]
            if row < 0:
                row = used
                used += 1
                layer.row_E[expert], layer.expert_N[row] = row, expert
                layer.ranks_NC[row, 0], layer.count_N[row] = home_E[expert], 1
            if layer.count_N[row] == layer.ranks_NC.shape[1]:
                layer.replica_RK[rank, slot] = EMPTY
                continue
            layer.ranks_NC[row, layer.count_N[row]] = rank
            layer.count_N[row] += 1
    layer.used[0] = used
    split_anew(layer)


@jit(error_model="numpy")
def split_anew(layer: LayerLoads) -> None:
    """Split every scenario from the even split, until optimal."""
    used = layer.used[0]
    for scenario in range(layer.load_WE.shape[0]):
        load_E, load_R, share_NC = layer.load_WE[scenario], layer.load_WR[scenario], layer.share_WNC[scenario]
        load_R[:] = layer.ballast_WR[scenario]
        for expert in range(load_E.size):
            row = layer.row_E[expert]
            if row < 0:
                load_R[layer.home_E[expert]] += load_E[expert]
                continue
            copies = layer.count_N[row]
            each = load_E[expert] // copies
            for copy in range(copies):
                share = each if copy else load_E[expert] - each * (copies - 1)
                share_NC[row, copy] = share
                load_R[layer.ranks_NC[row, copy]] += share
        sweep_until_optimal(layer.ranks_NC[:used], layer.count_N[:used], share_NC[:used], load_R, int(FIRST_SWEEPS))


@jit(error_model="numpy")
def settle(layer: LayerLoads, sweeps: int) -> None:
    """Bring each scenario's split, good before a step, up to date after it."""
    used = layer.used[0]
    for scenario in range(layer.load_WR.shape[0]):
        for _ in range(sweeps):
            sweep_copies(
                layer.ranks_NC[:used], layer.count_N[:used], layer.share_WNC[scenario, :used], layer.load_WR[scenario]
            )


@jit(error_model="numpy")
def copy_state(source: LayerLoads, target: LayerLoads) -> None:
    """``target`` stands as ``source`` does."""
    used = source.used[0]
    target.homes_RH[:] = source.homes_RH
    target.replica_RK[:] = source.replica_RK
    target.home_E[:] = source.home_E
    target.row_E[:] = source.row_E
    target.expert_N[:used] = source.expert_N[:used]
    target.count_N[:] = source.count_N
    for row in range(used):
        for copy in range(source.count_N[row]):
            target.ranks_NC[row, copy] = source.ranks_NC[row, copy]
    for scenario in range(source.load_WR.shape[0]):
        for row in range(used):
            for copy in range(source.count_N[row]):
                target.share_WNC[scenario, row, copy] = source.share_WNC[scenario, row, copy]
    target.load_WR[:] = source.load_WR
    target.used[0] = used


@jit(error_model="numpy")
def has_copy_on(layer: LayerLoads, expert: int, rank: int) -> bool:
    if layer.home_E[expert] == rank:
        return True
    found = False
    for slot in range(layer.replica_RK.shape[1]):
        found = found or layer.replica_RK[rank, slot] == expert
    return found


@jit(error_model="numpy")
def swap_homes(layer: LayerLoads, here: int, there: int) -> None:
    """Two experts change their homes, which neither has a copy beside."""
    a, b = layer.home_E[here], layer.home_E[there]
    for index in range(layer.homes_RH.shape[1]):
        if layer.homes_RH[a, index] == here:
            layer.homes_RH[a, index] = there
        if layer.homes_RH[b, index] == there:
            layer.homes_RH[b, index] = here
    layer.home_E[here], layer.home_E[there] = b, a
    row_here, row_there = layer.row_E[here], layer.row_E[there]
    if row_here >= 0:
        layer.ranks_NC[row_here, 0] = b
    if row_there >= 0:
        layer.ranks_NC[row_there, 0] = a
    for scenario in range(layer.load_WR.shape[0]):
        shift = tokens_at_home(layer, scenario, here) - tokens_at_home(layer, scenario, there)
        layer.load_WR[scenario, a] -= shift
        layer.load_WR[scenario, b] += shift


@jit(error_model="numpy")
def tokens_at_home(layer: LayerLoads, scenario: int, expert: int) -> int:
    row = layer.row_E[expert]
    return int(layer.load_WE[scenario, expert] if row < 0 else layer.share_WNC[scenario, row, 0])


@jit(error_model="numpy")
def set_replica(layer: LayerLoads, rank: int, slot: int, expert: int) -> None:
    """``expert``, or nothing, takes a replica slot; what the slot's old expert computed there goes to its home."""
    if layer.replica_RK[rank, slot] != EMPTY:
        _drop(layer, layer.replica_RK[rank, slot], rank)
    layer.replica_RK[rank, slot] = expert
    if expert == EMPTY:
        return
    row = layer.row_E[expert]
    if row < 0:
        row = layer.used[0]
        layer.used[0] += 1
        layer.row_E[expert], layer.expert_N[row] = row, expert
        layer.ranks_NC[row, 0], layer.count_N[row] = layer.home_E[expert], 1
        for scenario in range(layer.load_WR.shape[0]):
            layer.share_WNC[scenario, row, 0] = layer.load_WE[scenario, expert]
    copy = layer.count_N[row]
    layer.ranks_NC[row, copy] = rank
    layer.share_WNC[:, row, copy] = 0
    layer.count_N[row] += 1


@jit(error_model="numpy")
def _drop(layer: LayerLoads, expert: int, rank: int) -> None:
    row = layer.row_E[expert]
    last = layer.count_N[row] - 1
    place = 1
    while layer.ranks_NC[row, place] != rank:
        place += 1
    for scenario in range(layer.load_WR.shape[0]):
        freed = layer.share_WNC[scenario, row, place]
        layer.load_WR[scenario, rank] -= freed
        layer.load_WR[scenario, layer.home_E[expert]] += freed
        layer.share_WNC[scenario, row, 0] += freed
        layer.share_WNC[scenario, row, place] = layer.share_WNC[scenario, row, last]
    layer.ranks_NC[row, place] = layer.ranks_NC[row, last]
    layer.count_N[row] = last
    if last > 1:
        return
    end = layer.used[0] - 1
    moved = layer.expert_N[end]
    layer.row_E[moved] = row
    layer.row_E[expert] = -1
    layer.expert_N[row], layer.count_N[row] = moved, layer.count_N[end]
    layer.ranks_NC[row] = layer.ranks_NC[end]
    layer.share_WNC[:, row] = layer.share_WNC[:, end]
    layer.count_N[end] = 0
    layer.used[0] = end
