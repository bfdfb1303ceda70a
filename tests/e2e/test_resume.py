"""The resume example: a rank is killed, all start once more, and the job ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts import run_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/examples/resume.py"
pytestmark = pytest.mark.slow


def train(folder: Path, ranks: int) -> dict[str, Any]:
    """What a job wrote that nothing happened to."""
    done = run_script(SCRIPT, "--folder", folder, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses.0.json").read_text())


def train_killed(folder: Path, at: str, by_torchrun: bool) -> dict[str, Any]:
    """What the second life of a job wrote."""
    if by_torchrun:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        job = ["--max-restarts", "1", str(SCRIPT), "--folder", str(folder), "--die-at", at]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*torchrun, *job], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    else:
        assert run_script(SCRIPT, "--folder", folder, "--die-at", at, ranks=2).returncode != 0
        done = run_script(SCRIPT, "--folder", folder, ranks=2, TORCHELASTIC_RESTART_COUNT="1")
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "losses.1.json").read_text())


@pytest.mark.parametrize("by_torchrun", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_job_that_was_killed_ends_as_one_that_was_not(by_torchrun: bool, tmp_path: Path) -> None:
    undisturbed, killed, other = (tmp_path / name for name in ("undisturbed", "killed", "other"))
    whole = train(undisturbed, 2)
    assert whole["resumed_from"] == 0 and whole["migrations"] > 0
    resumed = train_killed(killed, "12", by_torchrun)
    assert resumed["resumed_from"] == 10
    assert resumed["losses"] == {step: whole["losses"][step] for step in map(str, range(11, 17))}, "not bit-identical"

    shutil.copytree(killed / "step-10", other / "step-10")
    on_four = train(other, 4)
    assert on_four["resumed_from"] == 10
    for step, loss in on_four["losses"].items():
        assert loss == pytest.approx(whole["losses"][step], rel=0, abs=1e-10)
    assert len({round(loss, 9) for loss in whole["losses"].values()}) == 16, "control: any other step is further away"
