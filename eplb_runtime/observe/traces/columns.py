"""Columns of a trace that an analysis needs.

Times are microseconds since the first event of the file. Intervals are float64 ``[N, 2]``, begin and end.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kinds import STEP, computes, kind_of_gloo, micro_batch_of, phase_of
from .reading import TraceError, duration_of, name_of, number, place_of, rank_of, read_trace, thread_name_of

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime")
NO_CORRELATION = -1
Intervals = NDArray[np.float64]


class Names:
    """Numbers for names: each text is kept once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def number(self, name: Any) -> int:
        return self.numbers.setdefault(name, len(self.numbers))

    @property
    def all(self) -> list[Any]:
        return list(self.numbers)


class Spans:
    """Spans of one sort."""

    def __init__(self) -> None:
        self._times = array("d")
        self._numbers = array("q")

    def add(self, begin: float, duration: float, where: int, name: int, link: int = NO_CORRELATION) -> None:
        self._times.extend((begin, begin + duration))
        self._numbers.extend((where, name, link))

    def __len__(self) -> int:
        return len(self._times) // 2

    @property
    def spans_N2(self) -> Intervals:
        """Return begin and end, ``[N, 2]``."""
        return np.array(self._times).reshape(-1, 2)

    @property
    def where_N(self) -> NDArray[np.int64]:
        """Return the number of the stream or thread."""
        return self._column(0)

    @property
    def name_N(self) -> NDArray[np.int64]:
        return self._column(1)

    @property
    def link_N(self) -> NDArray[np.int64]:
        """Return what ties a kernel to its launch; `NO_CORRELATION`: nothing."""
        return self._column(2)

    def _column(self, number: int) -> NDArray[np.int64]:
        return np.array(self._numbers, dtype=np.int64).reshape(-1, 3)[:, number]


@dataclass
class Columns:
    """One trace.

    Attributes:
        device: kernels, copies and memsets of a GPU, by stream.
        launches: calls that start them, by thread.
        operators: of the CPU, those that compute, by thread; empty where there are kernels.
        gloo: what a CPU's process group does, by thread.
        marks: spans that name a phase, a micro-batch or a step of the profiler, by thread.
        places: ``(pid, tid)`` of each stream and thread.
        place_names: what the trace calls them.
        names: of the spans; of ``device``, ``(name, category)``.
        rank: as the trace says it; None: it does not.
    """

    path: Path
    device: Spans = field(default_factory=Spans)
    launches: Spans = field(default_factory=Spans)
    operators: Spans = field(default_factory=Spans)
    gloo: Spans = field(default_factory=Spans)
    marks: Spans = field(default_factory=Spans)
    places: Names = field(default_factory=Names)
    place_names: dict[tuple[str, str], str] = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    rank: int | None = None


def read_columns(path: Path) -> Columns:
    """Read a trace.

    Raises:
        TraceError: it is none, or an event in it makes no sense.
        OSError: it cannot be read.
    """
    events, head = read_trace(path)
    found, origin = Columns(path, rank=rank_of(head)), None
    for event in events:
        if not isinstance(event, dict):
            raise TraceError(f"{path}: an event is a {type(event).__name__}, not an object")
        if name := thread_name_of(event):
            found.place_names.setdefault(place_of(event), name[:80])
        if event.get("ph") == "X":
            begin = number(path, event, "ts")
            origin = begin if origin is None else origin
            _add_span(found, event, begin - origin)
    return found


def _add_span(found: Columns, event: dict[str, Any], begin: float) -> None:
    category, name, duration = event.get("cat"), name_of(event), duration_of(found.path, event)
    arguments = event.get("args")
    link = arguments.get("correlation") if isinstance(arguments, dict) else None
    link = link if isinstance(link, int) and 0 <= link < 2**62 else NO_CORRELATION
    is_annotation = category in ("user_annotation", None)
    label: Any = name
    if category in DEVICE_CATEGORIES:
        if not len(found.device):
            found.operators = Spans()  # a GPU's trace: its CPU only launches
        spans, label = found.device, (name, category)
    elif category in LAUNCH_CATEGORIES and link != NO_CORRELATION:
        spans, label = found.launches, ""
    elif category == "cpu_op" and not len(found.device) and computes(name):
        spans = found.operators
    elif is_annotation and kind_of_gloo(name) is not None:
        spans = found.gloo
    elif is_annotation and (phase_of(name) or micro_batch_of(name) is not None or STEP.match(name)):
        spans = found.marks
    else:
        return
    spans.add(begin, duration, found.places.number(place_of(event)), found.names.number(label), link)


# -- intervals -------------------------------------------------------------------------------------------------------


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
    """Return the microseconds of a `union`."""
    return float((union_N2[:, 1] - union_N2[:, 0]).sum())


def overlap(one_N2: Intervals, other_N2: Intervals) -> float:
    """Return how much of one `union` is in another."""
    if not len(one_N2) or not len(other_N2):
        return 0.0
    return float((_covered(other_N2, one_N2[:, 1]) - _covered(other_N2, one_N2[:, 0])).sum())


def _covered(union_N2: Intervals, at_M: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how much of a `union` is before each time."""
    before_N = np.concatenate([[0.0], np.cumsum(union_N2[:, 1] - union_N2[:, 0])])
    index_M = np.searchsorted(union_N2[:, 0], at_M, side="right")
    last_M = np.maximum(index_M - 1, 0)
    past_M = before_N[last_M] + np.minimum(at_M, union_N2[last_M, 1]) - union_N2[last_M, 0]
    return np.where(index_M > 0, past_M, 0.0)
