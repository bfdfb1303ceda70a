"""What an analysis needs of a trace, in columns: a few dozen bytes an event, so that gigabytes of trace fit in memory.

Times are microseconds since the first event of the file.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .kinds import STEP, computes, kind_of_copy, kind_of_gloo, kind_of_kernel, micro_batch_of, phase_of
from .reading import OnProgress, TraceError, duration_of, name_of, number, read_events

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime")
NO_CORRELATION = -1
MERGED = "mergedRanks"
"""In a file of several ranks, which they are."""


class Names:
    """Numbers for names: each text is kept once."""

    def __init__(self) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, name: Any) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self.all)
            self.all.append(name)
        return found


class Spans:
    """Spans of one sort."""

    def __init__(self) -> None:
        self._begin, self._duration = array("d"), array("d")
        self._where, self._name, self._link = array("q"), array("q"), array("q")

    def add(self, begin: float, duration: float, where: int, name: int, link: int = NO_CORRELATION) -> None:
        self._begin.append(begin)
        self._duration.append(duration)
        self._where.append(where)
        self._name.append(name)
        self._link.append(link)

    def __len__(self) -> int:
        return len(self._begin)

    @property
    def spans_N2(self) -> NDArray[np.float64]:
        """Begin and end, ``[N, 2]``."""
        begin_N = np.array(self._begin)
        return np.stack([begin_N, begin_N + np.array(self._duration)], axis=1)

    @property
    def where_N(self) -> NDArray[np.int64]:
        """Number of the stream or thread."""
        return np.array(self._where, dtype=np.int64)

    @property
    def name_N(self) -> NDArray[np.int64]:
        return np.array(self._name, dtype=np.int64)

    @property
    def link_N(self) -> NDArray[np.int64]:
        """What ties a kernel to its launch; `NO_CORRELATION`: nothing."""
        return np.array(self._link, dtype=np.int64)


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

    def kind_of_device(self, number: int) -> str:
        """Return the kind of a span of ``device`` with this name's number."""
        name, category = self.names.all[number]
        return kind_of_kernel(name) if category == "kernel" else kind_of_copy(name)


def read_columns(path: Path, on_progress: OnProgress = lambda count: None) -> Columns:
    """Read a trace.

    Raises:
        TraceError: it is none, or an event in it makes no sense.
        OSError: it cannot be read.
    """
    found = Columns(path)
    head: dict[str, Any] = {}
    origin: float | None = None
    for event in read_events(path, head, on_progress):
        kind = event.get("ph")
        if kind == "M" and event.get("name") == "thread_name":
            arguments = event.get("args")
            name = arguments.get("name") if isinstance(arguments, dict) else None
            if isinstance(name, str):
                found.place_names.setdefault(place_of(event), name[:80])
        if kind == "X":
            begin = number(path, event, "ts")
            origin = begin if origin is None else origin
            _add_span(found, event, begin - origin)
    if MERGED in head:
        raise TraceError(f"{path}: it holds several ranks, merged for looking at: give the ranks' own traces")
    found.rank = rank_of(head)
    return found


def _add_span(found: Columns, event: dict[str, Any], begin: float) -> None:
    category, name, duration = event.get("cat"), name_of(event), duration_of(found.path, event)
    arguments = event.get("args")
    link = arguments.get("correlation") if isinstance(arguments, dict) else None
    link = link if isinstance(link, int) and 0 <= link < 2**62 else NO_CORRELATION
    label: Any = name
    if category in DEVICE_CATEGORIES:
        if not len(found.device):
            found.operators = Spans()  # a GPU's trace: its CPU only launches
        spans, label = found.device, (name, category)
    elif category in LAUNCH_CATEGORIES and link != NO_CORRELATION:
        spans, label = found.launches, ""
    elif category == "cpu_op" and not len(found.device) and computes(name):
        spans = found.operators
    elif category in ("user_annotation", None) and kind_of_gloo(name) is not None:
        spans = found.gloo
    elif category in ("user_annotation", None) and (
        phase_of(name) or micro_batch_of(name) is not None or STEP.match(name)
    ):
        spans = found.marks
    else:
        return
    spans.add(begin, duration, found.places.number(place_of(event)), found.names.number(label), link)


def place_of(event: dict[str, Any]) -> tuple[str, str]:
    """Return process and thread of an event; of a GPU, device and stream."""
    return str(event.get("pid", ""))[:80], str(event.get("tid", ""))[:80]


def rank_of(head: dict[str, Any]) -> int | None:
    """Return the rank that a trace names; None: it names none."""
    info = head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**20 else None
