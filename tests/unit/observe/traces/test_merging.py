"""One file for all ranks: what Perfetto's importer asks of it, and that nothing gets lost on the way."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GPU, cpu_events, flow, gpu_events, of_rank, span, write

from eplb_runtime.observe.traces import TraceError, analyse, merge


def merged(folder: Path, *paths: Path) -> list[dict[str, Any]]:
    merge(paths, folder / "merged.json")
    events: list[dict[str, Any]] = json.loads((folder / "merged.json").read_text())["traceEvents"]
    return events


def import_errors(events: list[dict[str, Any]]) -> list[str]:
    """What Perfetto's importer of JSON counts as errors, by the rules in its source: processes and threads by whole
    numbers, a thread's name by its number alone, complete slices of a thread nested, asynchronous ones in pairs, flows
    with whole numbers that begin once, inside a slice, before they end."""
    wrong = []
    names: dict[int, set[tuple[int, str]]] = defaultdict(set)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    flows: dict[tuple[int, str, str], list[tuple[str, float]]] = defaultdict(list)
    pairs: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for event in events:
        pid, tid, kind = event["pid"], event["tid"], event["ph"]
        if not all(isinstance(number, int) and 0 < number < 2**32 for number in (pid, tid)):
            wrong.append(f"process {pid!r}, thread {tid!r}")
        if kind == "M" and event["name"] == "thread_name":
            names[tid].add((pid, event["args"]["name"]))
        elif kind == "X":
            slices[pid, tid].append((event["ts"], event["ts"] + event["dur"]))
        elif kind in "bne":
            pairs[event["cat"], event["name"], event["id"]].append(kind)
        elif kind in "stf":
            if not isinstance(event["id"], int):
                wrong.append(f"flow {event['id']!r}")
            flows[event["id"], event["cat"], event["name"]].append((kind, event["ts"]))
    wrong += [f"thread {tid} has names {found}" for tid, found in names.items() if len(found) > 1]
    wrong += [f"flow {key}: {found}" for key, found in flows.items() if [kind for kind, _ in found] != ["s", "f"]]
    wrong += [f"pair {key}: {found}" for key, found in pairs.items() if found != ["b", "e"]]
    for place, spans in slices.items():
        open_: list[float] = []
        for begin, end in sorted(spans, key=lambda times: (times[0], -times[1])):
            while open_ and open_[-1] <= begin + 1e-6:
                open_.pop()
            if open_ and end > open_[-1] + 1e-6:
                wrong.append(f"{place}: {begin} to {end} overlaps a slice to {open_[-1]}")
            open_.append(end)
    return wrong


def overlapping() -> list[dict[str, Any]]:
    """Two sends at once, as gloo records them on one thread."""
    return [
        span("gloo:send", "user_annotation", 0, 50, 9),
        span("gloo:send", "user_annotation", 10, 80, 9),
        span("gloo:recv", "user_annotation", 100, 150, 9),
    ]


def test_ranks_become_processes_that_import_without_errors(tmp_path: Path) -> None:
    # Both ranks have the same process, threads and flows; one began 2 ms later by its own base.
    one = of_rank(tmp_path / "a.json", 1, gpu_events() + overlapping(), base=10**18 + 2_000_000)
    other = of_rank(tmp_path / "b.json.gz", 0, gpu_events() + overlapping())
    events = merged(tmp_path, one, other)
    assert import_errors(events) == []
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {1: "rank 0", 2: "rank 1"}
    threads = [e["tid"] for e in events if e["name"] == "thread_name"]
    assert len(threads) == len(set(threads)) == 2 * 5
    first = {pid: min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in processes}
    assert first[2] - first[1] == 2_000
    assert {e["name"] for e in events if e["ph"] == "b"} == {"gloo:send", "gloo:recv"}


def test_the_check_for_import_errors_finds_them(tmp_path: Path) -> None:
    """As the ranks' own files would be, put together without care."""
    for events, error in (
        (overlapping(), "overlaps"),
        ([flow("s", "a", 0), flow("f", "a", 1)], "flow 'a'"),
        ([flow("s", 1, 0), flow("f", 1, 2)] * 2, "flow (1"),
        ([span("x", "cpu_op", 0, 1, pid="Spans")], "process 'Spans'"),
        ([flow("f", 1, 0)], "flow (1"),
    ):
        assert any(error in found for found in import_errors(events)), error


def test_nothing_that_ran_is_lost_and_its_times_stay(tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 3, gpu_events())
    found = merge([path], tmp_path / "merged.json.gz")
    assert (found.ranks, found.flows, found.dropped_flows) == ((3,), 1, 1)
    events = json.loads(gzip.decompress((tmp_path / "merged.json.gz").read_bytes()))["traceEvents"]
    after = {(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    assert after == {(e["name"], e["ts"], e["dur"]) for e in gpu_events() if e["ph"] == "X"}
    with pytest.raises(TraceError, match="holds several ranks"):
        analyse(tmp_path / "merged.json.gz")


def test_traces_without_ranks_go_by_their_order(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.json", cpu_events()) for n in range(3)]
    assert merge(paths, tmp_path / "merged.json").ranks == (0, 1, 2)


def test_clocks_that_have_nothing_in_common_begin_together(tmp_path: Path) -> None:
    later = [event | {"ts": event["ts"] + 1e15} for event in cpu_events()]
    events = merged(tmp_path, write(tmp_path / "a.json", cpu_events()), write(tmp_path / "b.json", later))
    starts = {pid: min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == pid) for pid in (1, 2)}
    assert starts[1] == starts[2]


def test_two_traces_of_one_rank_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    paths = [of_rank(tmp_path / name, 1, cpu_events()) for name in ("a.json", "b.json")]
    with pytest.raises(TraceError, match="both of rank 1"):
        merge(paths, tmp_path / "merged.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "b.json"]


TIMES = st.tuples(st.integers(0, 60), st.integers(0, 30), st.integers(1, 2), st.sampled_from([1, GPU]))


@settings(deadline=None, max_examples=30)
@given(st.lists(TIMES, min_size=1, max_size=25))
def test_any_spans_import_without_errors(
    tmp_path_factory: pytest.TempPathFactory, times: list[tuple[int, ...]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    events = [span("gloo:send", "user_annotation", 3 * b, 3 * (b + d), tid, pid) for b, d, tid, pid in times]
    found = merged(folder, of_rank(folder / "a.json", 0, events), of_rank(folder / "b.json", 1, events))
    assert import_errors(found) == []
    assert sum(e["ph"] in "Xb" for e in found) == 2 * len(times)
