"""Settings of the runs that a verification compares, and jobs that end before they should."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flat_settings import config_from_settings

from eplb_runtime.config import BalancerConfig, Trial
from eplb_runtime.hosts.attaching.trial import without_replicas
from eplb_runtime.hosts.attaching.trial_hooks import descendants
from eplb_runtime.tools.verification import Report, runs
from eplb_runtime.tools.verification.records import Closeness


@pytest.mark.parametrize(
    "of_replicas", [{}, {"copies_by": "copy_engine"}, {"initial_placement": "placement.json"}], ids=str
)
def test_runs_without_replicas_leave_out_what_is_of_use_to_replicas_alone(of_replicas: dict) -> None:
    config = config_from_settings({"interval": 7, "replica_slots": 1, **of_replicas})
    assert without_replicas(config) == BalancerConfig(interval=7)


@pytest.mark.parametrize("failure", ["", "exit status 1: no data"])
def test_a_job_that_ends_sooner_is_run_as_far_and_one_that_fails_is_not_run_again(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Trial] = []

    def run(command: object, trial: Trial, title: str) -> runs.Run:
        asked.append(trial)
        for step in range(3):
            with open(Path(trial.folder) / f"step-{step:05d}.npz", "wb") as file:
                np.savez(file, counts=np.zeros((1, 1)))
        meta = {"commits": 0, "unregistered": []}
        (Path(trial.folder) / "meta.json").write_text(json.dumps(meta))
        return replace(runs.Run.of(Path(trial.folder)), failure=failure)

    monkeypatch.setattr(runs, "_run", run)
    report = runs.verify_command(["train"], steps=12)
    assert [trial.steps for trial in asked] == ([12] if failure else [12, 2])
    assert report.verdict == "unknown" and (failure or "no expert moved in 2 steps") in report.reason


def test_a_job_is_ended_whether_it_listens_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_END_SECONDS", 0.1)
    others = set(descendants())
    job = subprocess.Popen(["sh", "-c", "trap '' TERM; setsid sleep 600 & wait; wait"], start_new_session=True)
    runs.end(job, others)
    assert job.returncode is not None and not set(descendants()) - others


def test_a_report_is_valid_json_whatever_its_numbers_are() -> None:
    report = Report("wrong", single=Closeness(False, float("inf"), "a", 1, 1)).to_dict()
    assert report["single"]["worst"] is None
    assert json.loads(json.dumps(report, allow_nan=False)) == report
