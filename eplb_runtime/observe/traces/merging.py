"""Traces of all ranks of a job in one file that Perfetto opens as it is.

Each rank is a process, "rank N"; its threads and its GPU's streams are the process's threads, under numbers that are
used once in the file. Flows get whole numbers that are used once, too, and go where both of their ends are there. Times
count from one base. Spans of a thread that overlap without being inside each other (sends and receives of gloo that are
under way at once) become pairs of asynchronous events, since a thread's row can only show nested ones.
"""

from __future__ import annotations

import gzip
import io
import json
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...utils.files import replacing
from .columns import DEVICE_CATEGORIES, MERGED, Names
from .reading import OnProgress, TraceError, name_of, number, read_events

OVERHANG_US = 1.0
"""Spans that overlap by no more are cut: older traces are rounded to microseconds."""
_AT_ONCE = 4096
"""Events written at once."""
_STARTS, _ENDS = 1, 2
_FIRST_PID = 1
"""Perfetto takes process 0 for the idle one."""


@dataclass(frozen=True)
class Merged:
    """What became of the traces. ``asynchronous``: spans that could not be nested; ``dropped_flows``: events of flows
    of which one end is missing."""

    ranks: tuple[int, ...]
    events: int
    flows: int
    dropped_flows: int
    asynchronous: int


@dataclass
class _Source:
    """One rank's trace, after a first look.

    Attributes:
        durations: of spans, in the order of the file, as they will be written.
        asynchronous: for each, whether it is written as a pair.
        flows: by `_flow_key`, which ends are there; then the flow's number in the output, 0: it is left out.
        offset: microseconds to add to its times.
    """

    path: Path
    rank: int = -1
    base: int = 0
    offset: float = 0.0
    first: float = float("inf")
    durations: array[float] = field(default_factory=lambda: array("d"))
    asynchronous: bytearray = field(default_factory=bytearray)
    flows: dict[int | str, int] = field(default_factory=dict)
    categories: Names = field(default_factory=Names)
    begins: array[float] = field(default_factory=lambda: array("d"))
    threads: array[int] = field(default_factory=lambda: array("q"))
    places: Names = field(default_factory=Names)
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)
    streams: set[tuple[str, str]] = field(default_factory=set)


def merge(paths: Sequence[Path], output: Path, on_progress: OnProgress = lambda count: None) -> Merged:
    """Write the traces of several ranks as one.

    Args:
        paths: one a rank. Ranks are those that the traces name; where one names none, all go by their order.
        output: ``.json`` or ``.json.gz``; written whole or not at all.
        on_progress: bytes read; every file is read twice.

    Raises:
        TraceError: one of them is no trace, or two are of the same rank.
        OSError: one cannot be read, or the output cannot be written.
    """
    sources = [_first_pass(path, on_progress) for path in paths]
    _number_ranks(sources)
    _align(sources)
    flows = _number_flows(sources)
    ranks = sorted(source.rank for source in sources)
    base = min(source.base for source in sources)
    head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base, MERGED: ranks}
    written = dropped = 0
    with _opened(output) as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        threads = Names()
        for source in sorted(sources, key=lambda source: source.rank):
            events = chain(_metadata(source, threads), _rewritten(source, threads, on_progress))
            while several := list(islice(events, _AT_ONCE)):
                kept = [event for event in several if event is not None]
                file.write((",\n" if written and kept else "") + json.dumps(kept)[1:-1])
                written += len(kept)
                dropped += len(several) - len(kept)
        file.write("\n]}\n")
    return Merged(
        tuple(ranks),
        written,
        flows,
        dropped,
        sum(sum(source.asynchronous) for source in sources),
    )


@contextmanager
def _opened(output: Path) -> Iterator[IO[str]]:
    with replacing(output) as raw:
        if output.suffix == ".gz":
            with gzip.open(raw, "wt", encoding="utf-8", compresslevel=2) as packed:
                yield packed
            return
        text = io.TextIOWrapper(raw, encoding="utf-8", write_through=True)
        try:
            yield text
            text.flush()
        finally:
            text.detach()


# -- the first look --------------------------------------------------------------------------------------------------


def _first_pass(path: Path, on_progress: OnProgress) -> _Source:
    source = _Source(path)
    head: dict[str, Any] = {}
    for event in read_events(path, head, on_progress):
        kind = event.get("ph")
        if kind == "X":
            _see_span(source, event)
        elif kind in ("s", "t", "f"):
            key = _flow_key(source, event)
            source.flows[key] = source.flows.get(key, 0) | {"s": _STARTS, "f": _ENDS}.get(str(kind), 0)
            source.first = min(source.first, number(path, event, "ts"))
        elif kind == "M":
            _see_name(source, event)
    if not len(source.begins):
        raise TraceError(f"{path}: it has no spans: nothing to merge")
    info = head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    source.rank = rank if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < 2**20 else -1
    base = head.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < 2**62:
        raise TraceError(f"{path}: baseTimeNanoseconds is {str(base)[:40]!r}, not a number of nanoseconds")
    source.base = base
    _nest(source)
    return source


def _see_span(source: _Source, event: dict[str, Any]) -> None:
    begin = number(source.path, event, "ts")
    duration = number(source.path, event, "dur") if "dur" in event else 0.0
    if duration < 0:
        raise TraceError(f"{source.path}: an event lasts {duration:g} us: times run forwards")
    place = _place(event)
    source.first = min(source.first, begin)
    source.begins.append(begin)
    source.durations.append(duration)
    source.threads.append(source.places.number(place))
    if event.get("cat") in DEVICE_CATEGORIES:
        source.streams.add(place)


def _see_name(source: _Source, event: dict[str, Any]) -> None:
    arguments = event.get("args")
    if event.get("name") == "thread_name" and isinstance(arguments, dict) and isinstance(arguments.get("name"), str):
        source.thread_names.setdefault(_place(event), arguments["name"].strip()[:200])


def _place(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("pid", ""))[:80], str(event.get("tid", ""))[:80]


def _flow_key(source: _Source, event: dict[str, Any]) -> int | str:
    """Of one flow's events alike, and small: there is a flow for each kernel."""
    category, flow = source.categories.number(str(event.get("cat", ""))[:80]), event.get("id")
    if isinstance(flow, int) and 0 <= flow < 2**52:
        return flow << 10 | category if category < 1 << 10 else f"{category} {flow}"
    return f"{category} {str(flow)[:80]!r}"


def _nest(source: _Source) -> None:
    """Cut spans that overhang by a rounding, and find those that cannot stand in a thread's row."""
    begin_N, duration_N = np.array(source.begins), np.array(source.durations)
    thread_N = np.array(source.threads)
    source.asynchronous = bytearray(len(begin_N))
    standing: list[int] = []
    thread = -1
    end = (begin_N + duration_N).tolist()
    begin, threads = begin_N.tolist(), thread_N.tolist()
    for index in np.lexsort((-duration_N, begin_N, thread_N)).tolist():
        if threads[index] != thread:
            thread, standing = threads[index], []
        while standing and end[standing[-1]] <= begin[index] + OVERHANG_US and end[standing[-1]] < end[index]:
            before = standing.pop()
            end[before] = min(end[before], begin[index])
        if standing and end[index] > end[standing[-1]]:
            if end[index] - end[standing[-1]] <= OVERHANG_US:
                end[index] = end[standing[-1]]
            else:
                source.asynchronous[index] = 1
                continue
        standing.append(index)
    source.durations = array("d", (max(0.0, e - b) for e, b in zip(end, begin, strict=True)))
    source.begins, source.threads = array("d"), array("q")


def _number_ranks(sources: Sequence[_Source]) -> None:
    if any(source.rank < 0 for source in sources):
        for rank, source in enumerate(sources):
            source.rank = rank
    by_rank: dict[int, Path] = {}
    for source in sources:
        if source.rank in by_rank:
            raise TraceError(
                f"{source.path} and {by_rank[source.rank]} are both of rank {source.rank}: give the traces of one job, "
                "one a rank"
            )
        by_rank[source.rank] = source.path


def _align(sources: Sequence[_Source]) -> None:
    """One base for all; traces that do not say theirs begin together, unless their times are absolute already."""
    base = min(source.base for source in sources)
    for source in sources:
        source.offset = (source.base - base) / 1000
    firsts = [source.first + source.offset for source in sources]
    day = 86_400e6
    if max(firsts) - min(firsts) > day:  # clocks that have nothing to do with each other
        for source, first in zip(sources, firsts, strict=True):
            source.offset += min(firsts) - first


def _number_flows(sources: Sequence[_Source]) -> int:
    """Give each flow that has both its ends a number that no other has; returns how many there are."""
    count = 0
    for source in sources:
        for key, ends in source.flows.items():
            count += ends == _STARTS | _ENDS
            source.flows[key] = count if ends == _STARTS | _ENDS else 0
    return count


# -- writing ---------------------------------------------------------------------------------------------------------


def _pid(source: _Source) -> int:
    return source.rank + _FIRST_PID


def _metadata(source: _Source, threads: Names) -> Iterator[dict[str, Any]]:
    pid = _pid(source)
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": f"rank {source.rank}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": pid, "args": {"sort_index": source.rank}}
    devices = len({place[0] for place in source.streams})
    for place in source.places.all:
        name = source.thread_names.get(place, f"stream {place[1]}" if place in source.streams else place[1])
        if devices > 1 and place in source.streams:
            name = f"GPU {place[0]} {name}"
        tid = _tid(source, place, threads)
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
        order = 1_000_000 * (place in source.streams) + tid
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _tid(source: _Source, place: tuple[str, str], threads: Names) -> int:
    """Used once in the whole file; past all processes' numbers, which name their main threads."""
    return (1 << 21) + threads.number((source.rank, place))


def _rewritten(source: _Source, threads: Names, on_progress: OnProgress) -> Iterator[dict[str, Any] | None]:
    """The events of a rank as they go into the file; None: one is left out."""
    spans = pairs = 0
    for event in read_events(source.path, {}, on_progress):
        kind = event.get("ph")
        if kind == "M" or not isinstance(kind, str):
            continue
        event["pid"], event["tid"] = _pid(source), _tid(source, _place(event), threads)
        if "ts" in event:
            event["ts"] = round(number(source.path, event, "ts") + source.offset, 3)
        if kind == "X":
            event["dur"], apart = round(source.durations[spans], 3), source.asynchronous[spans]
            spans += 1
            if apart:
                pairs += 1
                yield from _pair(event, f"{source.rank}.{pairs}")
                continue
        elif kind in ("s", "t", "f"):
            flow = source.flows.get(_flow_key(source, event), 0)
            if not flow:
                yield None
                continue
            event["id"] = flow
        yield event


def _pair(event: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """A span as the begin and the end of something asynchronous."""
    common = {"cat": str(event.get("cat", "")), "name": name_of(event), "pid": event["pid"], "tid": event["tid"]}
    begin = {"ph": "b", "id": key, "ts": event["ts"], **common}
    if "args" in event:
        begin["args"] = event["args"]
    yield begin
    yield {"ph": "e", "id": key, "ts": round(event["ts"] + event["dur"], 3), **common}
