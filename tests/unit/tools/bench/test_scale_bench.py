"""What a rebalance costs by size: every part is there, growth is by ranks and layers, rounds are near their bound."""

from __future__ import annotations

import json

import numpy as np
import pytest

from eplb_runtime.migration.schedule import make_schedule
from eplb_runtime.tools.bench import scale


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    result = scale.run(1, sizes=((4, 8), (8, 16), (4, 16)), layers=3, replica_slots=1)
    return json.loads(json.dumps(result))["scale"]


def test_every_part_is_measured(rows: list[dict]) -> None:
    assert [(row["ranks"], row["experts"], row["experts_per_rank"]) for row in rows] == [
        (4, 8, 2),
        (8, 16, 2),
        (4, 16, 4),
    ]
    for row in rows:
        assert all(row[name] >= 0 for name in scale.GROWING)
        assert row["rounds"] >= 3 and row["slowest_over_bound"] >= 1


def test_growth_is_how_many_times_the_row_before_over_how_many_times_its_ranks(rows: list[dict]) -> None:
    first, second, third = rows
    assert first["growth"] is None and third["growth"] is None, "other experts a rank are another family"
    for name in ("broadcast_kb", "rounds", "pause_seconds"):
        assert second["growth"][name] == pytest.approx(second[name] / first[name] / 2)


def test_nearly_all_homes_are_planned_anew() -> None:
    question = scale._question(8, 64, 4, 1)
    moved = question.current.home_rank != question.target.home_rank
    assert moved.mean() > 0.7
    assert question.current.replicas_LRK.max() >= 0


def test_64_ranks_of_deepseek_v3_are_within_5_percent_of_the_bound() -> None:
    question = scale._question(64, 256, 58, 0)
    schedule = make_schedule(question.current, question.target, [scale.EXPERT_BYTES] * 58, scale.STAGING_BYTES)
    taken, bound = schedule.bytes_of_busiest()
    assert taken <= 1.05 * bound
    received = np.bincount(question.target.home_rank[question.current.home_rank != question.target.home_rank])
    assert bound == received.max() * scale.EXPERT_BYTES
