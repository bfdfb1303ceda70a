"""Pipeline schedules played by a small simulator: the published formulas, and tables that cannot run."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_runtime.cli.program import main
from eplb_runtime.tools.bubbles.playing import BACKWARD, FORWARD, INPUT, WEIGHT, Times, follow, stages_of
from eplb_runtime.tools.bubbles.tables import SCHEDULES, table_of

PUBLISHED = {"1f1b": (3, 9, 21), "zb1p": (1, 3, 7), "dualpipev": (2, 6, 14)}
"""Bubbles on 2, 4 and 8 ranks at F = I = W = 1, a forward and a backward together 3."""
RANKS = (2, 4, 8)
UNIT = Times(overlapped=3)


@pytest.mark.parametrize("name", PUBLISHED)
def test_bubbles_are_those_of_the_published_formulas(name: str) -> None:
    formula = SCHEDULES[name].formula
    assert formula is not None
    for ranks, bubble in zip(RANKS, PUBLISHED[name], strict=True):
        played = follow(table_of(name, ranks, 32), UNIT)
        assert played.bubble == bubble == formula(ranks, UNIT)
        assert np.ptp(played.busy_R) == 0


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
    played = follow(table, times)
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
def test_bad_input_gets_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bubbles", *arguments])
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count("\n") == 1
