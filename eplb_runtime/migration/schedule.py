"""Schedules transfers of experts in rounds: a pure function of two placements and the byte sizes.

Every rank computes the same schedule from the same placements. A round is the unit of commit: a valid placement holds
before and after it, so a rebalance that breaks off between rounds leaves a valid one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, HomeRows, Placement
from .cycles import cut_into_permutations, cut_into_short_cycles, first_fit, follow_slots

_METHODS = (
    (cut_into_permutations, False, 1.02),
    (cut_into_permutations, True, 1.05),
    (cut_into_short_cycles, True, 1.0),
)
"""Ways to cut moves into cycles, tried in order: the function, whether the longest cycles choose their round first, and
the ratio at which the result is good enough. The ratio is the bytes of each round's busiest rank, summed, over those of
the rank with most bytes in all. The first way spreads a layer over the fewest rounds. The last is for few moves, whose
permutations are half empty, and takes longest."""

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Transfer:
    """Transfer of an expert with its state from its home slot to its next one; on one rank a copy, made at the
    commit."""

    layer: int
    expert: int
    source_slot: int
    destination_slot: int


@dataclass(frozen=True, eq=False)
class Round:
    """Transfers that are staged and committed together.

    Args:
        number: of the round, from 0.
        transfers: int64 ``[T, 4]``, rows as `Transfer`, sorted by layer and expert. All read the placement before the
            round.
        layers: layers whose maps this round changes.
        finished: those of them that reach the target in it.
    """

    number: int
    transfers: Ints
    layers: tuple[int, ...]
    finished: tuple[int, ...]

    def moved(self, home_rows: HomeRows) -> int:
        """Number of experts that change their rank."""
        return int(np.not_equal(*home_rows.rank_of(self.transfers[:, 2:]).T).sum())


@dataclass(frozen=True, eq=False)
class TransferSchedule:
    """All rounds from one placement to another.

    Args:
        current, target: home layout.
        transfers: int64 ``[T, 5]``: the round, then as `Round.transfers`; sorted.
        last_round: int64 ``[L]``, round in which each layer reaches the target; -1: it does not change.
        load: int64 ``[rounds, R']``, bytes that each rank receives from others in each round; ``R'`` is R times the
            number of groups of ranks that hold different layers.
    """

    current: Placement
    target: Placement
    transfers: Ints
    last_round: Ints
    load: Ints

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        numbers = np.arange(self.num_rounds + 1)
        first = np.searchsorted(self.transfers[:, 0], numbers).tolist()
        num_layers = self.current.num_layers
        of_layers = np.arange(num_layers) + np.maximum(self.last_round, 0) * num_layers
        changes = np.unique(
            np.concatenate([self.transfers[:, 0] * num_layers + self.transfers[:, 1], of_layers[self.last_round >= 0]])
        )
        layers, first_layer = (changes % num_layers).tolist(), np.searchsorted(changes // num_layers, numbers).tolist()
        last = self.last_round.tolist()
        rounds = []
        for number in range(self.num_rounds):
            changed = layers[first_layer[number] : first_layer[number + 1]]
            finished = tuple(layer for layer in changed if last[layer] == number)
            rows = self.transfers[first[number] : first[number + 1], 1:]
            rounds.append(Round(number, rows, tuple(changed), finished))
        return tuple(rounds)

    @property
    def num_rounds(self) -> int:
        return int(self.last_round.max(initial=-1)) + 1

    def after(self, placement: Placement, round_: Round) -> Placement:
        """Return the placement after a round, one epoch further: an epoch names one placement."""
        map_LP, home_LE = placement.physical_to_logical.copy(), placement.require_homes().copy()
        layer, expert, _, slot = round_.transfers.T
        map_LP[layer, slot] = expert
        home_LE[layer, expert] = slot
        if self.current.replica_slots:
            self._clear_replicas_of_homes(map_LP, layer, expert, slot)
            finished = list(round_.finished)
            map_LP[finished] = self.target.physical_to_logical[finished]
        epoch = placement.epoch + 1
        if round_.number == self.num_rounds - 1:
            epoch = max(epoch, self.target.epoch)
        return placement.stepped(map_LP, home_LE, epoch)

    def _clear_replicas_of_homes(self, map_LP: NDArray[np.int32], layer: Ints, expert: Ints, slot: Ints) -> None:
        """Empty the replica slots of experts whose home has come to the same rank."""
        placement = self.current
        first = slot // placement.slots_per_rank * placement.slots_per_rank + placement.homes_per_rank
        slots = first[:, None] + np.arange(placement.replica_slots)
        transfer, replica = np.nonzero(map_LP[layer[:, None], slots] == expert[:, None])
        map_LP[layer[transfer], slots[transfer, replica]] = EMPTY

    def digest(self) -> bytes:
        """16 bytes, equal on two ranks when they send and expect the same experts in the same order."""
        hasher = hashlib.blake2b(self.target.digest().encode(), digest_size=16)
        for array in (self.transfers, self.last_round, self.load):
            hasher.update(array.astype("<i8").tobytes())
        return hasher.digest()


def make_schedule(
    current: Placement,
    target: Placement,
    expert_bytes: Sequence[int],
    budget_bytes: int,
    holders: Sequence[int] | None = None,
    by_layer: bool = False,
    parts: int = 1,
) -> TransferSchedule:
    """Compute the rounds from ``current`` to ``target``, both in the home layout.

    Homes travel. Replica slots only change their map, since replicas are refreshed from their homes after every
    optimizer step and every commit. In a round no rank receives more than the budget: ``budget_bytes``, or the largest
    expert if that is more. An expert may change its slot on a rank on the way.

    Args:
        expert_bytes: per layer, bytes of an expert with its whole state.
        budget_bytes: bytes of experts from other ranks that a rank can stage.
        holders: per layer, a number that names the ranks that hold it: layers of different ranks (pipeline stages) do
            not share a budget. None: the same ranks hold all of them.
        by_layer: each round is of one layer, so that layers can be committed one by one.
        parts: D, number of ranks over which each home is divided: experts travel between ``R D`` ranks then.
    """
    home_rows = current.home_rows(parts)
    size_L = np.asarray(expert_bytes, dtype=np.int64)
    place_LE, target_LE = (home_rows.place_of(p.require_homes().astype(np.int64)) for p in (current, target))
    source_LE, destination_LE = place_LE // home_rows.rows, target_LE // home_rows.rows
    layer_M, expert_M = np.nonzero(source_LE != destination_LE)
    source_M = np.ascontiguousarray(source_LE[layer_M, expert_M])
    destination_M = np.ascontiguousarray(destination_LE[layer_M, expert_M])
    first_L = np.searchsorted(layer_M, np.arange(current.num_layers + 1))
    group_L = np.zeros_like(size_L) if holders is None else np.unique(holders, return_inverse=True)[1].astype(np.int64)
    holders_of_layer = current.num_ranks * parts
    num_ranks = int(group_L.max(initial=0) + 1) * holders_of_layer

    changes = (current.physical_to_logical != target.physical_to_logical).any(axis=1)
    best = float("inf")
    for cut, longest_first, enough in _METHODS:
        cycle_M = cut(first_L, source_M, destination_M, holders_of_layer)
        rank_M = source_M + group_L[layer_M] * holders_of_layer
        pack = partial(
            _pack, size_L=size_L, num_ranks=num_ranks, budget_bytes=budget_bytes, longest_first=longest_first
        )
        if by_layer:
            packed = _pack_by_layer(changes, cycle_M, layer_M, rank_M, pack)
        else:
            packed = (*pack(cycle_M, layer_M, rank_M), np.where(changes, 0, -1))
        if _share_of_bound(packed[1]) < best:
            best, (round_M, load, last_round) = _share_of_bound(packed[1]), packed
        if best <= enough:
            break
    order = _in_order(round_M)
    order = order[_in_order(layer_M[order])]
    rows = follow_slots(first_L, expert_M[order], round_M[order], place_LE, target_LE, home_rows.rows, last_round)
    rows[:, 3:] = home_rows.slot_at(rows[:, 3:])
    np.maximum.at(last_round, layer_M, round_M)
    return TransferSchedule(current, target, rows[_in_order(rows[:, 0])], last_round, load)


def _pack(
    cycle_M: Ints,
    layer_M: Ints,
    rank_M: Ints,
    size_L: Ints,
    num_ranks: int,
    budget_bytes: int,
    longest_first: bool,
) -> tuple[Ints, Ints]:
    """Return the round of each move and the bytes of each rank in each round. Cycles of the largest experts come first;
    of those, as the layers come, or the longest first, so that shorter ones fill the gaps."""
    length_N = np.bincount(cycle_M)
    first_N = np.concatenate([[0], np.cumsum(length_N)])
    by_cycle = np.argsort(cycle_M, kind="stable")
    bytes_N = size_L[layer_M[by_cycle[first_N[:-1]]]]
    order_N = np.lexsort((-length_N if longest_first else np.arange(len(length_N)), -bytes_N))
    budget = max(budget_bytes, int(size_L.max(initial=1)))
    round_N, load = first_fit(order_N, first_N, rank_M[by_cycle], bytes_N, num_ranks, budget)
    return round_N[cycle_M], load


def _pack_by_layer(
    changes: NDArray[np.bool_], cycle_M: Ints, layer_M: Ints, rank_M: Ints, pack: Callable[..., tuple[Ints, Ints]]
) -> tuple[Ints, Ints, Ints]:
    """Pack as `_pack`, with separate rounds for each layer that changes. Returns also the first round of each layer, -1
    for those that do not change. A layer where only replicas change has a round without transfers."""
    round_M, first_L = np.empty_like(layer_M), np.full(len(changes), -1, dtype=np.int64)
    loads: list[Ints] = []
    none = pack(cycle_M[:0], layer_M[:0], rank_M[:0])[1]
    for layer in np.flatnonzero(changes).tolist():
        here = layer_M == layer
        first_L[layer] = len(loads)
        round_M[here], load = pack(np.unique(cycle_M[here], return_inverse=True)[1], layer_M[here], rank_M[here])
        round_M[here] += len(loads)
        loads += list(load) or [np.zeros(none.shape[1], dtype=np.int64)]
    return round_M, np.array(loads, dtype=np.int64).reshape(-1, none.shape[1]), first_L


def _in_order(keys: Ints) -> Ints:
    """Indices that sort the keys, stably. Counts of layers and rounds are mostly small enough for a radix sort."""
    small = keys.max(initial=0) <= np.iinfo(np.uint16).max
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def _share_of_bound(load: Ints) -> float:
    """Ratio of the rounds' bytes to their lower bound."""
    return float(load.max(axis=1, initial=0).sum()) / max(int(load.sum(axis=0).max(initial=0)), 1)
