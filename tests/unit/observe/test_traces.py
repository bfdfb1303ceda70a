"""What a trace says: held against small traces whose answers are known, and against one that was published."""

import gzip
import json
import threading
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eplb_runtime.cli import main
from eplb_runtime.observe.traces import TraceError, analyse, length, overlap, union
from eplb_runtime.utils.spans import phase

HOST, GPU = 4711, 0
FIRST = 5_000_000.0
"""When they begin: times of a trace count from some boot or other."""


def span(
    name: str, category: str, begin: float, end: float, tid: Any = 1, pid: Any = HOST, **more: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": FIRST + begin,
        "dur": end - begin,
    } | more


def kernel(name: str, begin: float, end: float, stream: int, launched: int) -> dict[str, Any]:
    return span(name, "kernel", begin, end, stream, GPU, args={"correlation": launched})


def launch(begin: float, correlation: int, tid: int = 1) -> dict[str, Any]:
    return span("cudaLaunchKernel", "cuda_runtime", begin, begin + 2, tid, args={"correlation": correlation})


DISPATCH = "void deep_ep::internode::dispatch<false, 8>(int4*, float*)"
COMBINE = "void deep_ep::internode::combine<false, 8>(int4*, float*)"
NOTIFY = "void deep_ep::internode::notify_dispatch<false, 8>(int const*)"
GEMM = "void cutlass::device_kernel<Gemm>(Gemm::Params)"
REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def gpu_events() -> list[dict[str, Any]]:
    """What it holds (us): span 0 to 400.

    Stream 7 computes 0-100, 150-250 and 260-300, stream 20 40-60 too: computing 240. Stream 20 sends 60-150 (notify
    60-70, dispatch 70-150) and 290-400 (combine); stream 24 140-160 (all-reduce): communication 60-160 and 290-400,
    210; hidden 60-100, 150-160, 290-300: 60; exposed 150. Idle: 250-260.
    """
    host = [
        span("ProfilerStep#3", "user_annotation", -50, 300),
        span("eplb_runtime compute(F) layer=2 epoch=1", "user_annotation", -40, -30),
        launch(-39, 1),
        launch(-37, 2),
        span("eplb_runtime dispatch(F) layer=2 epoch=1", "user_annotation", -25, 20),
        launch(-20, 3),
        launch(-10, 4),
        span("inside, of no phase", "user_annotation", -8, -2),
        launch(-5, 5),
        span("eplb_runtime compute(F) layer=3 epoch=1", "user_annotation", 30, 40),
        launch(31, 6),
        launch(33, 7),
        launch(60, 8),
    ]
    device = [
        kernel(GEMM, 0, 100, 7, 1),
        span("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 40, 60, 20, GPU, args={"correlation": 2}),
        kernel(NOTIFY, 60, 70, 20, 3),
        kernel(DISPATCH, 70, 150, 20, 4),
        kernel(REDUCE, 140, 160, 24, 5),
        kernel(GEMM, 150, 250, 7, 6),
        kernel(GEMM, 260, 300, 7, 7),
        kernel(COMBINE, 290, 400, 20, 8),
    ]
    return [*host, *device]


def cpu_events() -> list[dict[str, Any]]:
    """What it holds (us): span 0 to 100.

    The training thread computes 0-30 and 40-60, waits in a node of autograd until 100; another computes 20-35:
    computing 55. gloo sends 25-55 and 60-100: communication 70, hidden 25, exposed 45. Idle: nothing.
    """
    return [
        span("ProfilerStep#1", "user_annotation", -5, 110, 1),
        span("eplb_runtime dispatch(F) layer=0 epoch=0", "user_annotation", 24, 58, 1),
        span("eplb_runtime combine(B) layer=0 epoch=0", "user_annotation", 59, 101, 1),
        span("aten::linear", "cpu_op", 0, 30, 1),
        span("aten::mm", "cpu_op", 1, 29, 1),
        span("aten::mm", "cpu_op", 40, 60, 1),
        span("c10d::alltoall_base_", "cpu_op", 24, 25, 1),
        span("_CombineBackward", "cpu_op", 59, 100, 1),
        span("aten::sort", "cpu_op", 20, 35, 2),
        span("gloo:all_to_all", "user_annotation", 25, 55, 3),
        span("gloo:all_to_all", "user_annotation", 60, 100, 3),
    ]


def write(path: Path, events: list[dict[str, Any]], **head: Any) -> Path:
    """As torch writes it; gzipped if its name says so."""
    text = json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": str(path)}).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def of_rank(path: Path, rank: int, events: list[dict[str, Any]], base: int = 10**18) -> Path:
    return write(path, events, distributedInfo={"backend": "nccl", "rank": rank}, baseTimeNanoseconds=base)


# -- what traces say


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


def test_analyse_prints_tables_and_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str | Path) -> str:
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    path = of_rank(tmp_path / "a.json", 0, gpu_events())
    shown = said("trace", "analyse", path, "--layers")
    assert "28.6% of communication is hidden" in shown and "dispatch(F)" in shown and "1 step of 350 us" in shown
    assert "several files" not in shown and "several files are of rank 0" in said("trace", "analyse", path, path)
    found = json.loads(said("trace", "analyse", path, "--json"))
    assert found["span_us"] == 400
    assert found["communication"] == {"us": 210, "hidden_us": 60, "exposed_us": 150, "hidden_share": 0.285714}
    assert {"kernels", "phases", "idle_us"} <= found.keys()


def test_what_cannot_work_is_said_in_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no traces in this folder" in refused("trace", "analyse", tmp_path / "empty")
    assert "No such file" in refused("trace", "analyse", tmp_path / "none.json")


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
