"""Who sends which expert to whom, in which round: a pure function of two placements and the byte sizes.

Every rank computes the same schedule from the same placements. A round is the unit of commit: before and after it
stands a valid placement, so a rebalance that breaks off between rounds leaves a whole one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..placement import EMPTY, Placement

IntArray = NDArray[np.int32]


@dataclass(frozen=True)
class Transfer:
    """One expert's way, with its whole state, from its home slot to its next one (physical slots).

    On equal ranks the transfer is a local copy.
    """

    layer: int
    expert: int
    source_slot: int
    destination_slot: int
    nbytes: int


@dataclass(frozen=True)
class LayerChange:
    """The rows of the placement that a round gives a layer: ``physical_to_logical[P]`` and ``home[E]``."""

    physical_to_logical: IntArray
    home: IntArray


@dataclass
class Round:
    """Transfers that are staged together and committed together."""

    transfers: list[Transfer] = field(default_factory=list)
    after: dict[int, LayerChange] = field(default_factory=dict)


@dataclass(frozen=True)
class TransferSchedule:
    """All rounds from one placement to another."""

    rounds: tuple[Round, ...]
    target: Placement

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for round_ in self.rounds for transfer in round_.transfers]

    def digest(self) -> bytes:
        """Equal on two ranks when they would send and expect the same bytes in the same order."""
        hasher = hashlib.blake2b(self.target.digest().encode(), digest_size=16)
        for round_ in self.rounds:
            hasher.update(b"round")
            for t in round_.transfers:
                row = (t.layer, t.expert, t.source_slot, t.destination_slot, t.nbytes)
                hasher.update(np.array(row, dtype="<i8").tobytes())
        return hasher.digest()


def make_schedule(
    current: Placement,
    target: Placement,
    expert_bytes: Sequence[int],
    budget_bytes: int,
) -> TransferSchedule:
    """Rounds that lead from ``current`` to ``target``, both in the home layout.

    Homes travel; replica slots only change their map, since copies are refreshed from their homes anyway (after every
    optimizer step, and after a commit). In a round no rank receives or sends more than ``budget_bytes``, unless a
    single cycle of experts needs more: the least that can be committed is one expert per rank.

    Args:
        expert_bytes: per layer, bytes of an expert with its whole state.
        budget_bytes: bytes per rank and round.
    """
    rounds: list[Round] = []
    open_round = _OpenRound(current, expert_bytes, budget_bytes)
    changed = np.flatnonzero((current.physical_to_logical != target.physical_to_logical).any(axis=1))
    for layer in changed.tolist():
        before = _layer_of(current, layer)
        whole = _layer_of(target, layer)
        if not open_round.try_extend(layer, before, whole):
            if open_round.round.after:
                rounds.append(open_round.close())
            if not open_round.try_extend(layer, before, whole):
                reached = before
                for step in _intermediate(before, whole, current.slots_per_rank, current.homes_per_rank):
                    if not open_round.try_extend(layer, before, step):
                        if open_round.round.after:
                            rounds.append(open_round.close())
                            before = reached
                        open_round.extend(layer, before, step)
                    reached = step
    if open_round.round.after:
        rounds.append(open_round.close())
    return TransferSchedule(tuple(rounds), target)


class _OpenRound:
    """The round being filled, with the bytes that each rank sends and receives in it."""

    def __init__(self, current: Placement, expert_bytes: Sequence[int], budget_bytes: int) -> None:
        self._slots_per_rank = current.slots_per_rank
        self._num_ranks = current.num_ranks
        self._expert_bytes = expert_bytes
        self._budget = budget_bytes
        self._open()

    def _open(self) -> None:
        self.round = Round()
        self._by_layer: dict[int, list[Transfer]] = {}

    def try_extend(self, layer: int, before: LayerChange, after: LayerChange) -> bool:
        """Take the layer to ``after`` within this round, if every rank stays in its budget."""
        transfers = self._transfers(layer, before, after)
        others = [t for key, kept in self._by_layer.items() if key != layer for t in kept]
        sent, received = self._bytes_per_rank([*others, *transfers])
        if max(sent.max(), received.max()) > self._budget:
            return False
        self._put(layer, transfers, after)
        return True

    def extend(self, layer: int, before: LayerChange, after: LayerChange) -> None:
        """The same without asking for the budget: for the least step that can be committed."""
        self._put(layer, self._transfers(layer, before, after), after)

    def close(self) -> Round:
        done = self.round
        self._open()
        return done

    def _put(self, layer: int, transfers: list[Transfer], after: LayerChange) -> None:
        self._by_layer[layer] = transfers
        self.round.transfers = [t for kept in self._by_layer.values() for t in kept]
        self.round.after[layer] = after

    def _bytes_per_rank(self, transfers: Sequence[Transfer]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        sent, received = np.zeros((2, self._num_ranks), dtype=np.int64)
        for t in transfers:
            source, destination = t.source_slot // self._slots_per_rank, t.destination_slot // self._slots_per_rank
            received[destination] += t.nbytes  # a local move is staged too
            if source != destination:
                sent[source] += t.nbytes
        return sent, received

    def _transfers(self, layer: int, before: LayerChange, after: LayerChange) -> list[Transfer]:
        """The homes that ``after`` puts elsewhere, read from where they stand in ``before``; by destination slot."""
        moved = np.flatnonzero(before.home != after.home)
        moved = moved[np.argsort(after.home[moved])]
        return [
            Transfer(layer, expert, int(before.home[expert]), int(after.home[expert]), self._expert_bytes[layer])
            for expert in moved.tolist()
        ]


def _layer_of(placement: Placement, layer: int) -> LayerChange:
    assert placement.home is not None
    return LayerChange(placement.physical_to_logical[layer], placement.home[layer])


def _intermediate(
    before: LayerChange, after: LayerChange, slots_per_rank: int, homes_per_rank: int
) -> Iterator[LayerChange]:
    """Valid placements from ``before`` to ``after``: the homes cycle by cycle, then the replica slots.

    A cycle of slots that exchange their experts can be committed alone: afterwards every expert has one home again.
    """
    map_, home = before.physical_to_logical.copy(), before.home.copy()
    is_home_slot = np.arange(len(map_)) % slots_per_rank < homes_per_rank
    for cycle in _cycles(before, after, is_home_slot):
        for slot in cycle:
            expert = after.physical_to_logical[slot]
            rank = slot // slots_per_rank
            replicas = slice(rank * slots_per_rank + homes_per_rank, (rank + 1) * slots_per_rank)
            map_[replicas][map_[replicas] == expert] = EMPTY
            map_[slot] = expert
            home[expert] = slot
        yield LayerChange(map_.copy(), home.copy())
    if (map_ != after.physical_to_logical).any():
        yield after


def _cycles(before: LayerChange, after: LayerChange, is_home_slot: NDArray[np.bool_]) -> Iterator[list[int]]:
    """Home slots that exchange experts among themselves, one group at a time, lowest slot first."""
    pending = np.flatnonzero(is_home_slot & (before.physical_to_logical != after.physical_to_logical)).tolist()
    seen: set[int] = set()
    for start in pending:
        if start in seen:
            continue
        cycle, slot = [], start
        while slot not in seen:
            seen.add(slot)
            cycle.append(slot)
            slot = int(after.home[before.physical_to_logical[slot]])
        yield cycle
