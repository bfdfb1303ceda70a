"""From a job as it is to the verdict: an example's model is recorded on two ranks, and the command assesses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from examples import load_example
from ranks import run_ranks
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.cli import main
from eplb_runtime.load.series import RecordedJob, read_series

STEPS = 12


def train(rank: int, run: str) -> None:
    """Without a balancer, in data parallelism."""
    ours = load_example("any_module")
    torch.manual_seed(0)
    model = ours.Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with eplb.record(model, run, optimizer, layers=ours.LAYERS_TO_BALANCE, interval=4):
        for step in range(STEPS):
            ids = ours.batch(rank, step)
            functional.cross_entropy(model(ids[:-1]), ids[1:]).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad.div_(2))
            optimizer.step()
            optimizer.zero_grad()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, train, str(folder))
    return folder


def test_a_record_holds_what_the_verdict_rests_on(run: Path) -> None:
    job = read_series(run)[2]
    expert = 64 * 256 + 256 + 256 * 64 + 64
    assert 0 < job.expert_seconds < job.step_seconds
    assert job == RecordedJob(
        ranks=2,
        ranks_per_node=2,
        ep_size=1,
        interval=4,
        hidden_size=64,
        top_k=2,
        expert_parameters=expert,
        expert_bytes=4 * expert,
        optimizer_bytes=8 * expert,
        dtype="float32",
        device="cpu",
        step_seconds=job.step_seconds,
        expert_seconds=job.expert_seconds,
    )


def test_a_recorded_example_is_assessed_without_any_option(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["assess", str(run), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["pays"] in (True, False) and shown["imbalance"]["now"] >= 1 and shown["advice"]
    assert main(["assess", str(run)]) == 0
    said = capsys.readouterr().out
    said = " ".join(said.split())
    assert said.startswith("The recorded job has no expert parallelism; compared is the same job")
    assert "2 ranks: the busiest rank has " in said and " % of a step in expert work (" in said and "measured" in said
