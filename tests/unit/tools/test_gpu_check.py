"""`launch/gpu_check.py` without a GPU: its dry run, and that a cut call leaves what it found and is gone on with."""

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.training import config_from_settings

from eplb_runtime.config import BalancerConfig, Trial, take_trial
from eplb_runtime.hosts.attaching.trial import without_replicas
from eplb_runtime.tools import doctor, verification

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "launch" / "gpu_check.py"


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def stage(check: ModuleType, name: str, code: str, seconds: float = 60.0):  # type: ignore[no-untyped-def]
    return check.Stage(1, name, seconds, ("-c", code))


def test_a_dry_run_runs_what_a_cpu_can_and_lists_the_rest(check: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--dry-run", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    on_cpu = {one.name: "passed" for one in check.STAGES if one.on_cpu}
    assert check.how_they_ended(tmp_path / "dry_run.md") == on_cpu
    assert not (tmp_path / "result.md").exists(), "a call would take these stages for done"
    listed = [line for line in ran.stdout.splitlines() if line.startswith("needs a GPU: ")]
    assert len(listed) == len(check.STAGES) - len(on_cpu) > 0


def test_what_failed_or_was_cut_is_in_the_status_of_every_call_and_runs_when_asked_again(
    check: ModuleType, tmp_path: Path
) -> None:
    result, mended = tmp_path / "result.md", tmp_path / "mended"
    stages = [
        stage(check, "fails", f"import os; print('the reason'); raise SystemExit(not os.path.exists({str(mended)!r}))"),
        stage(check, "hangs", "import time; print('so far', flush=True); time.sleep(600)", seconds=8.0),
        stage(check, "passes", "print('all well')"),
    ]
    expected = {"fails": "failed", "hangs": "cut", "passes": "passed"}
    assert check.run_call(stages, result, 60) == expected == check.run_call(stages, result, 60)
    assert all(result.read_text().count(line) == 1 for line in ("the reason", "so far", "all well"))
    mended.touch()
    assert check.run_call(stages, result, 60, True) == expected | {"fails": "passed"}


def test_a_stage_that_the_end_of_a_call_cuts_runs_again_in_the_next(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "LEAST_SECONDS", 1.0)
    result, begun = tmp_path / "result.md", tmp_path / "begun"
    code = (
        f"import os, time; seen = os.path.exists({str(begun)!r}); "
        f"open({str(begun)!r}, 'w'); time.sleep(0 if seen else 600)"
    )
    stages = [stage(check, "long", code), stage(check, "late", "pass")]
    assert check.run_call(stages, result, 12.0) == {"long": "unfinished", "late": "not run"}
    assert set(check.run_call(stages, result, 60).values()) == {"passed"}


def test_each_call_fits_its_limit_and_names_files_that_are_there(check: ModuleType) -> None:
    assert len({one.name for one in check.STAGES}) == len(check.STAGES) and sum(check.CALL_SECONDS) <= 30 * 60 - 100
    for call, most in enumerate(check.CALL_SECONDS):
        assert sum(one.seconds for one in check.STAGES if one.call == call) <= most <= (570 if call else 300)
    for one in check.STAGES:
        files = [ROOT / part for part in one.command if part.startswith("tests/")]
        text = "".join(path.read_text() for path in [*files, ROOT / "tests/support/transport_contract.py"])
        words = re.findall(r"\w+", one.command[-1]) if "-k" in one.command else []
        assert [word for word in words if word not in text and word not in ("and", "or", "not")] == [], "no test has it"


# -- What the doctor says of a machine: compiled code, what carries experts


def test_the_cache_of_compiled_code_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(doctor, "is_compiled", lambda: False)
    assert "not compiled" in doctor.compiled().why and doctor.compiled().usable
    monkeypatch.setattr(doctor, "is_compiled", lambda: True)
    assert doctor.compiled().why == f"compiled, in {tmp_path}"
    monkeypatch.setattr(doctor, "compiles", lambda: False)
    assert not doctor.compiled().usable


# -- Settings of the runs that a verification compares, and jobs that end before they should


@pytest.mark.parametrize(
    "of_replicas", [{}, {"replica_transport": "copy_engine"}, {"initial_placement": "placement.json"}], ids=str
)
def test_runs_without_replicas_leave_out_what_is_of_use_to_replicas_alone(of_replicas: dict) -> None:
    config = config_from_settings({"interval": 7, "replica_slots": 1, **of_replicas})
    assert without_replicas(config) == BalancerConfig(interval=7)


@pytest.mark.parametrize("failure", ["", "exit status 1: no data"])
def test_a_job_that_ends_sooner_is_run_as_far_and_one_that_fails_is_not_run_again(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Trial] = []

    def run(command: object, trial: Trial, title: str) -> verification.Run:
        asked.append(trial)
        for step in range(3):
            (Path(trial.folder) / f"step-{step:05d}.jsonl").write_text("[[0]]")
        meta = {"commits": 0, "unregistered": []}
        (Path(trial.folder) / "meta.json").write_text(json.dumps(meta))
        return replace(verification.Run.of(Path(trial.folder)), failure=failure)

    monkeypatch.setattr(verification, "_run", run)
    report = verification.verify_command(["train"], steps=12)
    assert [trial.steps for trial in asked] == ([12] if failure else [12, 2])
    assert report.verdict == "unknown" and (failure or "no expert moved in 2 steps") in report.reason


def test_a_job_is_ended_whether_it_listens_or_not(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' TERM; setsid sh -c 'echo; kill -STOP $$' & wait; wait"]
    environment = {**os.environ, verification._STARTED: str(tmp_path)}
    job = subprocess.Popen(command, start_new_session=True, env=environment, stdout=subprocess.PIPE)
    assert job.stdout is not None and job.stdout.readline() and len(verification.started(tmp_path)) == 2
    verification.end(tmp_path)
    assert job.wait() == -signal.SIGKILL and not verification.started(tmp_path)


def test_a_job_that_is_interrupted_while_it_starts_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, start = [], subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> None:
        jobs.append(start(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verification._run(["sleep", "600"], Trial("fixed", 3, str(tmp_path)), "fixed")
    assert jobs[0].wait(60) == -signal.SIGKILL


def test_a_verify_that_fails_leaves_no_trial_for_the_next_attach() -> None:
    with pytest.raises(ZeroDivisionError):
        verification.verify(lambda: 1 / 0, torch.optim.SGD, lambda step: step)  # type: ignore[arg-type,return-value]
    assert take_trial() is None


def test_a_report_is_valid_json_whatever_its_numbers_are() -> None:
    report = verification.Report("wrong", single={"worst": float("inf")}).to_dict()
    assert report["single"]["worst"] is None
    assert json.loads(json.dumps(report, allow_nan=False)) == report
