"""The splitter's benchmark."""

from __future__ import annotations

import json

from eplb_runtime.tools.bench.split import run


def test_the_benchmark_shows_a_split_near_the_optimum_and_is_json() -> None:
    seen: list[str] = []
    result = json.loads(json.dumps(run(repeats=2, on_progress=seen.append)))
    assert [(row["ranks"], row["redundant"]) for row in result["split"]] == [(32, 32), (32, 64), (64, 64)]
    for row in result["split"]:
        assert row["water_filling"] < row["even"]
        assert row["gap_max"] < 0.005
        assert row["totals_us"] > 0
    assert seen == [f"generated, {row['ranks']} ranks, {row['redundant']} redundant" for row in result["split"]]
