"""Which phase of which layer, and of which micro-batch, work belongs to: a kernel to the innermost phase in which it
was launched, what a CPU does to the one in which it began."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kinds import ANNOTATIONS, DEVICE_CATEGORIES, LAUNCH_CATEGORIES, is_step, micro_batch_of, phase_of
from .reading import Place, Span

Intervals = NDArray[np.float64]
"""float64 ``[N, 2]``, begin and end of each."""


def union(spans_N2: Intervals) -> Intervals:
    """Return the same times in order, none twice."""
    if not len(spans_N2):
        return np.empty((0, 2))
    spans_N2 = spans_N2[np.argsort(spans_N2[:, 0], kind="stable")]
    reach_N = np.maximum.accumulate(spans_N2[:, 1])
    first_N = np.concatenate([[True], spans_N2[1:, 0] > reach_N[:-1]])
    last_N = np.concatenate([first_N[1:], [True]])
    return np.stack([spans_N2[first_N, 0], reach_N[last_N]], axis=1)


def length(union_N2: Intervals) -> float:
    """Return the length of a `union`."""
    return float((union_N2[:, 1] - union_N2[:, 0]).sum())


def overlap(one_N2: Intervals, other_N2: Intervals) -> float:
    """Return how much of one `union` is in another."""
    both = length(union(np.concatenate([one_N2, other_N2])))
    return length(one_N2) + length(other_N2) - both


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


class _Innermost:
    """Finds the innermost of a thread's nested spans around a time, and returns what was noted of it."""

    def __init__(self, noted: Iterable[tuple[Span, Any]]) -> None:
        self._edges: defaultdict[Place, tuple[list[float], list[Any]]] = defaultdict(lambda: ([], []))
        open_spans: defaultdict[Place, list[tuple[float, Any]]] = defaultdict(list)
        for span, value in sorted(noted, key=lambda pair: (pair[0].begin, -pair[0].end)):
            self._leave(span.place, open_spans[span.place], span.begin)
            open_spans[span.place].append((span.end, value))
            self._enter(span.place, span.begin, value)
        for place, stack in open_spans.items():
            self._leave(place, stack, float("inf"))

    def __contains__(self, place: Place) -> bool:
        return place in self._edges

    def at(self, place: Place, time: float) -> Any:
        """Return what was noted; None: no span is around this time."""
        times, values = self._edges.get(place, ([], []))
        index = bisect_right(times, time) - 1
        return values[index] if index >= 0 else None

    def _enter(self, place: Place, at: float, value: Any) -> None:
        times, values = self._edges[place]
        times.append(at)
        values.append(value)

    def _leave(self, place: Place, stack: list[tuple[float, Any]], until: float) -> None:
        """End the spans that end by then; what is around them goes on."""
        while stack and stack[-1][0] <= until:
            end, _ = stack.pop()
            self._enter(place, end, stack[-1][1] if stack else None)


def phases_of(
    spans: Sequence[Span], work: Sequence[Span], computes_N: NDArray[np.bool_], computing: Intervals
) -> tuple[PhaseTime, ...]:
    """Return the phases that a trace's spans name.

    Args:
        work: what ran, and whether it computes; ``computing``: the union of what does.
    """
    marks = _marks(spans)
    if not marks:
        return ()
    around = _Innermost(marks)
    # A thread without marks, as autograd's or gloo's, does what the training thread waits for.
    main = Counter(span.place for span, _ in marks).most_common(1)[0][0]
    launches: dict[Any, Span] = {}
    for span in spans:
        if span.category in LAUNCH_CATEGORIES and span.link is not None:
            launches.setdefault(span.link, span)
    numbers: defaultdict[_Key | None, list[int]] = defaultdict(list)
    for number, span in enumerate(work):
        began = launches.get(span.link) if span.category in DEVICE_CATEGORIES else Span("", "", main, *span[3:])
        if began is not None:
            place = began.place if began.place in around else main
            numbers[around.at(place, began.begin)].append(number)
    times_N2 = np.array([span[3:5] for span in work]).reshape(-1, 2)
    host: defaultdict[_Key, list[float]] = defaultdict(list)
    for span, key in marks:
        host[key].append(span.end - span.begin)
    found = []
    for key, took in host.items():
        mine = np.array(numbers[key], dtype=np.int64)
        own, travel = (union(times_N2[mine[computes_N[mine] == is_compute]]) for is_compute in (True, False))
        us = (sum(took), length(own), length(travel), length(travel) - overlap(travel, computing))
        found.append(PhaseTime(*key, len(took), *(round(one, 3) for one in us)))
    return tuple(found)


def _marks(spans: Iterable[Span]) -> list[tuple[Span, _Key]]:
    """Return the spans that name phases, in order, each with its phase, direction, layer and micro-batch."""
    noted = sorted((one for one in spans if one.category in ANNOTATIONS), key=lambda one: (one.begin, -one.end))
    steps = [span.begin for span in noted if is_step(span.name)]
    batches = _Innermost((span, batch) for span in noted if (batch := micro_batch_of(span.name)) is not None)
    seen: Counter[Any] = Counter()
    found = []
    for span in noted:
        if (kind := phase_of(span.name)) is None:
            continue
        layer = kind.layer
        if layer is None and kind.direction:
            this_step = kind.phase, kind.direction, bisect_right(steps, span.begin)
            layer = seen[this_step]
            seen[this_step] += 1
        found.append((span, (kind.phase, kind.direction, layer, batches.at(span.place, span.begin))))
    return found
