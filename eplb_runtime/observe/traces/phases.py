"""Which phase of which layer, and of which micro-batch, work belongs to: a kernel to the innermost phase in which it
was launched, what a CPU does to the one in which it began."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .columns import NO_CORRELATION, Columns, Intervals, length, overlap, union
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


_Key = tuple[str, str, int | None, int | None]


def phases_of(
    columns: Columns, spans_N2: Intervals, computes_N: NDArray[np.bool_], computing: Intervals
) -> tuple[PhaseTime, ...]:
    """Return the phases that a trace's spans name.

    Args:
        spans_N2: what ran, as `analysis.work_of` orders it.
        computes_N: whether it computes.
        computing: their union.
    """
    marks = _Marks(columns)
    if not marks.keys:
        return ()
    number_of = {key: number for number, key in enumerate(dict.fromkeys(marks.keys))}
    phase_N = np.array([number_of[key] for key in marks.keys] + [NOWHERE])[_owners(columns, marks, spans_N2)]
    host: dict[_Key, list[float]] = defaultdict(list)
    for key, took in zip(marks.keys, marks.took, strict=True):
        host[key].append(took)
    found = []
    for key, number in number_of.items():
        mine_N = phase_N == number
        own, travel = length(union(spans_N2[mine_N & computes_N])), union(spans_N2[mine_N & ~computes_N])
        times = (sum(host[key]), own, length(travel), length(travel) - overlap(travel, computing))
        found.append(PhaseTime(*key, len(host[key]), *(round(us, 3) for us in times)))
    return tuple(found)


class _Marks:
    """The spans that name phases, by thread.

    Attributes:
        keys: phase, direction, layer and micro-batch of each.
        took: microseconds of each.
        enclosing: finds one by a time and a thread.
        main: the thread with most of them; that of training.
    """

    def __init__(self, columns: Columns) -> None:
        all_names = columns.names.all
        names = [str(all_names[number]) for number in columns.marks.name_N.tolist()]
        spans_N2, where_N = columns.marks.spans_N2, columns.marks.where_N
        order = np.lexsort((-spans_N2[:, 1], spans_N2[:, 0], where_N)).tolist() if len(names) else []
        steps = np.sort([spans_N2[index, 0] for index in order if STEP.match(names[index])])
        of_batch = [index for index in order if micro_batch_of(names[index]) is not None]
        batches = _Enclosing(spans_N2[of_batch], where_N[of_batch])
        chosen = [index for index in order if phase_of(names[index]) is not None]
        seen: dict[tuple[str, str, int], int] = defaultdict(int)
        self.keys: list[_Key] = []
        for index in chosen:
            found, begin = phase_of(names[index]), spans_N2[index, :1]
            assert found is not None
            layer = found.layer
            if layer is None and found.direction:
                this_step = (found.phase, found.direction, int(np.searchsorted(steps, begin, "right")[0]))
                layer = seen[this_step]
                seen[this_step] += 1
            batch = int(batches.at(begin, int(where_N[index]))[0])
            micro_batch = None if batch == NOWHERE else micro_batch_of(names[of_batch[batch]])
            self.keys.append((found.phase, found.direction, layer, micro_batch))
        self.took = (spans_N2[chosen, 1] - spans_N2[chosen, 0]).tolist()
        self.enclosing = _Enclosing(spans_N2[chosen], where_N[chosen])
        self.main = int(np.bincount(where_N[chosen]).argmax()) if chosen else NOWHERE


class _Enclosing:
    """Finds the innermost of nested spans of a thread around a time; they come ordered by thread, begin and end."""

    def __init__(self, spans_N2: Intervals, where_N: NDArray[np.int64]) -> None:
        edges: dict[int, list[tuple[float, int]]] = defaultdict(list)
        open_spans: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for number, ((begin, end), place) in enumerate(zip(spans_N2.tolist(), where_N.tolist(), strict=True)):
            _leave(open_spans[place], edges[place], begin)
            open_spans[place].append((end, number))
            edges[place].append((begin, number))
        for place, stack in open_spans.items():
            _leave(stack, edges[place], float("inf"))
        self.edges = {
            place: (np.array([at for at, _ in found]), np.array([number for _, number in found], dtype=np.int64))
            for place, found in edges.items()
        }

    def at(self, times_N: NDArray[np.float64], place: int) -> NDArray[np.int64]:
        """Return the number of the span around each time, or `NOWHERE`."""
        if place not in self.edges:
            return np.full(len(times_N), NOWHERE, dtype=np.int64)
        at_M, number_M = self.edges[place]
        index_N = np.searchsorted(at_M, times_N, side="right") - 1
        return np.where(index_N < 0, NOWHERE, number_M[np.maximum(index_N, 0)])


def _leave(stack: list[tuple[float, int]], edges: list[tuple[float, int]], until: float) -> None:
    """End the spans that end by then; what is around them goes on."""
    while stack and stack[-1][0] <= until:
        end, _ = stack.pop()
        edges.append((end, stack[-1][1] if stack else NOWHERE))


def _owners(columns: Columns, marks: _Marks, spans_N2: Intervals) -> NDArray[np.int64]:
    """Return the mark that each piece of work belongs to, or `NOWHERE`. A thread without marks, as autograd's or
    gloo's, does what the training thread waits for."""
    if not len(columns.device):
        return marks.enclosing.at(spans_N2[:, 0], marks.main)
    launches, link_N = columns.launches, columns.device.link_N
    order = np.argsort(launches.link_N, kind="stable")
    links, begins, places = launches.link_N[order], launches.spans_N2[order, 0], launches.where_N[order]
    index_N = np.searchsorted(links, link_N)
    known_N = (link_N != NO_CORRELATION) & (index_N < len(links))
    known_N[known_N] &= links[index_N[known_N]] == link_N[known_N]
    owner_N = np.full(len(link_N), NOWHERE, dtype=np.int64)
    for place in np.unique(places).tolist():
        here_N = known_N.copy()
        here_N[known_N] &= places[index_N[known_N]] == place
        thread = place if place in marks.enclosing.edges else marks.main
        owner_N[here_N] = marks.enclosing.at(begins[index_N[here_N]], thread)
    return owner_N
