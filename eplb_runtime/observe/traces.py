"""Traces of torch.profiler: what a rank did with its time. Busy and idle, communication under compute and exposed, and
both for each phase of each layer. On a CPU operators compute, and the spans of gloo communicate.

A kernel belongs to the innermost phase in which it was launched, what a CPU does to the one in which it began. A trace
is JSON in the Trace Event Format, plain or gzipped; whatever a file holds ends in spans or in one `TraceError`.
"""

import gzip
import json
import math
import re
import reprlib
import statistics
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..utils.files import MIB, FileError, require_readable
from ..utils.text import one_line

MOST_BYTES = 64 * 1024 * MIB
_MOST_US = 2.0**62

Place = tuple[str, str]
"""Process and thread; of a GPU, device and stream."""


class TraceError(FileError):
    """A file that is no trace, or none that can be used; one line that says why."""


class Span(NamedTuple):
    """A span of a thread or a stream. Times are microseconds since the first event of the file."""

    name: str
    category: Any
    place: Place
    begin: float
    end: float
    link: Any  # what ties a kernel to its launch; None: nothing


# -- a file ------------------------------------------------------------------------------------------------------------


def traces_in(path: Path) -> list[Path]:
    """Return a file as a list of one, or the traces in a folder by name, numbers in names by their value. TraceError: a
    folder without traces. OSError: there is no such file or folder."""
    path.stat()
    if not path.is_dir():
        return [path]
    found = [entry for entry in path.iterdir() if entry.name.endswith((".json", ".json.gz")) and entry.is_file()]
    if not found:
        raise TraceError(f"{path}: no traces in this folder (*.json, *.json.gz)")
    return sorted(found, key=lambda entry: [(len(part), part) for part in re.findall(r"\d+|\D+", entry.name)])


def _read(path: Path) -> tuple[list[Span], int | None]:
    """Return the spans of a trace in the order of the file, and the rank that it names; None: none. It is
    ``{"traceEvents": [...], ...}`` or a plain list of events, gzipped if its first bytes say so."""
    try:
        require_readable(path, MOST_BYTES)
        content = path.read_bytes()
        trace = json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)
    except FileError as error:
        raise TraceError(f"{path}: {error}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise TraceError(f"{path}: the gzipped file is broken off or damaged: write it again") from None
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path}: not a JSON trace, or one that is broken off: {one_line(error)}") from None
    head = trace if isinstance(trace, dict) else {"traceEvents": trace}
    if not isinstance(events := head.get("traceEvents"), list):
        raise TraceError(f'{path}: it has no "traceEvents": give a trace as torch.profiler exports it')
    info, spans, origin = head.get("distributedInfo"), list[Span](), None
    rank = info.get("rank") if isinstance(info, dict) else None
    for event in events:
        if not isinstance(event, dict):
            raise TraceError(f"{path}: an event is a {type(event).__name__}, not an object")
        place = str(event.get("pid", ""))[:80], str(event.get("tid", ""))[:80]
        name, arguments = event.get("name"), event.get("args")
        arguments = arguments if isinstance(arguments, dict) else {}
        if event.get("ph") == "X":
            begin, duration = _microseconds(path, event, "ts", "missing"), _microseconds(path, event, "dur", 0.0)
            if duration < 0:
                raise TraceError(f"{path}: an event lasts {duration:g} us: times run forwards")
            begin -= (origin := begin if origin is None else origin)
            link = arguments.get("correlation")
            link = link if isinstance(link, int) else None
            plain = name if isinstance(name, str) else ""
            spans.append(Span(plain, event.get("cat"), place, begin, begin + duration, link))
    return spans, rank if type(rank) is int and 0 <= rank < 2**20 else None


def _microseconds(path: Path, event: Mapping[str, Any], key: str, default: Any) -> float:
    value = event.get(key, default)
    try:
        number = float(value)  # some writers quote them
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < _MOST_US:
        raise TraceError(f"{path}: an event's {key} is {reprlib.repr(value)}, not a number of microseconds")
    return number


Intervals = NDArray[np.float64]
"""float64 ``[N, 2]``, begin and end of each."""

# -- which kernels and spans carry data between ranks, and which phase of a layer they belong to ---------------------
# Kernels go by the names of NCCL, DeepEP (of two generations, also as DeepSeek's), NVSHMEM and symmetric memory; gloo
# by the spans that torch's process group records. All else that a device runs is compute.

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "mtia_runtime", "xpu_runtime")
ANNOTATIONS = ("user_annotation", None)
COMPUTE = "compute"
DISPATCH, COMBINE, NOTIFY = "dispatch", "combine", "notify and layout"
COLLECTIVE, POINT_TO_POINT, ONE_SIDED = "collective", "send and receive", "one-sided"

_EP = re.compile(r"\b(?:deep_ep|dpsk::ep)::|\b(?:internode_ll|internode|intranode)::\w")
_NOTIFY = re.compile(r"notify|layout|barrier|clean|mask_buffer|sync", re.IGNORECASE)
_NCCL = re.compile(r"^(?:void )?nccl(?:Dev|Sym|Symk)*Kernel|^nccl:|^ncclKernel|^RCCL|^rccl", re.IGNORECASE)
_OTHER = re.compile(r"nvshmem|symmetric_memory|multimem_|(?:one|two)_shot_all_reduce|symm_mem", re.IGNORECASE)
_SEND = re.compile(r"send|recv", re.IGNORECASE)
_GLOO = re.compile(r"^(?:gloo|mpi|ucc):(\w+)")
_PHASE = re.compile(
    r"^(?P<ours>eplb_runtime )?(?P<phase>[A-Za-z_ :,]+?)(?:\((?P<pass>[FBW])\))?"
    r"(?: layer=(?P<layer>\d+))?(?: epoch=\d+)?$"
)
_STEP = re.compile(r"^ProfilerStep#\d+$")
_MICRO_BATCH = re.compile(r"^PP:\d+(?:FULL_BACKWARD|[FBIW])(\d+)$|^(?:Forward|Backward) (\d+)$")


@lru_cache(maxsize=65536)
def kind_of(name: str, category: str) -> str:
    """Return what a GPU's kernel, copy or memset is for, by its name: `COMPUTE`, or one of `DISPATCH`, `COMBINE`,
    `NOTIFY`, `COLLECTIVE`, `POINT_TO_POINT` and `ONE_SIDED`."""
    if category != "kernel":  # by the copy engine: between devices it carries data, on one it is part of computing
        return ONE_SIDED if "PtoP" in name or "Peer" in name else COMPUTE
    plain = name.split("(", 1)[0]  # a signature names types, which say nothing of what the kernel does
    if _NCCL.search(plain):
        return POINT_TO_POINT if _SEND.search(plain) else COLLECTIVE
    if found := _EP.search(plain):
        own = plain[found.start() :]
        if _NOTIFY.search(own):
            return NOTIFY
        return COMBINE if "combine" in own else DISPATCH if "dispatch" in own else ONE_SIDED
    return ONE_SIDED if _OTHER.search(plain) else COMPUTE


@lru_cache(maxsize=65536)
def kind_of_gloo(name: str) -> str | None:
    """Return `COLLECTIVE` or `POINT_TO_POINT` for a span of a CPU's process group (gloo); None: another span."""
    found = _GLOO.match(name)
    return found and (POINT_TO_POINT if _SEND.search(found[1]) else COLLECTIVE)


def computes(operator: str) -> bool:
    """Return whether a CPU operator of this name computes by itself. Operators that only call others, as a node of
    autograd, may wait inside; communication and its launch have spans of their own."""
    space, colon, _ = operator.partition("::")
    return bool(colon) and space not in ("c10d", "autograd", "record_param_comms", "profiler")


@lru_cache(maxsize=65536)
def phase_of(name: str) -> tuple[str, str, int | None] | None:
    """Return (phase, direction, layer; None: unknown) that a span's name says; None: it says no phase. Our names are
    ``eplb_runtime dispatch(F) layer=3 epoch=7``; those of DeepSeek's published traces are ``dispatch(F)``."""
    found = _PHASE.match(name)
    if found is None or not (found["ours"] or (found["pass"] and name.endswith(")"))):
        return None
    return found["phase"], found["pass"] or "", None if found["layer"] is None else int(found["layer"])


@lru_cache(maxsize=65536)
def micro_batch_of(name: str) -> int | None:
    """Return the micro-batch of a torch.distributed.pipelining span, by its name; None: it is no such span."""
    found = _MICRO_BATCH.match(name)
    return None if found is None else int(found[1] or found[2])


def union(spans_N2: Intervals) -> Intervals:
    """Return the intervals sorted, with those that overlap or touch joined into one."""
    if not len(spans_N2):
        return np.empty((0, 2))
    spans_N2 = spans_N2[np.argsort(spans_N2[:, 0], kind="stable")]
    reach_N = np.maximum.accumulate(spans_N2[:, 1])
    first_N = np.concatenate([[True], spans_N2[1:, 0] > reach_N[:-1]])
    last_N = np.concatenate([first_N[1:], [True]])
    return np.stack([spans_N2[first_N, 0], reach_N[last_N]], axis=1)


def length(union_N2: Intervals) -> float:
    """Return the sum of the lengths of disjoint intervals, as `union` returns them."""
    return float((union_N2[:, 1] - union_N2[:, 0]).sum())


def overlap(one_N2: Intervals, other_N2: Intervals) -> float:
    """Return the length of the time that is in both of two `union` results."""
    both = length(union(np.concatenate([one_N2, other_N2])))
    return length(one_N2) + length(other_N2) - both


@dataclass(frozen=True)
class PhaseTime:
    """What one phase took, over all steps of the trace.

    Args:
        phase, direction: as the spans name them: F forward, B backward (of inputs, or of all), W gradients of weights.
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


def analyse(path: Path) -> Analysis:
    """Read a trace and return what the rank did with its time. TraceError: it is no trace, or nothing in it ran on a
    GPU or was computed by torch. OSError: it cannot be read."""
    every, rank = _read(path)
    work = _work_of(every)
    if not work:
        raise TraceError(f"{path}: nothing in it was computed or sent: it needs kernels, or operators of a CPU")
    spans, kinds = zip(*work, strict=True)
    times_N2, computes_N = np.array([one[3:5] for one in spans]), np.array([kind == COMPUTE for kind in kinds])
    computing, communicating = union(times_N2[computes_N]), union(times_N2[~computes_N])
    span = float(times_N2[:, 1].max() - times_N2[:, 0].min())
    busy, travelled, hidden = length(union(times_N2)), length(communicating), overlap(communicating, computing)
    steps = [one.end - one.begin for one in every if one.category in ANNOTATIONS and _STEP.match(one.name)]
    runs = [Kernel(one.name, kind, 1, one.end - one.begin) for one, kind in work]
    kernels = _summed(runs, lambda run: (run.name, run.kind))
    return Analysis(
        file=str(path),
        rank=rank,
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
        phases=phases_of(every, spans, computes_N, computing),
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


# -- phases ------------------------------------------------------------------------------------------------------------


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
        """Return what was noted of the innermost span of a thread around this time; None: there is none."""
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
    """Return the time of each phase, direction, layer and micro-batch that spans name; empty: they name none.

    Args:
        work: spans of what ran, and whether each computes; ``computing``: the union of those that do.
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
    steps = [span.begin for span in noted if _STEP.match(span.name)]
    batches = _Innermost((span, batch) for span in noted if (batch := micro_batch_of(span.name)) is not None)
    seen: Counter[Any] = Counter()
    found = []
    for span in noted:
        if (named := phase_of(span.name)) is None:
            continue
        phase, direction, layer = named
        if layer is None and direction:
            this_step = phase, direction, bisect_right(steps, span.begin)
            layer = seen[this_step]
            seen[this_step] += 1
        found.append((span, (phase, direction, layer, batches.at(span.place, span.begin))))
    return found
