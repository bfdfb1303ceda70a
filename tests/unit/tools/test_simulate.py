"""A simulated policy sees only the past, is judged on what came next, and pays for what it moves."""

import json
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.cli import main
from eplb_runtime.planner import PlanError
from eplb_runtime.tools import simulate as room
from eplb_runtime.tools.bubbles import BACKWARD, FORWARD, INPUT, SCHEDULES, WEIGHT, Times, play, stages_of, table_of
from eplb_runtime.tools.simulate import Series, StepModel, simulate
from eplb_runtime.topology import Topology

TOPOLOGY = Topology(4, 2)


def series(windows: int = 12, layers: int = 2, experts: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 100, (windows, layers, experts)).astype(np.float64)


def skewed(windows: int = 12) -> np.ndarray:
    """The two experts of rank 0 carry nearly all tokens, in every window."""
    load = np.ones((windows, 2, 8))
    load[:, :, :2] = 100
    return load


def run(load: np.ndarray, policies: list[str], **options: Any) -> dict[str, room.PolicyRun]:
    """Options as the fields of `Series`, or as arguments of ``simulate``."""
    options = {"slots_per_rank": 2, "every": 3, **options}
    series = Series(load, **{f.name: options.pop(f.name) for f in fields(Series) if f.name in options})
    return {done.policy: done for done in simulate(series, TOPOLOGY, policies=policies, **options)}


def test_plans_see_only_windows_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    load = series()
    seen: list[np.ndarray] = []
    real = room.plan

    def spy(past: np.ndarray, *args: Any, **kwargs: Any) -> Any:
        seen.append(past)
        return real(past, *args, **kwargs)

    monkeypatch.setattr(room, "plan", spy)
    run(load, ["incremental"], every=2)
    assert [len(past) for past in seen[1:]] == [2, 4, 6, 8, 8], "the first call only compiles"
    assert np.array_equal(seen[1], load[0:2])
    assert np.array_equal(seen[5], load[2:10])


def test_static_is_judged_by_the_loads_own_imbalance_and_moves_nothing() -> None:
    load = series()
    static = run(load, ["static"])["static"]
    by_rank = load[3:].reshape(9, 2, 4, 2).sum(axis=3)
    expected = by_rank.max(axis=2) / by_rank.mean(axis=2)
    assert np.allclose(static.imbalance, expected)
    summary = static.summary()
    assert summary["balancedness"]["mean"] == pytest.approx((1 / expected).mean())
    assert summary["imbalance"]["max"] == pytest.approx(expected.max())
    assert summary["moved_slots_share"] == 0 and summary["rebalances"] == 0 and static.moved_bytes == 0


def test_a_lasting_skew_is_mended_once_and_paid_for() -> None:
    static, incremental = run(skewed(), ["static", "incremental"], steps_per_window=4).values()
    assert incremental.imbalance.mean() < 0.7 * static.imbalance.mean()
    assert incremental.summary()["rebalances"] == 1, "the load stays, so the placement does"
    first = incremental.plans[0]
    assert first.moved_slots > 0
    assert first.bytes_intra_node + first.bytes_inter_node == first.moved_homes * StepModel().home_bytes
    assert incremental.migration_seconds[0] > 0
    seconds = sum(incremental.step_seconds) + sum(incremental.migration_seconds) / 4
    assert incremental.summary()["step_seconds"] == pytest.approx(seconds / 9)


def test_step_model_is_compute_of_the_busiest_rank_plus_the_slower_link() -> None:
    model = StepModel(token_seconds=0.9, token_bytes=4 * 20)
    fast = Topology(4, 4, intra_node_bandwidth=1e3)
    # 7 tokens x (0.9 s + 4 crossings x 20 bytes x 3/4 / 1e3)
    assert model.seconds(np.array([7.0]), fast) == pytest.approx(7 * (0.9 + 0.06))
    slow = Topology(4, 2, intra_node_bandwidth=1e3, inter_node_bandwidth=1e2)
    # 1/4 of the tokens cross inside the node, 2/4 between nodes at a tenth of the speed
    assert model.seconds(np.array([3.0, 4.0]), slow) == pytest.approx(7 * (0.9 + 0.4))
    copied = StepModel(replica_bytes=20, gradient_bytes=40)
    assert copied.refresh_seconds(3, 2, slow) == pytest.approx(3 * 2 * (20 + 40) / 1e2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"every": 12}, "a series of 12 windows cannot be replanned every 12: give --every between 1 and 11"),
        ({"policies": ["best"]}, "policy 'best' is unknown; choose one of: "),
        ({"slots_per_rank": 1}, "4 ranks x 1 slots for 8 experts: give 2 to 8 slots per rank"),
        ({"max_moves": -1}, "policy incremental: max_moves=-1"),
    ],
)
def test_a_simulation_that_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    options = {"policies": ["incremental"], **options}
    with pytest.raises(PlanError) as refusal:
        run(series(), **options)
    assert says in str(refusal.value)


# -- Pipeline schedules played by a small simulator: the published formulas, and tables that cannot run


PUBLISHED = {"1f1b": (3, 9, 21), "zb1p": (1, 3, 7), "dualpipev": (2, 6, 14)}
"""Bubbles on 2, 4 and 8 ranks at F = I = W = 1, a forward and a backward together 3."""
RANKS = (2, 4, 8)
UNIT = Times(overlapped=3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bubbles_are_those_of_the_published_formulas(name: str) -> None:
    formula = SCHEDULES[name].formula
    assert formula is not None
    for ranks, bubble in zip(RANKS, PUBLISHED[name], strict=True):
        played = play(table_of(name, ranks, 32), UNIT)
        assert played.bubble == bubble == formula(ranks, UNIT)
        assert np.ptp(played.busy_R) == 0
        assert played.activations_R.min() == {"1f1b": 1, "zb1p": ranks, "dualpipev": 2 * ranks + 1}[name]
    quick, least = Times(overlapped=2), {"dualpipev": 1}.get(name, PUBLISHED[name][0])
    assert play(table_of(name, 2, 32), quick).bubble == formula(2, quick) == least


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_micro_batch_passes_every_stage_once_each_way(name: str) -> None:
    for ranks, microbatches in ((2, 8), (4, 16), (6, 24)):
        table = table_of(name, ranks, microbatches)
        done: dict[str, set[tuple[int, int]]] = {FORWARD: set(), INPUT: set(), WEIGHT: set()}
        for part in (part for steps in table for step in steps for part in step):
            for kind in (INPUT, WEIGHT) if part.kind == BACKWARD else (part.kind,):
                done[kind].add((part.stage, part.microbatch))
        everything = {(stage, number) for stage in range(stages_of(table)) for number in range(microbatches)}
        assert all(found == everything for found in done.values())


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(st.floats(0.1, 10), min_size=3, max_size=3),
)
def test_steps_of_a_rank_follow_each_other_and_wait_for_what_they_need(
    name: str, half: int, more: int, unit: list[float]
) -> None:
    ranks = 2 * half
    times = Times(*unit)
    table = table_of(name, ranks, 2 * ranks * more)
    played = play(table, times)
    ends: dict[tuple[str, int, int], float] = {}
    even = [1.0] * stages_of(table)
    for steps, begins in zip(table, played.began, strict=True):
        free = 0.0
        for step, begin in zip(steps, begins, strict=True):
            assert begin >= free
            free = begin + times.of(step, even)
            ends |= {(part.kind, part.stage, part.microbatch): free for part in step}
    for steps, begins in zip(table, played.began, strict=True):
        for step, begin in zip(steps, begins, strict=True):
            for part in step:
                if part.kind == FORWARD and part.stage:
                    assert ends[FORWARD, part.stage - 1, part.microbatch] <= begin
    assert played.span == max(ends.values()) and played.bubble >= -1e-9 * played.span


def test_an_uneven_stage_stretches_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    spans = []
    for imbalance in ([], ["--imbalance", "1.8,1.4,1.3,1.2"], ["--imbalance", "1.1,1.05,1.05,1.02"]):
        assert main(["bubbles", "--schedule", "1F1B", "--microbatches", "16", "--json", *imbalance]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        spans.append(row["step"])
    even, before, after = spans
    assert even < after < before


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--schedule", "gpipe"], "unknown; choose one of: 1f1b"),
        (["--schedule", "dualpipev", "--ranks", "4", "--microbatches", "3"], "at least as many microbatches"),
        (["--schedule", "1f1b", "--imbalance", "1.2,1.1"], "2 stages are given an imbalance, the schedule has 4"),
        (["--imbalance", "0.5"], "1 or more"),
        (["--ranks", "9999999"], "more than is played here"),
        (["--table", "dumped.csv"], "unrecognized arguments: --table"),
    ],
)
def test_bad_input_gets_one_line(arguments: list[str], said: str, refused: Callable[..., str]) -> None:
    assert said in refused("bubbles", *arguments)
