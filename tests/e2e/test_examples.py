"""The examples run as the README says."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.examples import FOLDER, load_example
from support.ranks import run_ranks
from support.scripts import run_script
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.cli import main
from eplb_runtime.config import Trial, set_trial
from eplb_runtime.load.series import read_series
from eplb_runtime.tools import verification

TRAINER = ["trainer.py", "--steps", "8", "--output", "{folder}"]
LOOP = ["transformers_loop.py"]
PIPELINE = ["pipeline.py", "--steps", "8"]
NO_MEGATRON = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
MEGATRON = pytest.param(["megatron_gpt.py", "--steps", "4"], marks=NO_MEGATRON)
NO_TITAN = pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
TITAN = ["torchtitan_moe.py", "--steps", "4", "--output", "{folder}"]
LONG = [pytest.param(TRAINER, marks=pytest.mark.long), pytest.param(LOOP, marks=pytest.mark.long)]


@pytest.mark.parametrize(
    "command",
    [
        ["any_module.py", "--steps", "8"],
        ["rollouts.py", "--rounds", "2"],
        TRAINER,
        LOOP,
        MEGATRON,
        pytest.param(TITAN, marks=[NO_TITAN, pytest.mark.long]),
    ],
    ids=str,
)
def test_an_example_runs_by_itself(command: list[str], tmp_path: Path) -> None:
    name, *options = [part.format(folder=tmp_path) for part in command]
    server = "test_megatron" if name == "megatron_gpt.py" else ""
    done = run_script(FOLDER / name, *options, ranks=2, server=server)
    assert done.returncode == 0, done.stderr
    assert command is not LOOP or "Warning" not in done.stderr, done.stderr
    assert "rank 0: loss" in done.stdout and "rank 1: loss" in done.stdout


@pytest.mark.parametrize("command", [PIPELINE, MEGATRON, *LONG], ids=str)
def test_an_example_is_right(command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `verify`, whose runs are forked here from one process that has imported everything."""
    name, *options = [part.format(folder=tmp_path) for part in command]
    server = "test_megatron" if name == "megatron_gpt.py" else ""

    def run(words: list[str], trial: Trial, title: str) -> verification.Run:
        environment: dict[str, str] = {}
        set_trial(trial, environment)
        ranks = 4 if command is PIPELINE else 2
        done = run_script(FOLDER / name, *options, ranks=ranks, server=server, **environment)
        return replace(verification.Run.of(Path(trial.folder)), failure=done.stderr if done.returncode else "")

    monkeypatch.setattr(verification, "_run", run)
    report = verification.verify_command([name], steps=3)
    assert report.passed and report.moved["equal"] and report.steps == 3, str(report)
    assert report.single["equal"] or "the framework spreads the experts" in report.single["reason"]


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_train_runs_the_example(tmp_path: Path) -> None:
    said = []
    for options in ([], ["--static"]):
        command = [str(FOLDER / "ray_train.py"), "--steps", "40", "--output", str(tmp_path), *options]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        lines = set(re.findall(r"rank (\d): loss (\S+) after 40 steps, (\d+) experts moved", output))
        said.append({int(rank): (loss, int(moved)) for rank, loss, moved in lines})
    balanced, static = said
    assert balanced.keys() == static.keys() == {0, 1}
    for rank, (loss, moved) in balanced.items():
        assert moved > 0 == static[rank][1]
        assert loss == static[rank][0], "not bit-identical"


# -- From a job as it is to the verdict: an example's model is recorded on two ranks, and the command assesses it


def record_steps(rank: int, run: str) -> None:
    """Without a balancer, in data parallelism."""
    ours = load_example("any_module")
    torch.manual_seed(0)
    model = ours.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with eplb.record(model, run, optimizer, layers=ours.LAYERS_TO_BALANCE, interval=4):
        for step in range(12):
            ids = ours.batch(rank, step)
            functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.div_(2))
            optimizer.step()
            optimizer.zero_grad()


def test_a_recorded_example_is_assessed_without_any_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, record_steps, str(tmp_path))
    job, expert = read_series(tmp_path)[2], 64 * 256 + 256 + 256 * 64 + 64
    assert 0 < job.expert_seconds < job.step_seconds and (job.dtype, job.device) == ("float32", "cpu")
    assert (job.ranks, job.ranks_per_node, job.ep_size, job.interval) == (2, 2, 1, 4)
    assert (job.hidden_size, job.top_k, job.expert_parameters) == (64, 2, expert)
    assert (job.expert_bytes, job.optimizer_bytes) == (4 * expert, 8 * expert)
    assert main(["assess", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pays"] in (True, False) and shown["imbalance"]["now"] >= 1 and shown["advice"]
    assert main(["assess", str(tmp_path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("The recorded job has no expert parallelism; compared is the same job")
    assert "2 ranks: the busiest rank has " in said and " % of a step in expert work (" in said and "measured" in said
