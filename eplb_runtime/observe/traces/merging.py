"""Traces of all ranks of a job in one file that Perfetto opens as it is.

Each rank is a process, "rank N"; its threads and its GPU's streams are the process's threads, under numbers that are
used once in the file. Flows get numbers that are used once, too, and are left out where an end is missing. Times count
from one base. Spans of gloo and annotations of a GPU become pairs of asynchronous events: they overlap on a thread,
whose row can only show nested ones.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...utils.files import replacing
from .columns import DEVICE_CATEGORIES, MERGED, Names
from .kinds import kind_of_gloo
from .reading import (
    OnProgress,
    TraceError,
    duration_of,
    name_of,
    number,
    place_of,
    rank_of,
    read_events,
    thread_name_of,
)

_DAY_US = 86_400e6


@dataclass(frozen=True)
class Merged:
    """What was written. ``dropped_flows``: events of flows with a missing end."""

    ranks: tuple[int, ...]
    events: int
    flows: int
    dropped_flows: int


@dataclass
class _Source:
    """One rank's trace, after a first pass.

    Attributes:
        base, offset: nanoseconds that its times count from; microseconds to add to them.
        first: least time.
        flows: kinds of events of each flow, by `_flow_key`.
        names, streams: of its threads; those that are a GPU's.
    """

    path: Path
    rank: int | None = None
    base: int = 0
    offset: float = 0.0
    first: float = float("inf")
    flows: dict[tuple[str, str], str] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
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
    by_rank = _by_rank(sources)
    base = min(source.base for source in sources)
    for source in sources:
        source.offset = (source.base - base) / 1000
    firsts = [source.first + source.offset for source in sources]
    if max(firsts) - min(firsts) > _DAY_US:  # unrelated clocks: let them begin together
        for source, first in zip(sources, firsts, strict=True):
            source.offset += min(firsts) - first
    numbers, threads = Names(), Names()
    events = dropped = 0
    with replacing(output) as raw:
        packed = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=2) if output.suffix == ".gz" else nullcontext(raw)
        with packed as file:
            head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": base, MERGED: list(by_rank)}
            file.write(json.dumps(head)[:-1].encode() + b', "traceEvents": [\n')
            for rank, source in by_rank.items():
                for event in _rewritten(rank, source, threads, numbers, on_progress):
                    if event is None:
                        dropped += 1
                        continue
                    file.write((b",\n" if events else b"") + json.dumps(event).encode())
                    events += 1
            file.write(b"\n]}\n")
    return Merged(tuple(by_rank), events, len(numbers.numbers), dropped)


def _first_pass(path: Path, on_progress: OnProgress) -> _Source:
    source = _Source(path)
    head: dict[str, Any] = {}
    for event in read_events(path, head, on_progress):
        kind = event.get("ph")
        if kind == "X":
            duration_of(path, event)
            source.first = min(source.first, number(path, event, "ts"))
            place = place_of(event)
            source.names.setdefault(place, "")
            if event.get("cat") in DEVICE_CATEGORIES:
                source.streams.add(place)
        elif kind in ("s", "t", "f"):
            key = _flow_key(event)
            source.flows[key] = source.flows.get(key, "") + str(kind)
        elif (name := thread_name_of(event)) and not source.names.get(place_of(event)):
            source.names[place_of(event)] = name
    if source.first == float("inf"):
        raise TraceError(f"{path}: it has no spans: nothing to merge")
    base = head.get("baseTimeNanoseconds", 0)
    if isinstance(base, bool) or not isinstance(base, int) or not 0 <= base < 2**62:
        raise TraceError(f"{path}: baseTimeNanoseconds is {str(base)[:40]!r}, not a number of nanoseconds")
    source.base, source.rank = base, rank_of(head)
    return source


def _flow_key(event: dict[str, Any]) -> tuple[str, str]:
    return str(event.get("cat", ""))[:80], repr(event.get("id"))[:80]


def _by_rank(sources: Sequence[_Source]) -> dict[int, _Source]:
    """Return sources by rank, in order; by their place where a trace names no rank."""
    if any(source.rank is None for source in sources):
        return dict(enumerate(sources))
    found: dict[int, _Source] = {}
    for source in sorted(sources, key=lambda source: source.rank or 0):
        other = found.setdefault(source.rank or 0, source)
        if other is not source:
            both = f"{other.path} and {source.path} are both of rank {source.rank}"
            raise TraceError(f"{both}: give the traces of one job, one a rank")
    return found


def _rewritten(
    rank: int, source: _Source, threads: Names, numbers: Names, on_progress: OnProgress
) -> Iterator[dict[str, Any] | None]:
    """Yield the events of a rank as they go into the file; None: one is left out."""
    pid = rank + 1  # Perfetto takes process 0 for the idle one

    def tid(place: tuple[str, str]) -> int:
        """Return a number past those of all processes, which name their main threads."""
        return (1 << 31) + threads.number((rank, place))

    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": f"rank {rank}"}}
    for place, name in source.names.items():
        shown = name or f"{'stream' if place in source.streams else 'thread'} {place[1]}"
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid(place), "args": {"name": shown}}
    pairs = 0
    for event in read_events(source.path, {}, on_progress):
        kind = event.get("ph")
        if kind == "M" or not isinstance(kind, str):
            continue
        event |= {"pid": pid, "tid": tid(place_of(event))}
        if "ts" in event:
            event["ts"] = round(number(source.path, event, "ts") + source.offset, 3)
        if kind in ("s", "t", "f"):
            key = _flow_key(event)
            whole = "s" in source.flows[key] and "f" in source.flows[key]
            yield event | {"id": numbers.number((rank, key))} if whole else None
        elif kind == "X" and (kind_of_gloo(name_of(event)) or event.get("cat") == "gpu_user_annotation"):
            pairs += 1
            pair = {"cat": "spans", "name": name_of(event), "id": f"{rank}.{pairs}", "pid": pid, "tid": event["tid"]}
            yield {"ph": "b", **pair, "ts": event["ts"], "args": event.get("args")}
            yield {"ph": "e", **pair, "ts": round(event["ts"] + duration_of(source.path, event), 3)}
        else:
            yield event
