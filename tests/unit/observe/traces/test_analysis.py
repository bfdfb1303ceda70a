"""What a trace says: held against small traces whose answers are known, and against one that was published."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import GEMM, cpu_events, gpu_events, of_rank, write

from eplb_runtime.observe.traces import analyse
from eplb_runtime.observe.traces.intervals import length, overlap, union


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
