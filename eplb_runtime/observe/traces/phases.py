"""Which phase of which layer, and of which micro-batch, work belongs to: a kernel to the innermost phase in which it
was launched, what a CPU does to the one in which it began."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import NO_CORRELATION, Columns
from .intervals import Intervals, length, overlap, union
from .kinds import STEP, micro_batch_of, phase_of

NOWHERE = -1


@dataclass(frozen=True)
class PhaseTime:
    """What one phase took, over all steps of the trace.

    Args:
        phase, direction: as the spans name them: F forward, B backward, W gradients of weights.
        layer: as they name it; where they do not, how many such spans came before it in the same step.
        micro_batch: where torch.distributed.pipelining names it.
        spans: of the host.
        host_us: of the thread that runs the phase.
        compute_us, communication_us: of what it started, times that overlap counted once.
        exposed_us: of its communication, while nothing at all computed.
    """

    phase: str
    direction: str
    layer: int | None
    micro_batch: int | None
    spans: int
    host_us: float
    compute_us: float
    communication_us: float
    exposed_us: float

    @property
    def name(self) -> str:
        """Return phase and direction, as ``dispatch(F)``."""
        return f"{self.phase}({self.direction})" if self.direction else self.phase


_Key = tuple[str, str, int, int]


def phases_of(
    columns: Columns, spans_N2: Intervals, computes_N: NDArray[np.bool_], computing: Intervals
) -> tuple[PhaseTime, ...]:
    """The phases that a trace's spans name.

    Args:
        spans_N2: what ran, as `analysis.work_of` orders it.
        computes_N: whether it computes.
        computing: their union.
    """
    marks = _Marks(columns)
    if not marks.keys:
        return ()
    owner_N = _owners(columns, marks, spans_N2)
    number_of: dict[_Key, int] = {key: number for number, key in enumerate(dict.fromkeys(marks.keys))}
    of_mark = np.array([number_of[key] for key in marks.keys] + [NOWHERE])
    phase_N = of_mark[owner_N]
    host: dict[int, list[float]] = defaultdict(list)
    for key, took in zip(marks.keys, marks.took, strict=True):
        host[number_of[key]].append(took)
    found = []
    for (phase, direction, layer, micro_batch), number in number_of.items():
        mine_N = phase_N == number
        own = union(spans_N2[mine_N & computes_N])
        travel = union(spans_N2[mine_N & ~computes_N])
        found.append(
            PhaseTime(
                phase,
                direction,
                None if layer == NOWHERE else layer,
                None if micro_batch == NOWHERE else micro_batch,
                len(host[number]),
                round(sum(host[number]), 3),
                round(length(own), 3),
                round(length(travel), 3),
                round(length(travel) - overlap(travel, computing), 3),
            )
        )
    return tuple(found)


class _Marks:
    """The spans that name phases, by thread.

    Attributes:
        keys: phase, direction, layer and micro-batch of each.
        took: microseconds of each.
        main: the thread with most of them; that of training.
    """

    def __init__(self, columns: Columns) -> None:
        names = [str(columns.names.all[number]) for number in columns.marks.name_N.tolist()]
        spans_N2, where_N = columns.marks.spans_N2, columns.marks.where_N
        order = np.lexsort((-spans_N2[:, 1], spans_N2[:, 0], where_N)).tolist() if len(names) else []
        chosen = [index for index in order if phase_of(names[index]) is not None]
        steps = np.sort([spans_N2[index, 0] for index in order if STEP.match(names[index])])
        batches = _Enclosing([(spans_N2[i], int(where_N[i])) for i in order if micro_batch_of(names[i]) is not None])
        of_batch = [micro_batch_of(names[i]) for i in order if micro_batch_of(names[i]) is not None]
        seen: dict[tuple[str, str, int], int] = defaultdict(int)
        self.keys: list[_Key] = []
        for index in chosen:
            found = phase_of(names[index])
            assert found is not None
            layer = found.layer
            if layer == NOWHERE and found.direction:
                this_step = (found.phase, found.direction, int(np.searchsorted(steps, spans_N2[index, 0], "right")))
                layer = seen[this_step]
                seen[this_step] += 1
            batch = batches.at(spans_N2[index, 0], int(where_N[index]))
            number = of_batch[batch] if batch != NOWHERE else None
            self.keys.append((found.phase, found.direction, layer, NOWHERE if number is None else number))
        self.took = [float(spans_N2[index, 1] - spans_N2[index, 0]) for index in chosen]
        self.enclosing = _Enclosing([(spans_N2[index], int(where_N[index])) for index in chosen])
        places = np.array([int(where_N[index]) for index in chosen], dtype=np.int64)
        self.main = int(np.bincount(places).argmax()) if len(places) else NOWHERE

    def at_all(self, times_N: NDArray[np.float64], place: int) -> NDArray[np.int64]:
        """The mark around each time on a thread. One without marks, as autograd's, does what the training thread waits
        for."""
        return self.enclosing.at_all(times_N, place if self.enclosing.knows(place) else self.main)


class _Enclosing:
    """Finds the innermost of nested spans of a thread around a time; they come ordered by thread, begin and end."""

    def __init__(self, spans: list[tuple[Intervals, int]]) -> None:
        edges: dict[int, list[tuple[float, int]]] = defaultdict(list)
        standing: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for number, ((begin, end), place) in enumerate(spans):
            stack = standing[place]
            _leave(stack, edges[place], begin)
            stack.append((end, number))
            edges[place].append((begin, number))
        for place, stack in standing.items():
            _leave(stack, edges[place], float("inf"))
        self._edges = {
            place: (np.array([at for at, _ in found]), np.array([number for _, number in found], dtype=np.int64))
            for place, found in edges.items()
        }

    def knows(self, place: int) -> bool:
        return place in self._edges

    def at(self, time: float, place: int) -> int:
        """Number of the span, or `NOWHERE`."""
        return int(self.at_all(np.array([time]), place)[0])

    def at_all(self, times_N: NDArray[np.float64], place: int) -> NDArray[np.int64]:
        if place not in self._edges:
            return np.full(len(times_N), NOWHERE, dtype=np.int64)
        at_M, number_M = self._edges[place]
        index_N = np.searchsorted(at_M, times_N, side="right") - 1
        return np.where(index_N < 0, NOWHERE, number_M[np.maximum(index_N, 0)])


def _leave(stack: list[tuple[float, int]], edges: list[tuple[float, int]], until: float) -> None:
    """Spans that end by then are over; what is around them goes on."""
    while stack and stack[-1][0] <= until:
        end, _ = stack.pop()
        edges.append((end, stack[-1][1] if stack else NOWHERE))


def _owners(columns: Columns, marks: _Marks, spans_N2: Intervals) -> NDArray[np.int64]:
    """The mark that each piece of work belongs to, or `NOWHERE`."""
    if not len(
        columns.device
    ):  # gloo's threads have no marks of their own: what they do, the training thread asked for
        return marks.enclosing.at_all(spans_N2[:, 0], marks.main)
    launches = columns.launches
    order = np.argsort(launches.link_N, kind="stable")
    links, begins, places = launches.link_N[order], launches.spans_N2[order, 0], launches.where_N[order]
    link_N = columns.device.link_N
    index_N = np.searchsorted(links, link_N)
    known_N = (link_N != NO_CORRELATION) & (index_N < len(links))
    known_N[known_N] &= links[index_N[known_N]] == link_N[known_N]
    owner_N = np.full(len(link_N), NOWHERE, dtype=np.int64)
    for place in np.unique(places):
        here_N = known_N.copy()
        here_N[known_N] &= places[index_N[known_N]] == place
        owner_N[here_N] = marks.at_all(begins[index_N[here_N]], int(place))
    return owner_N
