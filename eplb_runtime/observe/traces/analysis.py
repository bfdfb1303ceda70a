"""What a rank did with its time, from its trace: busy and idle per stream, communication under compute and exposed, and
both for each phase of each layer.

On a GPU that is what its streams ran. On a CPU streams are threads: operators compute, the spans of gloo communicate.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, read_columns
from .intervals import NONE, Intervals, length, overlap, union, without
from .kinds import COMPUTE, STEP, kind_of_gloo
from .phases import PhaseTime, phases_of
from .reading import OnProgress, TraceError


@dataclass(frozen=True)
class Communication:
    """Time in which anything travelled, times that overlap counted once. ``hidden_us`` of it something computed,
    ``exposed_us`` nothing did."""

    us: float
    hidden_us: float
    exposed_us: float
    hidden_share: float


@dataclass(frozen=True)
class StreamTimes:
    """A stream of a GPU or a thread of a CPU. ``kinds``: microseconds by kind."""

    name: str
    busy_us: float
    idle_us: float
    kinds: dict[str, float]


@dataclass(frozen=True)
class Kernel:
    """All runs of one kernel, or of one of gloo's or torch's operations. ``us``: their durations added up."""

    name: str
    kind: str
    count: int
    us: float


@dataclass(frozen=True, eq=False)
class TraceTrack:
    """When a stream did work of a kind: float64 ``[N, 2]``, microseconds since the first begin."""

    stream: str
    kind: str
    spans_N2: Intervals


@dataclass(frozen=True, eq=False)
class Analysis:
    """One trace.

    Args:
        device: ``"gpu"`` or ``"cpu"``.
        span_us: from the first begin to the last end of what ran.
        busy_us: in which anything ran.
        compute_us: in which anything computed.
        steps: that the profiler has marked; ``step_us``: median of them, 0 where there is none; ``step_spread_us``:
            from their first to their third quartile.
        kinds: by kind of work, runs and their durations added up.
        tracks, exposed_N2: for drawing: what ran when, and when communication was exposed.
    """

    file: str
    rank: int | None
    device: str
    span_us: float
    busy_us: float
    idle_us: float
    compute_us: float
    steps: int
    step_us: float
    step_spread_us: float
    communication: Communication
    kinds: dict[str, dict[str, float]]
    streams: tuple[StreamTimes, ...]
    kernels: tuple[Kernel, ...]
    phases: tuple[PhaseTime, ...]
    tracks: tuple[TraceTrack, ...] = field(repr=False)
    exposed_N2: Intervals = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; without what is only drawn."""
        fields = asdict(replace(self, tracks=(), exposed_N2=NONE))
        return {key: value for key, value in fields.items() if key not in ("tracks", "exposed_N2")}


@dataclass(frozen=True)
class Work:
    """What ran: ``[N]`` spans with their stream, kind and name.

    Args:
        kind_N: index into ``kinds``.
        names: of the kernels.
    """

    spans_N2: Intervals
    where_N: NDArray[np.int64]
    kind_N: NDArray[np.int64]
    name_N: NDArray[np.int64]
    kinds: list[str]
    names: list[str]

    def union_of(self, chosen_N: NDArray[np.bool_]) -> Intervals:
        return union(self.spans_N2[chosen_N])

    @property
    def computes_N(self) -> NDArray[np.bool_]:
        return np.array([kind == COMPUTE for kind in self.kinds] or [False])[self.kind_N]


def analyse(path: Path, on_progress: OnProgress = lambda count: None) -> Analysis:
    """Read a trace and say what the rank did with its time.

    Raises:
        TraceError: it is no trace, or nothing in it ran on a GPU or was computed by torch.
        OSError: it cannot be read.
    """
    columns = read_columns(path, on_progress)
    work = work_of(columns)
    if not len(work.spans_N2):
        raise TraceError(f"{path}: nothing in it was computed or sent: it needs kernels, or operators of a CPU")
    begin = float(work.spans_N2[:, 0].min())
    span = float(work.spans_N2[:, 1].max()) - begin
    computing = work.union_of(work.computes_N)
    communicating = work.union_of(~work.computes_N)
    busy = length(work.union_of(np.ones(len(work.kind_N), dtype=bool)))
    steps = [end - begin for begin, end in _steps(columns)]
    return Analysis(
        file=str(path),
        rank=columns.rank,
        device="gpu" if len(columns.device) else "cpu",
        span_us=_rounded(span),
        busy_us=_rounded(busy),
        idle_us=_rounded(span - busy),
        compute_us=_rounded(length(computing)),
        steps=len(steps),
        step_us=_rounded(statistics.median(steps)) if steps else 0.0,
        step_spread_us=_rounded(float(np.subtract(*np.percentile(steps, (75, 25))))) if steps else 0.0,
        communication=_communication(communicating, computing),
        kinds=_kinds(work),
        streams=_streams(work, columns, span),
        kernels=_kernels(work),
        phases=phases_of(columns, work.spans_N2, work.computes_N, computing),
        tracks=tuple(_tracks(work, columns, begin)),
        exposed_N2=without(communicating, computing) - begin,
    )


def _communication(communicating: Intervals, computing: Intervals) -> Communication:
    total, hidden = length(communicating), overlap(communicating, computing)
    share = hidden / total if total else 0.0
    return Communication(_rounded(total), _rounded(hidden), _rounded(total - hidden), round(share, 6))


def work_of(columns: Columns) -> Work:
    """Kernels of a GPU; else operators and gloo's spans of a CPU."""
    if len(columns.device):
        device = columns.device
        names = [name for name, _ in _pairs(columns)]
        kind_of_name = {number: columns.kind_of_device(number) for number in np.unique(device.name_N).tolist()}
        return _work(device.spans_N2, device.where_N, device.name_N, kind_of_name, names)
    operators, gloo = columns.operators, columns.gloo
    names = [name if isinstance(name, str) else name[0] for name in columns.names.all]
    spans_N2, where_N, name_N = _outermost(operators.spans_N2, operators.where_N, operators.name_N)
    kind_of_name = {number: kind_of_gloo(names[number]) or COMPUTE for number in range(len(names))}
    return _work(
        np.concatenate([spans_N2, gloo.spans_N2]),
        np.concatenate([where_N, gloo.where_N]),
        np.concatenate([name_N, gloo.name_N]),
        kind_of_name,
        names,
    )


def _pairs(columns: Columns) -> list[tuple[str, str]]:
    return [name if isinstance(name, tuple) else (name, "") for name in columns.names.all]


def _work(
    spans_N2: Intervals,
    where_N: NDArray[np.int64],
    name_N: NDArray[np.int64],
    kind_of_name: dict[int, str],
    names: list[str],
) -> Work:
    kinds = sorted(set(kind_of_name.values()))
    number_of = np.zeros(len(names) or 1, dtype=np.int64)
    for number, kind in kind_of_name.items():
        number_of[number] = kinds.index(kind)
    return Work(spans_N2, where_N, number_of[name_N], name_N, kinds, names)


def _outermost(
    spans_N2: Intervals, where_N: NDArray[np.int64], name_N: NDArray[np.int64]
) -> tuple[Intervals, NDArray[np.int64], NDArray[np.int64]]:
    """Of operators that call each other, those that nobody called."""
    order_N = np.lexsort((-spans_N2[:, 1], spans_N2[:, 0], where_N))
    spans_N2, where_N, name_N = spans_N2[order_N], where_N[order_N], name_N[order_N]
    keep_N = np.ones(len(order_N), dtype=bool)
    for place in np.unique(where_N):
        here = where_N == place
        reach = np.maximum.accumulate(spans_N2[here, 1])
        keep_N[np.flatnonzero(here)[1:]] = spans_N2[here, 0][1:] >= reach[:-1]
    return spans_N2[keep_N], where_N[keep_N], name_N[keep_N]


def _steps(columns: Columns) -> list[list[float]]:
    names = columns.names.all
    wanted = [index for index, number in enumerate(columns.marks.name_N.tolist()) if STEP.match(str(names[number]))]
    found: list[list[float]] = columns.marks.spans_N2[wanted].tolist()
    return found


def _kinds(work: Work) -> dict[str, dict[str, float]]:
    took_N = work.spans_N2[:, 1] - work.spans_N2[:, 0]
    found: dict[str, dict[str, float]] = {
        kind: {"count": int((work.kind_N == n).sum()), "us": _rounded(float(took_N[work.kind_N == n].sum()))}
        for n, kind in enumerate(work.kinds)
    }
    return {kind: row for kind, row in sorted(found.items(), key=lambda item: -item[1]["us"]) if row["count"]}


def _streams(work: Work, columns: Columns, span: float) -> tuple[StreamTimes, ...]:
    found = []
    for place, name in _place_names(work, columns).items():
        here_N = work.where_N == place
        kinds = {
            kind: _rounded(length(work.union_of(here_N & (work.kind_N == n))))
            for n, kind in enumerate(work.kinds)
            if (here_N & (work.kind_N == n)).any()
        }
        busy = length(work.union_of(here_N))
        found.append(StreamTimes(name, _rounded(busy), _rounded(span - busy), kinds))
    return tuple(sorted(found, key=lambda stream: -stream.busy_us))


def _tracks(work: Work, columns: Columns, begin: float) -> Iterator[TraceTrack]:
    for place, name in _place_names(work, columns).items():
        for n, kind in enumerate(work.kinds):
            chosen_N = (work.where_N == place) & (work.kind_N == n)
            if chosen_N.any():
                yield TraceTrack(name, kind, work.union_of(chosen_N) - begin)


def _place_names(work: Work, columns: Columns) -> dict[int, str]:
    """Of the streams that have work."""
    places: list[int] = np.unique(work.where_N).tolist()
    several = len({columns.places.all[place][0] for place in places}) > 1
    names = {}
    for place in places:
        pid, tid = columns.places.all[place]
        name = columns.place_names.get((pid, tid), f"{'stream' if len(columns.device) else 'thread'} {tid}").strip()
        names[place] = f"{pid}: {name}" if several else name
    return names


def _kernels(work: Work) -> tuple[Kernel, ...]:
    took_N = work.spans_N2[:, 1] - work.spans_N2[:, 0]
    count = np.bincount(work.name_N, minlength=len(work.names))
    total = np.bincount(work.name_N, weights=took_N, minlength=len(work.names))
    kind_of = dict(zip(work.name_N.tolist(), work.kind_N.tolist(), strict=True))
    counts: dict[tuple[str, str], int] = defaultdict(int)
    totals: dict[tuple[str, str], float] = defaultdict(float)
    for number, kind in kind_of.items():
        key = (work.names[number], work.kinds[kind])
        counts[key] += int(count[number])
        totals[key] += float(total[number])
    kernels = [Kernel(name, kind, counts[name, kind], _rounded(totals[name, kind])) for name, kind in counts]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.us, kernel.name)))


def _rounded(microseconds: float) -> float:
    """To nanoseconds, as fine as traces are."""
    return round(microseconds, 3)
