"""What a trace says: held against small traces whose answers are known, and against one that was published."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import GEMM, cpu_events, gpu_events, of_rank, write

from eplb_runtime.cli import main
from eplb_runtime.observe.traces import TraceError, analyse
from eplb_runtime.observe.traces.phases import length, overlap, union
from eplb_runtime.utils.spans import phase


def test_the_trace_of_a_gpu_gives_its_known_answer(tmp_path: Path) -> None:
    found = analyse(of_rank(tmp_path / "trace.json", 5, gpu_events()))
    assert (found.device, found.rank, found.span_us, found.busy_us, found.idle_us) == ("gpu", 5, 400, 390, 10)
    assert (found.compute_us, found.steps, found.step_us) == (240, 1, 350)
    travelled = found.communication
    assert (travelled.us, travelled.hidden_us, travelled.exposed_us) == (210, 60, 150)
    assert travelled.hidden_share == round(60 / 210, 6)
    assert found.kinds == {
        "compute": {"count": 4, "us": 260},
        "combine": {"count": 1, "us": 110},
        "dispatch": {"count": 1, "us": 80},
        "collective": {"count": 1, "us": 20},
        "notify and layout": {"count": 1, "us": 10},
    }
    first = found.kernels[0]
    assert (first.name, first.count, first.us, first.kind) == (GEMM, 3, 240, "compute")


def test_a_kernel_belongs_to_the_phase_in_which_it_was_launched(tmp_path: Path) -> None:
    phases = {(p.phase, p.layer): p for p in analyse(write(tmp_path / "trace.json", gpu_events())).phases}
    assert set(phases) == {("compute", 2), ("dispatch", 2), ("compute", 3)}
    # Launched in dispatch of layer 2: notify 60-70, dispatch 70-150, all-reduce 140-160; nothing computes 100-150.
    dispatch = phases["dispatch", 2]
    assert (dispatch.host_us, dispatch.compute_us, dispatch.communication_us, dispatch.exposed_us) == (45, 0, 100, 50)
    assert phases["compute", 2].compute_us == 100  # the copy lies inside the first GEMM
    assert phases["compute", 3].compute_us == 140


def test_the_trace_of_a_cpu_gives_its_known_answer(tmp_path: Path) -> None:
    found = analyse(write(tmp_path / "trace.json.gz", cpu_events()))
    assert (found.device, found.rank, found.span_us, found.busy_us, found.compute_us) == ("cpu", None, 100, 100, 55)
    travelled = found.communication
    assert (travelled.us, travelled.hidden_us, travelled.exposed_us) == (70, 25, 45)
    phases = {(p.phase, p.direction): p for p in found.phases}
    assert (phases["dispatch", "F"].communication_us, phases["dispatch", "F"].exposed_us) == (30, 5)
    assert (phases["combine", "B"].communication_us, phases["combine", "B"].exposed_us) == (40, 40)
    # An operator inside another counts once, a node of autograd that waits not at all.
    assert found.kinds["compute"] == {"count": 3, "us": 65}


def test_the_published_trace_gives_its_published_numbers(shared_data: Path) -> None:
    found = analyse(shared_data / "deepseek_train_profile.json.gz")
    assert found.span_us == 129_012 and round(found.busy_us / found.span_us, 3) == 0.996
    travelled = found.communication
    assert (travelled.us, travelled.hidden_us, travelled.exposed_us) == (113_440, 109_263, 4_177)
    assert round(travelled.hidden_share, 3) == 0.963
    assert found.kinds["dispatch"] == {"count": 8, "us": 31_004}
    assert found.kinds["combine"] == {"count": 8, "us": 49_448}
    assert found.kinds["notify and layout"] == {"count": 20, "us": 32_988}
    # Four MoE layers, whose phases have no numbers; every communication kernel belongs to one of them.
    by_phase = {(p.phase, p.direction, p.layer): p for p in found.phases}
    assert len(by_phase) == 40 and {layer for _, _, layer in by_phase} == {0, 1, 2, 3}
    assert sum(p.communication_us for p in found.phases) == 113_440
    assert round(sum(p.exposed_us for p in found.phases)) == 4_177


SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@settings(deadline=None)
@given(SPANS, SPANS)
def test_intervals_agree_with_counting_each_unit_of_time(
    one: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    def covered(spans: list[tuple[int, int]]) -> set[int]:
        return {unit for begin, end in spans for unit in range(begin, end)}

    a, b = (union(np.array(spans, dtype=np.float64).reshape(-1, 2)) for spans in (one, other))
    assert length(a) == len(covered(one))
    assert overlap(a, b) == len(covered(one) & covered(other))
    assert (a[1:, 0] > a[:-1, 1]).all()


# -- `eplb-runtime trace`, as it is typed


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path, status: int = 0) -> str:
        assert main([*map(str, arguments)]) == status
        shown = capsys.readouterr()
        if status == 0:
            return shown.out
        assert shown.out == "" and shown.err.count("\n") == 1
        return shown.err

    return run


def test_analyse_prints_tables_and_one_json_object(said: Any, tmp_path: Path) -> None:
    path = of_rank(tmp_path / "a.json", 0, gpu_events())
    shown = said("trace", "analyse", path, "--layers")
    assert "28.6% of communication is hidden" in shown and "dispatch(F)" in shown and "1 step of 350 us" in shown
    assert "several files" not in shown and "several files are of rank 0" in said("trace", "analyse", path, path)
    found = json.loads(said("trace", "analyse", path, "--json"))
    assert found["span_us"] == 400
    assert found["communication"] == {"us": 210, "hidden_us": 60, "exposed_us": 150, "hidden_share": 0.285714}
    assert {"kernels", "phases", "idle_us"} <= found.keys()


def test_what_cannot_work_is_said_in_one_line(said: Any, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert "broken off" in said("trace", "analyse", tmp_path / "b.json", status=2)
    assert "no traces in this folder" in said("trace", "analyse", tmp_path / "empty", status=2)
    assert "No such file" in said("trace", "analyse", tmp_path / "none.json", status=2)


# -- Whatever a trace holds, reading it ends with an answer or with this room's own error in one line


calm = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
with TemporaryDirectory() as _folder:
    WHOLE = of_rank(Path(_folder) / "a.json", 0, [*gpu_events(), *cpu_events()]).read_bytes()


def read(content: bytes, name: str = "trace.json") -> None:
    """Analysed; the only error is one line that names the file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            analyse(path)
        except TraceError as error:
            assert str(path) in str(error) and "\n" not in str(error)


@calm
@given(st.binary(max_size=80))
def test_any_bytes(content: bytes) -> None:
    read(content)
    read(b"\x1f\x8b" + content)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "broken off"),
        (b'{"traceEvents": [', "broken off"),
        (b'{"traceEvents": 5}', 'no "traceEvents"'),
        (b'{"a": 1}', 'no "traceEvents"'),
        (b"hello", "not a JSON trace"),
        (b"\xff\xfe{}", "not a JSON trace"),
        (b"[[]]", "an event is a list"),
        (b"[" * 100_000, "not a JSON trace"),
        (b'[{"ph":"X","ts":1e999,"cat":"kernel"}]', "ts is inf"),
        (b'[{"ph":"X","ts":1,"dur":-4,"cat":"kernel"}]', "times run forwards"),
        (b'[{"ph":"X","cat":"kernel"}]', "ts is 'missing'"),
        (b'[{"ph":"X","ts":' + b"9" * 5000 + b"}]", "not a JSON trace"),
    ],
)
def test_what_is_said(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with pytest.raises(TraceError, match=says):
        analyse(tmp_path / "trace.json")


def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "trace.json")
    with pytest.raises(TraceError, match="not a regular file"):
        analyse(tmp_path / "trace.json")


# -- Spans of a profiler's trace that say what a rank does


def test_without_a_profiler_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", lambda name: pytest.fail("it was recorded"))
    with phase("dispatch", "F", 0, 0):
        pass


def test_phases_of_all_threads_are_in_the_trace(tmp_path: Path) -> None:
    def work(name: str) -> None:
        with phase(name, "", 1, 0):
            torch.ones(3).add(1)

    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    steps = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=steps,
        on_trace_ready=lambda trace: trace.export_chrome_trace(str(tmp_path / "rank0.json.gz")),
        experimental_config=all_threads,
    ) as recorded:
        for _ in range(5):
            work("here")
            beside = threading.Thread(target=work, args=("beside",))
            beside.start()
            beside.join()
            recorded.step()
    work("here")
    found = analyse(tmp_path / "rank0.json.gz")
    assert found.steps == 2
    assert {(p.phase, p.layer, p.spans) for p in found.phases} == {("here", 1, 2), ("beside", 1, 2)}
