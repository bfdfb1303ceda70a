"""What a rank did with its time, from its trace: busy and idle, communication under compute and exposed, and both for
each phase of each layer. On a CPU operators compute, and the spans of gloo communicate."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from .kinds import ANNOTATIONS, COMPUTE, DEVICE_CATEGORIES, computes, is_step, kind_of, kind_of_gloo
from .phases import PhaseTime, length, overlap, phases_of, union
from .reading import Place, Span, TraceError, read_trace


@dataclass(frozen=True)
class Communication:
    """Time in which anything travelled, times that overlap counted once. ``hidden_us`` of it something computed,
    ``exposed_us`` nothing did."""

    us: float
    hidden_us: float
    exposed_us: float
    hidden_share: float


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
    kernels: tuple[Kernel, ...]
    phases: tuple[PhaseTime, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it JSON-able."""
        return asdict(self)


def analyse(path: Path) -> Analysis:
    """Read a trace and say what the rank did with its time.

    Raises:
        TraceError: it is no trace, or nothing in it ran on a GPU or was computed by torch.
        OSError: it cannot be read.
    """
    trace = read_trace(path)
    work = _work_of(trace.spans)
    if not work:
        raise TraceError(f"{path}: nothing in it was computed or sent: it needs kernels, or operators of a CPU")
    spans, kinds = zip(*work, strict=True)
    times_N2, computes_N = np.array([one[3:5] for one in spans]), np.array([kind == COMPUTE for kind in kinds])
    computing, communicating = union(times_N2[computes_N]), union(times_N2[~computes_N])
    span = float(times_N2[:, 1].max() - times_N2[:, 0].min())
    busy, travelled, hidden = length(union(times_N2)), length(communicating), overlap(communicating, computing)
    steps = [one.end - one.begin for one in trace.spans if one.category in ANNOTATIONS and is_step(one.name)]
    runs = [Kernel(one.name, kind, 1, one.end - one.begin) for one, kind in work]
    kernels = _summed(runs, lambda run: (run.name, run.kind))
    return Analysis(
        file=str(path),
        rank=trace.rank,
        device="gpu" if spans[0].category in DEVICE_CATEGORIES else "cpu",
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
        kinds={one.kind: {"count": one.count, "us": one.us} for one in _summed(runs, lambda run: run.kind)},
        kernels=kernels,
        phases=phases_of(trace.spans, spans, computes_N, computing),
    )


def _work_of(spans: Sequence[Span]) -> list[tuple[Span, str]]:
    """Return kernels of a GPU with their kinds; else a CPU's operators that no other called, and gloo's spans."""
    on_device = [(one, kind_of(one.name, one.category)) for one in spans if one.category in DEVICE_CATEGORIES]
    if on_device:
        return on_device
    operators = (one for one in spans if one.category == "cpu_op" and computes(one.name))
    found, reach = [], defaultdict[Place, float](lambda: -math.inf)
    for one in sorted(operators, key=lambda one: (one.begin, -one.end)):
        if one.begin >= reach[one.place]:
            found.append((one, COMPUTE))
        reach[one.place] = max(reach[one.place], one.end)
    sent = ((one, kind_of_gloo(one.name)) for one in spans if one.category in ANNOTATIONS)
    return found + [(one, kind) for one, kind in sent if kind is not None]


def _summed(runs: Iterable[Kernel], by: Callable[[Kernel], Any]) -> tuple[Kernel, ...]:
    """Return runs with the same key as one, the longest first."""
    groups: defaultdict[Any, list[Kernel]] = defaultdict(list)
    for run in runs:
        groups[by(run)].append(run)
    found = [replace(same[0], count=len(same), us=_rounded(sum(run.us for run in same))) for same in groups.values()]
    return tuple(sorted(found, key=lambda kernel: (-kernel.us, kernel.name)))


def _rounded(microseconds: float) -> float:
    """Return it to nanoseconds, as fine as traces are."""
    return round(float(microseconds), 3)
