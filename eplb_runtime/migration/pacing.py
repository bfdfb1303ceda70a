"""Chooses the rounds that overlap with the next step: as many as arrive before their layers need them.

Each round is of one layer and has a deadline, the start of that layer's forward; rounds travel one after another.
Moore and Hodgson's rule finds the largest number in time (Moore, "An n job, one machine sequencing algorithm for
minimizing the number of late jobs", Management Science 15, 1968): in the order of deadlines, whenever a round would be
late, the longest so far is left out. Layers whose deadlines are too near to hide them come last, one a step, and
training waits for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .schedule import Round

_LONGEST_US = 1 << 40
_WAITED_FOR_AFTER = 2
"""Training waits for a layer that was late this often."""
_LATER_FACTOR = 1.1
"""A forward is expected to begin at most this many times later than in the step before."""


class StartTimes:
    """Start times of the layers' forwards after the end of a step. A later start is followed only in part, and an
    earlier one at once: rounds that count on a long step are late the next time."""

    def __init__(self, num_layers: int) -> None:
        self._seconds_L = [0.0] * num_layers

    def observe(self, layer: int, seconds: float) -> None:
        so_far = self._seconds_L[layer]
        self._seconds_L[layer] = min(seconds, _LATER_FACTOR * so_far) if so_far else seconds

    def microseconds(self) -> tuple[int, ...]:
        """Start times of all layers; layers of other stages are taken to run one after another like the ones here."""
        starts = list(self._seconds_L)
        last = max((layer for layer, start in enumerate(starts) if start), default=None)
        for layer, start in enumerate(starts):
            if not start and last is not None:
                starts[layer] = starts[last] * (layer + 1) / (last + 1)
        return tuple(int(1e6 * start) for start in starts)


@dataclass(frozen=True)
class Pace:
    """Rank 0's measurements, known to all ranks, in whole microseconds so that all compute the same.

    Args:
        deadlines_L: from the end of a step to the forward of each layer.
        us_per_mib: of received bytes.
    """

    deadlines_L: tuple[int, ...]
    us_per_mib: int

    def encode(self) -> Tensor:
        """int64 ``[L + 1]``."""
        words = (*self.deadlines_L, self.us_per_mib)
        return torch.tensor([min(max(word, 0), _LONGEST_US) for word in words])

    @classmethod
    def decode(cls, words: Tensor) -> Pace:
        *deadlines, us_per_mib = words.tolist()
        return cls(tuple(deadlines), us_per_mib)

    def slower(self) -> Pace:
        """Half the speed, after a round was late. Every rank knows that, so all do the same."""
        return replace(self, us_per_mib=min(2 * self.us_per_mib, _LONGEST_US))

    def microseconds(self, nbytes: int) -> int:
        """Transfer time of so many bytes."""
        return -(-nbytes * self.us_per_mib >> 20)


@dataclass(frozen=True)
class Batch:
    """Rounds that travel together. ``waited_for``: training waits for them."""

    rounds: tuple[Round, ...]
    waited_for: bool


def next_batch(
    open_: Mapping[int, Sequence[Round]],
    nbytes: Mapping[int, int],
    late: Mapping[int, int],
    pace: Pace,
    in_flight_bytes: int,
) -> Batch:
    """Return the rounds that overlap with the next step, the same on every rank: of the ``open_`` ones of each layer,
    by the bytes of each, how often a layer was late, and the bytes that may be in flight."""
    first = sorted((rounds[0] for rounds in open_.values()), key=lambda r: (pace.deadlines_L[r.layers[0]], r.number))
    taken: list[tuple[int, Round]] = []
    bytes_taken = microseconds = 0
    for round_ in first:
        layer, size = round_.layers[0], nbytes[round_.number]
        if late.get(layer, 0) >= _WAITED_FOR_AFTER or bytes_taken + size > in_flight_bytes:
            continue
        taken.append((pace.microseconds(size), round_))
        bytes_taken, microseconds = bytes_taken + size, microseconds + taken[-1][0]
        if microseconds > pace.deadlines_L[layer]:
            longest = max(taken, key=lambda pair: (pair[0], -pair[1].number))
            taken.remove(longest)
            bytes_taken, microseconds = bytes_taken - nbytes[longest[1].number], microseconds - longest[0]
    if taken:
        return Batch(tuple(round_ for _, round_ in taken), waited_for=False)
    return Batch((first[-1],), waited_for=True)
