"""The training job of ``launch/`` writes what it promises."""

from __future__ import annotations

import json
import math
import re
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
    assert ": expert work" in done.stdout
    quoted = re.findall(r"^\| ([^|]{4,}) \| [\d.]+ \|", (ROOT / "launch/README.md").read_text(), re.MULTILINE)
    assert len(quoted) == 5 and all(row.split(",")[0] in done.stdout for row in quoted)
    return dict(json.loads((out / "summary.json").read_text()))


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
    assert (summary["world_size"], summary["steps"], summary["bit_identical"]) == (2, STEPS, True)
    losses = summary["loss_static"]
    assert losses == summary["loss_balanced"] and len(losses) == STEPS and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert summary["experts_moved"] >= summary["migrations"] >= 1
    # An expert is 3 x 64 x 64 float32 weights, and twice that of Adam's state.
    assert summary["bytes_moved"] == summary["experts_moved"] * 3 * 3 * 64 * 64 * 4
    assert 1 <= summary["imbalance_balanced"] < summary["imbalance_static"]
