"""The training job of ``launch/`` writes what it promises."""

from __future__ import annotations

import json
import math
from itertools import chain
from pathlib import Path

from scripts import run_script

from eplb_runtime.observe.traces import analyse, traces_in

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24


def run_demo(out: Path, options: dict[str, object]) -> dict:
    arguments = map(str, chain.from_iterable({**options, "--out": out}.items()))
    done = run_script(ROOT / "launch/train_moe.py", *arguments, ranks=2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "bit-identical: yes" in done.stdout
    assert "s saved: expert work" in done.stdout
    summary: dict = json.loads((out / "summary.json").read_text())
    return summary


def test_the_job_shows_what_rebalancing_did(tmp_path: Path) -> None:
    small = {"--steps": STEPS, "--interval": 4, "--layers": 2, "--width": 64, "--batch": 2, "--length": 64}
    summary = run_demo(tmp_path, {**small, "--replica-slots": 0, "--profile": tmp_path / "traces"})
    for run in ("static", "balanced"):
        found = [analyse(path) for path in traces_in(tmp_path / "traces" / run)]
        assert [(one.rank, one.steps) for one in found] == [(0, 4), (1, 4)]
        assert {("clip", "", None), ("compute", "F", 1)} <= {(p.phase, p.direction, p.layer) for p in found[0].phases}
    assert set(summary) == {
        "world_size",
        "steps",
        "migrations",
        "experts_moved",
        "bytes_moved",
        "imbalance_static",
        "imbalance_balanced",
        "loss_static",
        "loss_balanced",
        "bit_identical",
    }
    assert (summary["world_size"], summary["steps"]) == (2, STEPS)
    assert summary["bit_identical"] is True
    assert summary["loss_static"] == summary["loss_balanced"]
    assert len(summary["loss_static"]) == STEPS and all(map(math.isfinite, summary["loss_static"]))
    assert summary["loss_static"][-1] < summary["loss_static"][0]
    assert summary["migrations"] >= 1
    assert summary["experts_moved"] >= summary["migrations"]
    # An expert is 3 x 64 x 64 float32 weights, and twice that of Adam's state.
    assert summary["bytes_moved"] == summary["experts_moved"] * 3 * 3 * 64 * 64 * 4
    assert 1 <= summary["imbalance_balanced"] < summary["imbalance_static"]
