"""The training job of ``launch/`` writes what it promises, goes on after a kill, and ends without ``close()``."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.examples import FOLDER
from support.scripts import run_script

from eplb_runtime.observe.traces import analyse, traces_in

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
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
    of_each = {f"{kind}_{run}" for kind in ("imbalance", "loss") for run in ("static", "balanced")}
    once = {"world_size", "steps", "migrations", "experts_moved", "bytes_moved", "bit_identical"}
    assert set(summary) == of_each | once
    assert (summary["world_size"], summary["steps"], summary["bit_identical"]) == (2, STEPS, True)
    losses = summary["loss_static"]
    assert losses == summary["loss_balanced"] and len(losses) == STEPS and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert summary["experts_moved"] >= summary["migrations"] >= 1
    # An expert is 3 x 64 x 64 float32 weights, and twice that of Adam's state.
    assert summary["bytes_moved"] == summary["experts_moved"] * 3 * 3 * 64 * 64 * 4
    assert min(summary["imbalance_balanced"], summary["imbalance_static"]) >= 1


# -- The resume example: a rank is killed, all start once more, and the job ends as if nothing had happened


SCRIPT = ROOT / "launch/examples/resume.py"


def undisturbed_job(folder: Path, ranks: int) -> dict[str, Any]:
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
    whole = undisturbed_job(undisturbed, 2)
    assert whole["resumed_from"] == 0 and whole["migrations"] > 0
    resumed = train_killed(killed, "12", by_torchrun)
    assert resumed["resumed_from"] == 10
    assert resumed["losses"] == {step: whole["losses"][step] for step in map(str, range(11, 17))}, "not bit-identical"

    shutil.copytree(killed / "step-10", other / "step-10")
    on_four = undisturbed_job(other, 4)
    assert on_four["resumed_from"] == 10
    for step, loss in on_four["losses"].items():
        assert loss == pytest.approx(whole["losses"][step], rel=0, abs=1e-10)
    assert len({round(loss, 9) for loss in whole["losses"].values()}) == 16, "control: any other step is further away"


# -- A training script that ends without ``balancer.close()`` ends as it would without a balancer


LEAVING = """
import torch.distributed as dist
from any_module import LAYERS_TO_BALANCE, batch, make
from torch.nn import functional

import eplb_runtime as eplb

dist.init_process_group("gloo")
model, optimizer = make()
config = eplb.BalancerConfig(interval=3, gate="always", dense_gradients="allreduce")
balancer = eplb.attach(model, optimizer, layers=LAYERS_TO_BALANCE, config=config)
for step in range(6):  # the last of them begins a decision
    ids = batch(dist.get_rank(), step)
    functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_may_end_while_a_decision_is_under_way(tmp_path: Path) -> None:
    """Threads that come back from a wait into an interpreter that is gone end the process by a signal."""
    script = tmp_path / "script.py"
    script.write_text(LEAVING)
    path = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, forked.__file__, str(script)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0 and "terminate called" not in done.stderr, done.stderr[-2000:]
