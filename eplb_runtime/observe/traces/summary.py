"""What the traces of a job's ranks say together, and what differs between two jobs."""

from __future__ import annotations

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .analysis import Analysis
from .reading import TraceError

MERGED_PREFIX = "merged"
"""Of the names of files that `merge` writes beside what it reads."""
_ENDINGS = (".json", ".json.gz")


def traces_in(path: Path) -> list[Path]:
    """A file, or the traces in a folder in the order of their names, numbers by their value.

    Raises:
        TraceError: a folder without traces.
        OSError: there is no such file or folder.
    """
    path.stat()
    if not path.is_dir():
        return [path]
    found = [
        entry
        for entry in path.iterdir()
        if entry.name.endswith(_ENDINGS) and not entry.name.startswith(MERGED_PREFIX) and entry.is_file()
    ]
    if not found:
        raise TraceError(f"{path}: no traces in this folder (*.json, *.json.gz)")
    return sorted(found, key=lambda entry: [(len(part), part) for part in re.findall(r"\d+|\D+", entry.name)])


def together(analyses: Sequence[Analysis]) -> dict[str, Any]:
    """JSON-able: of one trace all that is known of it; of several their means, and each of them in ``traces``."""
    if len(analyses) == 1:
        return analyses[0].to_dict()

    def mean(value: Callable[[Analysis], float]) -> float:
        return round(statistics.fmean(value(one) for one in analyses), 3)

    total, hidden = mean(lambda one: one.communication.us), mean(lambda one: one.communication.hidden_us)
    return {
        "span_us": mean(lambda one: one.span_us),
        "busy_us": mean(lambda one: one.busy_us),
        "idle_us": mean(lambda one: one.idle_us),
        "compute_us": mean(lambda one: one.compute_us),
        "step_us": mean(lambda one: one.step_us),
        "communication": {
            "us": total,
            "hidden_us": hidden,
            "exposed_us": mean(lambda one: one.communication.exposed_us),
            "hidden_share": round(hidden / total, 6) if total else 0.0,
        },
        "streams": [{"file": one.file, **asdict(stream)} for one in analyses for stream in one.streams],
        "kernels": [{"file": one.file, **asdict(kernel)} for one in analyses for kernel in one.kernels],
        "traces": [one.to_dict() for one in analyses],
    }


# -- two jobs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A number of two jobs. ``change``: relative, None where it was 0; of a share, the difference."""

    what: str
    a: float
    b: float
    change: float | None

    @classmethod
    def of(cls, what: str, a: float, b: float) -> Change:
        if _is_share(what):
            return cls(what, round(a, 3), round(b, 3), round(b - a, 4))
        return cls(what, round(a, 3), round(b, 3), round(b / a - 1, 4) if a else None)

    @property
    def is_share(self) -> bool:
        """Return whether the numbers are shares, which differ in percentage points."""
        return _is_share(self.what)


def _is_share(what: str) -> bool:
    return what.endswith(" share")


@dataclass(frozen=True)
class MarkedSteps:
    """Marked steps of a job.

    Args:
        count: in the trace of a rank, on average over ranks that marked any.
        median_us, spread_us: median, and first to third quartile, mean over these ranks; 0: there are none.
    """

    count: float
    median_us: float
    spread_us: float

    @property
    def error_us(self) -> float:
        """How far the median may be off by chance: the interquartile range over the root of the number of steps. For
        normal noise that is 1.08 standard errors of a median (1.25 sigma / sqrt(n), with a range of 1.35 sigma). Steps
        that drift together, as those of a machine that gets busy do, are off by more."""
        return self.spread_us / math.sqrt(self.count) if self.count else 0.0

    @classmethod
    def of(cls, ranks: Sequence[Analysis]) -> MarkedSteps:
        marked = [one for one in ranks if one.steps]
        if not marked:
            return cls(0.0, 0.0, 0.0)
        count, median, spread = (
            statistics.fmean(values)
            for values in zip(*((one.steps, one.step_us, one.step_spread_us) for one in marked), strict=True)
        )
        return cls(round(count, 1), round(median, 3), round(spread, 3))


@dataclass(frozen=True)
class TraceComparison:
    """What changed from one job to another.

    Args:
        per: ``"step"`` where the profiler has marked steps in all traces, else ``"trace"``: what times are of.
        summary: times in microseconds of a rank, mean over ranks unless said otherwise.
        phases: of the thread that runs them, mean over ranks.
        kinds, kernels: durations added up, mean over ranks; kernels from the largest change on.
        steps_a, steps_b: how many steps there are, and how much they differ among themselves.
        is_noise: whether the medians of steps differ by no more than they do by chance (`MarkedSteps.error_us`); None:
            steps are not marked, or there is one.
    """

    a: str
    b: str
    per: str
    summary: tuple[Change, ...]
    phases: tuple[Change, ...]
    kinds: tuple[Change, ...]
    kernels: tuple[Change, ...]
    steps_a: MarkedSteps
    steps_b: MarkedSteps
    is_noise: bool | None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)


def compare(a: Sequence[Analysis], b: Sequence[Analysis], name_a: str, name_b: str) -> TraceComparison:
    """What changed between two jobs.

    Args:
        a, b: an analysis for each rank.
        name_a, name_b: what to call them.
    """
    by_step = all(one.steps for one in (*a, *b))
    steps_a, steps_b = MarkedSteps.of(a), MarkedSteps.of(b)
    is_noise = None
    if min(steps_a.count, steps_b.count) > 1:
        is_noise = abs(steps_b.median_us - steps_a.median_us) <= math.hypot(steps_a.error_us, steps_b.error_us)

    def totals(rows: Callable[[Analysis], Iterable[tuple[str, float]]]) -> tuple[Change, ...]:
        return _changes(_totals(a, by_step, rows), _totals(b, by_step, rows))

    kernels = totals(lambda one: ((kernel.name, kernel.us) for kernel in one.kernels))
    return TraceComparison(
        name_a,
        name_b,
        "step" if by_step else "trace",
        _changes(_summary(a, by_step), _summary(b, by_step)),
        totals(lambda one: ((row.name, row.host_us) for row in one.phases)),
        totals(lambda one: ((kind, row["us"]) for kind, row in one.kinds.items())),
        tuple(sorted(kernels, key=lambda row: -abs(row.b - row.a))),
        steps_a,
        steps_b,
        is_noise,
    )


def _changes(a: dict[str, float], b: dict[str, float]) -> tuple[Change, ...]:
    return tuple(Change.of(what, a.get(what, 0.0), b.get(what, 0.0)) for what in dict.fromkeys([*a, *b]))


def _summary(ranks: Sequence[Analysis], by_step: bool) -> dict[str, float]:
    computing = [_of(one, one.compute_us, by_step) for one in ranks]

    def mean(value: Callable[[Analysis], float]) -> float:
        return statistics.fmean(_of(one, value(one), by_step) for one in ranks)

    computed = statistics.fmean(computing)
    travelled, hidden = mean(lambda one: one.communication.us), mean(lambda one: one.communication.hidden_us)
    took = {"step, median": statistics.fmean(one.step_us for one in ranks)} if by_step else {}
    return {
        **took,
        "span": mean(lambda one: one.span_us),
        "computing": computed,
        "computing, busiest rank": max(computing),
        "computing, max / mean over ranks": max(computing) / computed if computed else 0.0,
        "communication": travelled,
        "communication, hidden": hidden,
        "communication, exposed": mean(lambda one: one.communication.exposed_us),
        "communication, hidden share": hidden / travelled if travelled else 0.0,
        "idle": mean(lambda one: one.idle_us),
    }


def _totals(
    ranks: Sequence[Analysis], by_step: bool, rows: Callable[[Analysis], Iterable[tuple[str, float]]]
) -> dict[str, float]:
    """Return microseconds by name, mean over ranks."""
    found: dict[str, float] = defaultdict(float)
    for one in ranks:
        for name, microseconds in rows(one):
            found[name] += _of(one, microseconds, by_step) / len(ranks)
    return dict(found)


def _of(one: Analysis, microseconds: float, by_step: bool) -> float:
    return microseconds / one.steps if by_step else microseconds
