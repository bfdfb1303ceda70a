"""Reinforcement learning played on recorded loads: declared loads beside a forecast, and beside one load a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_runtime.cli import main
from eplb_runtime.planner import PlanError
from eplb_runtime.tools.bench.rollouts import Rules, run


def by_policy(result: dict[str, Any], load: str) -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in result["rollouts"] if row["load"] == load}


def test_declared_loads_come_within_three_per_cent_of_the_oracle_on_real_routing(shared_data: Path) -> None:
    names = [f"gpt_oss_20b_expert_load_{order}.npz" for order in ("by_domain", "shuffled")]
    result = json.loads(json.dumps(run([shared_data / name for name in names])))
    for name in names:
        found = by_policy(result, name)
        share = {policy: row["share"] for policy, row in found.items()}
        assert found["declared"]["of_oracle"] > 0.97 and found["declared, copies"]["of_oracle"] > 0.97
        assert share["static"] < share["forecast"] < share["declared, summed"] < share["declared"]
        assert share["declared"] < share["declared, copies"] <= found["declared, copies"]["at_most"] <= 1
        assert found["declared, summed"]["step"] < found["declared"]["step"], "as one load the step is evener"
        assert found["declared, summed"]["micro_batch"] > found["declared"]["micro_batch"], "and its batches are not"
        assert 0 == found["static"]["moved_gib"] < found["declared"]["moved_gib"] < found["oracle"]["moved_gib"]


def test_a_step_without_doubt_is_played_as_computed_by_hand(tmp_path: Path) -> None:
    """Two ranks of two experts; the busy pair changes with each step, and no order of homes is even but by swaps."""
    steps = [[[9, 9, 1, 1]], [[1, 1, 9, 9]], [[9, 9, 1, 1]]]
    np.savez(tmp_path / "load.npz", load=np.array(steps))
    found = by_policy(run([tmp_path / "load.npz"], Rules(ranks=2, micro_batches=1)), "load.npz")
    assert found["static"]["step"] == found["static"]["micro_batch"] == pytest.approx(1.8)
    assert found["static"]["share"] == pytest.approx(1 / 1.8)
    assert found["declared"]["share"] == pytest.approx(1.0) and found["static"]["of_oracle"] == pytest.approx(1 / 1.8)
    assert found["declared"]["moved_homes"] == 1.0, "two at the first of two decisions, none at the second"
    with pytest.raises(PlanError, match="no two steps of 2 micro-batches"):
        run([tmp_path / "load.npz"], Rules(ranks=2, micro_batches=2))


def test_the_command_prints_a_table_of_each_load_or_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "rollouts"]) == 0
    shown = capsys.readouterr().out
    assert "sample: 8 ranks, 4 micro-batches a step" in shown and "declared, copies" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert main(["bench", "rollouts", "not/there.npz"]) == 2
    assert "not/there.npz" in (line := capsys.readouterr().err) and line.count("\n") == 1
    assert main(["bench", "rollouts", "--ranks", "7"]) == 2
    assert "7 ranks do not divide 64 experts" in capsys.readouterr().err
