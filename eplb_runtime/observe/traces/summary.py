"""What the traces of a job's ranks say together, and what differs between two jobs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from .analysis import Analysis
from .reading import TraceError

MERGED_PREFIX = "merged"
"""Of the names of files that `merge` writes beside what it reads."""
_ENDINGS = (".json", ".json.gz")


def traces_in(path: Path) -> list[Path]:
    """Return a file, or the traces in a folder in the order of their names, numbers by their value.

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
    """Return what is known, JSON-able: of one trace all; of several their means, and each of them in ``traces``."""
    if len(analyses) == 1:
        return analyses[0].to_dict()
    each = [one.to_dict() for one in analyses]

    def means(rows: Sequence[Mapping[str, float]], *names: str) -> dict[str, float]:
        return {name: round(fmean(row[name] for row in rows), 3) for name in names}

    travelled = means([one["communication"] for one in each], "us", "hidden_us", "exposed_us")
    share = round(travelled["hidden_us"] / travelled["us"], 6) if travelled["us"] else 0.0
    return {
        **means(each, "span_us", "busy_us", "idle_us", "compute_us", "step_us"),
        "communication": {**travelled, "hidden_share": share},
        "streams": [{"file": one["file"], **stream} for one in each for stream in one["streams"]],
        "kernels": [{"file": one["file"], **kernel} for one in each for kernel in one["kernels"]],
        "traces": each,
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
        change = b - a if what.endswith(" share") else b / a - 1 if a else None
        return cls(what, round(a, 3), round(b, 3), None if change is None else round(change, 4))

    @property
    def is_share(self) -> bool:
        """Return whether the numbers are shares, which differ in percentage points."""
        return self.what.endswith(" share")


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
        """Return how far the median may be off by chance: the interquartile range over the root of the number of steps.

        For normal noise that is 1.08 standard errors of a median (1.25 sigma / sqrt(n), with a range of 1.35 sigma).
        Steps that drift together, as those of a machine that gets busy do, are off by more.
        """
        return self.spread_us / math.sqrt(self.count) if self.count else 0.0

    @classmethod
    def of(cls, ranks: Sequence[Analysis]) -> MarkedSteps:
        marked = [one for one in ranks if one.steps]
        if not marked:
            return cls(0.0, 0.0, 0.0)
        count, median, spread = (
            fmean(values)
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
        """Return it JSON-able."""
        return asdict(self)


def compare(a: Sequence[Analysis], b: Sequence[Analysis], name_a: str, name_b: str) -> TraceComparison:
    """Return what changed between two jobs: an analysis for each rank, and how to call them."""
    by_step = all(one.steps for one in (*a, *b))
    steps_a, steps_b = MarkedSteps.of(a), MarkedSteps.of(b)
    is_noise = None
    if min(steps_a.count, steps_b.count) > 1:
        is_noise = abs(steps_b.median_us - steps_a.median_us) <= math.hypot(steps_a.error_us, steps_b.error_us)

    def changes(numbers: Callable[[Sequence[Analysis]], Mapping[str, float]]) -> tuple[Change, ...]:
        of_a, of_b = numbers(a), numbers(b)
        return tuple(
            Change.of(what, of_a.get(what, 0.0), of_b.get(what, 0.0)) for what in dict.fromkeys([*of_a, *of_b])
        )

    def totals(rows: Callable[[Analysis], Iterable[tuple[str, float]]]) -> tuple[Change, ...]:
        """Return microseconds by name, mean over ranks."""

        def added(ranks: Sequence[Analysis]) -> Mapping[str, float]:
            found: Counter[str] = Counter()
            for one in ranks:
                for name, microseconds in rows(one):
                    found[name] += microseconds / (one.steps if by_step else 1) / len(ranks)  # type: ignore[assignment]
            return found

        return changes(added)

    kernels = totals(lambda one: ((kernel.name, kernel.us) for kernel in one.kernels))
    return TraceComparison(
        name_a,
        name_b,
        "step" if by_step else "trace",
        changes(lambda ranks: _summary(ranks, by_step)),
        totals(lambda one: ((row.name, row.host_us) for row in one.phases)),
        totals(lambda one: ((kind, row["us"]) for kind, row in one.kinds.items())),
        tuple(sorted(kernels, key=lambda row: -abs(row.b - row.a))),
        steps_a,
        steps_b,
        is_noise,
    )


def _summary(ranks: Sequence[Analysis], by_step: bool) -> dict[str, float]:
    def of_ranks(value: Callable[[Analysis], float]) -> list[float]:
        return [value(one) / (one.steps if by_step else 1) for one in ranks]

    computing = of_ranks(lambda one: one.compute_us)
    computed = fmean(computing)
    travelled = fmean(of_ranks(lambda one: one.communication.us))
    hidden = fmean(of_ranks(lambda one: one.communication.hidden_us))
    return {
        **({"step, median": fmean(one.step_us for one in ranks)} if by_step else {}),
        "span": fmean(of_ranks(lambda one: one.span_us)),
        "computing": computed,
        "computing, busiest rank": max(computing),
        "computing, max / mean over ranks": max(computing) / computed if computed else 0.0,
        "communication": travelled,
        "communication, hidden": hidden,
        "communication, exposed": fmean(of_ranks(lambda one: one.communication.exposed_us)),
        "communication, hidden share": hidden / travelled if travelled else 0.0,
        "idle": fmean(of_ranks(lambda one: one.idle_us)),
    }
