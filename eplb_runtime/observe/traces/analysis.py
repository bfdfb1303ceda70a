"""What a rank did with its time, from its trace: busy and idle per stream, communication under compute and exposed, and
both for each phase of each layer.

On a GPU that is what its streams ran. On a CPU streams are threads: operators compute, the spans of gloo communicate.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .columns import Columns, Intervals, Spans, length, overlap, read_columns, union
from .kinds import COMPUTE, STEP, kind_of_copy, kind_of_gloo, kind_of_kernel
from .phases import PhaseTime, phases_of
from .reading import TraceError


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


@dataclass(frozen=True)
class Analysis:
    """One trace.

    Args:
        device: ``"gpu"`` or ``"cpu"``.
        span_us: from the first begin to the last end of what ran.
        busy_us, compute_us: in which anything ran, in which anything computed.
        steps: that the profiler has marked; ``step_us``: median of them, 0 where there is none.
        kinds: by kind of work, runs and their durations added up.
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
    communication: Communication
    kinds: dict[str, dict[str, float]]
    streams: tuple[StreamTimes, ...]
    kernels: tuple[Kernel, ...]
    phases: tuple[PhaseTime, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return asdict(self)


@dataclass(frozen=True)
class _Work:
    """What ran: ``[N]`` spans with their stream, kind (an index into ``kinds``) and name (into ``names``)."""

    spans_N2: Intervals
    where_N: NDArray[np.int64]
    kind_N: NDArray[np.int64]
    name_N: NDArray[np.int64]
    kinds: list[str]
    names: list[str]

    def union_of(self, chosen_N: NDArray[np.bool_]) -> Intervals:
        return union(self.spans_N2[chosen_N])


def analyse(path: Path) -> Analysis:
    """Read a trace and say what the rank did with its time.

    Raises:
        TraceError: it is no trace, or nothing in it ran on a GPU or was computed by torch.
        OSError: it cannot be read.
    """
    columns = read_columns(path)
    work = _work_of(columns)
    if not len(work.spans_N2):
        raise TraceError(f"{path}: nothing in it was computed or sent: it needs kernels, or operators of a CPU")
    computes_N = np.array([kind == COMPUTE for kind in work.kinds])[work.kind_N]
    computing, communicating = work.union_of(computes_N), work.union_of(~computes_N)
    span = float(work.spans_N2[:, 1].max() - work.spans_N2[:, 0].min())
    busy, travelled, hidden = length(union(work.spans_N2)), length(communicating), overlap(communicating, computing)
    names = columns.names.all
    wanted = [index for index, name in enumerate(columns.marks.name_N.tolist()) if STEP.match(str(names[name]))]
    steps = np.diff(columns.marks.spans_N2[wanted], axis=1).ravel().tolist()
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
        communication=Communication(
            _rounded(travelled),
            _rounded(hidden),
            _rounded(travelled - hidden),
            round(hidden / travelled, 6) if travelled else 0.0,
        ),
        kinds=_kinds(work),
        streams=_streams(work, columns, span),
        kernels=_kernels(work),
        phases=phases_of(columns, work.spans_N2, computes_N, computing),
    )


def together(analyses: Sequence[Analysis]) -> dict[str, Any]:
    """Return what is known, JSON-able: of one trace all; of several their means, and each of them in ``traces``."""
    if len(analyses) == 1:
        return analyses[0].to_dict()
    each = [one.to_dict() for one in analyses]

    def means(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, float]:
        return {name: round(statistics.fmean(row[name] for row in rows), 3) for name in names}

    travelled = means([one["communication"] for one in each], "us", "hidden_us", "exposed_us")
    share = round(travelled["hidden_us"] / travelled["us"], 6) if travelled["us"] else 0.0
    return {
        **means(each, "span_us", "busy_us", "idle_us", "compute_us", "step_us"),
        "communication": {**travelled, "hidden_share": share},
        "traces": each,
    }


def _work_of(columns: Columns) -> _Work:
    """Return kernels of a GPU; else operators and gloo's spans of a CPU."""
    all_names = columns.names.all
    names = [name if isinstance(name, str) else name[0] for name in all_names]
    device, gloo = columns.device, columns.gloo
    if len(device):
        kind_of_name = {}
        for number in np.unique(device.name_N).tolist():
            name, category = all_names[number]
            kind_of_name[number] = kind_of_kernel(name) if category == "kernel" else kind_of_copy(name)
        spans_N2, where_N, name_N = device.spans_N2, device.where_N, device.name_N
    else:
        kind_of_name = {number: kind_of_gloo(name) or COMPUTE for number, name in enumerate(names)}
        of_gloo = (gloo.spans_N2, gloo.where_N, gloo.name_N)
        both = zip(_outermost(columns.operators), of_gloo, strict=True)
        spans_N2, where_N, name_N = (np.concatenate(pair) for pair in both)
    kinds = sorted(set(kind_of_name.values()))
    number_of = np.zeros(len(names) or 1, dtype=np.int64)
    for number, kind in kind_of_name.items():
        number_of[number] = kinds.index(kind)
    return _Work(spans_N2, where_N, number_of[name_N], name_N, kinds, names)


def _outermost(operators: Spans) -> tuple[Intervals, NDArray[np.int64], NDArray[np.int64]]:
    """Return spans, places and names of the operators that no other called."""
    spans_N2, where_N, name_N = operators.spans_N2, operators.where_N, operators.name_N
    order_N = np.lexsort((-spans_N2[:, 1], spans_N2[:, 0], where_N))
    spans_N2, where_N, name_N = spans_N2[order_N], where_N[order_N], name_N[order_N]
    keep_N = np.ones(len(order_N), dtype=bool)
    for place in np.unique(where_N):
        here = where_N == place
        reach = np.maximum.accumulate(spans_N2[here, 1])
        keep_N[np.flatnonzero(here)[1:]] = spans_N2[here, 0][1:] >= reach[:-1]
    return spans_N2[keep_N], where_N[keep_N], name_N[keep_N]


def _kinds(work: _Work) -> dict[str, dict[str, float]]:
    count = np.bincount(work.kind_N, minlength=len(work.kinds))
    took = np.bincount(work.kind_N, weights=np.diff(work.spans_N2, axis=1)[:, 0], minlength=len(work.kinds))
    rows = {kind: {"count": int(count[n]), "us": _rounded(took[n])} for n, kind in enumerate(work.kinds) if count[n]}
    return dict(sorted(rows.items(), key=lambda item: -item[1]["us"]))


def _streams(work: _Work, columns: Columns, span: float) -> tuple[StreamTimes, ...]:
    places: list[int] = np.unique(work.where_N).tolist()
    all_places = columns.places.all
    several = len({all_places[place][0] for place in places}) > 1
    found = []
    for place in places:
        pid, tid = all_places[place]
        name = columns.place_names.get((pid, tid), f"{'stream' if len(columns.device) else 'thread'} {tid}").strip()
        here_N = work.where_N == place
        kinds = {
            work.kinds[n]: _rounded(length(work.union_of(here_N & (work.kind_N == n))))
            for n in np.unique(work.kind_N[here_N]).tolist()
        }
        busy = length(work.union_of(here_N))
        found.append(StreamTimes(f"{pid}: {name}" if several else name, _rounded(busy), _rounded(span - busy), kinds))
    return tuple(sorted(found, key=lambda stream: -stream.busy_us))


def _kernels(work: _Work) -> tuple[Kernel, ...]:
    count = np.bincount(work.name_N)
    total = np.bincount(work.name_N, weights=np.diff(work.spans_N2, axis=1)[:, 0])
    found: dict[tuple[str, str], tuple[int, float]] = {}
    for number, kind in dict(zip(work.name_N.tolist(), work.kind_N.tolist(), strict=True)).items():
        key = (work.names[number], work.kinds[kind])  # a name may be of two categories
        runs, us = found.get(key, (0, 0.0))
        found[key] = (runs + int(count[number]), us + float(total[number]))
    kernels = [Kernel(name, kind, runs, _rounded(us)) for (name, kind), (runs, us) in found.items()]
    return tuple(sorted(kernels, key=lambda kernel: (-kernel.us, kernel.name)))


def _rounded(microseconds: float) -> float:
    """Return it to nanoseconds, as fine as traces are."""
    return round(float(microseconds), 3)
