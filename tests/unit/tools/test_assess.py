"""The verdict on a recorded load: yes, no, or what to record longer."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.observed import EXPERTS, INTERVAL, LAYERS, RANKS, STEP_SECONDS

from eplb_runtime.cli import main
from eplb_runtime.events import LoadMeasured
from eplb_runtime.load.series import RecordedJob
from eplb_runtime.observe.recording import Recorder
from eplb_runtime.observe.run_state import JobRecord
from eplb_runtime.tools import assess as room
from eplb_runtime.tools.assess import Assessment, assess
from eplb_runtime.tools.formats.loads import read_record

RANKED = {"ranks": 4, "ranks_per_node": 2, "ep_size": 4, "interval": 4, "hidden_size": 64, "top_k": 2}
EXPERT = {"expert_parameters": 3 * 64 * 32, "expert_bytes": 2 * 3 * 64 * 32, "optimizer_bytes": 10 * 3 * 64 * 32}
JOB = RecordedJob(**RANKED, **EXPERT, dtype="bfloat16", device="cuda", step_seconds=0.5)
GIVEN = {"moe_share": 0.4}
HOMES = GIVEN | {"replica_slots": 0}
SHARE = "migration=MigrationConfig(moe_share=0.4)"


def even(windows: int = 24) -> np.ndarray:
    return np.full((windows, 2, 8), 100.0)


def skewed(windows: int = 24) -> np.ndarray:
    """The two experts of rank 0 get 4 times as many tokens as the others, always: 16 / 7 of the mean."""
    load = even(windows)
    load[:, :, :2] = 400
    return load


def series(load: np.ndarray, steps: int, job: RecordedJob) -> JobRecord:
    return JobRecord(load, [steps] * len(load), job)


@pytest.fixture(autouse=True)
def no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STALL_SECONDS", 0.0)


def judged(load: np.ndarray, job: RecordedJob = JOB, given: dict[str, Any] = GIVEN) -> Assessment:
    return assess(series(load, 1, job), given)


def test_a_skewed_load_pays_and_the_next_step_is_named() -> None:
    found = judged(skewed(), given=HOMES)
    assert found.pays is True
    now, homes = (found.ways[name].imbalance for name in ("now", "homes"))
    assert now == pytest.approx(16 / 7) and homes == pytest.approx(10 / 7)
    assert found.fields()["step_saved"]["share"] == pytest.approx(0.4 * (1 - 10 / 16), abs=1e-3)
    assert found.advice == f"Next: BalancerConfig(interval=4, {SHARE})", "the job's gate counts with it, too"
    assert found.paragraph().startswith("4 ranks: the busiest rank has 2.29x the mean load; with homes moved 1.43x (")
    assert " If 40 % of a step is expert work, a step takes 15 % less; " in found.paragraph()
    assert found.paragraph().endswith(f" It pays. Next: BalancerConfig(interval=4, {SHARE})")


def test_one_hot_expert_asks_for_a_replica_slot() -> None:
    load = even()
    load[:, :, 0] = 2000
    found = judged(load)
    assert found.best is found.ways["replicas"] and found.best is not None and found.best.imbalance < 1.5
    assert found.advice == f"Next: BalancerConfig(interval=4, replica_slots=1, {SHARE})"
    without = judged(load, given=HOMES)
    assert "replicas" not in without.ways and without.fields()["imbalance"]["replicas"] is None
    assert "replica slot" not in without.paragraph() and "--replica-slots 1" in without.advice


def test_the_refresh_of_replicas_is_no_gift() -> None:
    """The same load, over links so slow that fresh weights take longer than the step saves."""
    load = even()
    load[:, :, 0] = 2000
    slow = GIVEN | {"intra_node_bandwidth": 1e-3, "inter_node_bandwidth": 1e-4}
    found = judged(load, given=slow)
    assert found.ways["replicas"].saved(0.4) < 0 and found.best is found.ways["homes"]


def test_a_balanced_load_does_not_pay() -> None:
    found = judged(even())
    assert found.pays is False and "It does not pay: the load is balanced" in found.paragraph()
    assert set(found.fields()["step_saved"].values()) == {0.0} and found.best is not None and found.best.rebalances == 0


def test_moves_that_cost_more_than_they_save_do_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "STALL_SECONDS", 1000.0)
    found = judged(skewed())
    assert found.pays is False and found.verdict == "It does not pay: no move would have saved what it costs."
    assert found.advice == "Try a longer interval: --every 8."
    short = judged(skewed(12))
    assert short.advice == "Record 48 steps or more, and try a longer interval: --every 16."


def test_a_data_parallel_job_is_compared_where_its_step_is_known() -> None:
    """Skewed by 16 / 7, and 10 / 7 with homes moved; half of a rank's tokens travel inside a node, or between two."""
    job = replace(JOB, ep_size=1, expert_seconds=0.2, hidden_size=1 << 20)
    given = HOMES | {"moe_share": None, "intra_node_bandwidth": 1.0, "inter_node_bandwidth": 1.0}
    found = judged(skewed(), job, given)
    travel = 2 * 350 * 10 / 7 * 2 / 4 * 4 * 2 * job.hidden_size / 1e9
    assert found.data_parallel is not None and found.pays
    spread = found.data_parallel["spread_step_seconds"]
    assert spread == pytest.approx(0.3 + 0.2 * 10 / 7 + travel, rel=1e-3)
    said = f"a step takes {spread:.3g} s, data parallelism as recorded 0.5 s, so spread only"
    assert f"Spread, with tokens that travel, {said}" in found.paragraph()
    freed = 2 * 6 * (JOB.expert_bytes + JOB.optimizer_bytes)
    assert found.fields()["data_parallel"]["freed_bytes"] == freed
    for unknown in (judged(skewed(), JOB, given), judged(skewed(), replace(job, expert_seconds=0.0), given)):
        assert unknown.fields()["data_parallel"] is None


def test_a_share_that_was_recorded_is_taken_and_called_measured() -> None:
    """0.2 s of steps of 0.5 s; of a job that was balanced meanwhile, more with experts in logical order."""
    job = replace(JOB, expert_seconds=0.2)
    given = HOMES | {"moe_share": None}
    found, as_given = judged(skewed(), job, given), judged(skewed(), given=HOMES)
    assert found.fields()["step_saved"] == as_given.fields()["step_saved"] and found.figures.shares == (0.4, 0.4, 0.4)
    assert "With 40 % of a step in expert work (measured), a step takes" in found.paragraph()
    assert "If 40 % of a step is expert work" in as_given.paragraph()
    assert "moe_share" not in found.advice, "the job measures it itself"
    even = assess(series(skewed(), 1, replace(job, imbalance=1.0)), given)
    assert "in expert work (worked out from 40 % measured, with other imbalance)" in even.paragraph()
    grown = 0.4 * 16 / 7
    assert even.figures.shares[0] == pytest.approx(grown / (0.6 + grown))
    assert judged(skewed(), job, given | {"moe_share": 0.1}).figures.shares == (0.1, 0.1, 0.1), "what is given wins"


@pytest.mark.parametrize(
    ("load", "job", "given", "parts"),
    [
        (skewed(11), JOB, GIVEN, ("11 steps were recorded", "needs 12", "Record 12 steps or more, or give --every 3.")),
        (skewed(2), JOB, GIVEN, ("2 steps were recorded", "Record 12 steps or more.")),
        (skewed(), replace(JOB, ranks=1, ep_size=1), GIVEN, ("of one rank (EP 1)", "Give --ranks R")),
        (skewed(), JOB, GIVEN | {"ranks": 1}, ("There is one rank (EP 1)", "Give --ranks R")),
        (skewed(), JOB, GIVEN | {"ranks": 3}, ("over 3 ranks: EP sizes are 1, 2, 4, 8.", "or --exp")),
        (np.concatenate([skewed(11), 0 * even(20)]), JOB, GIVEN, ("11 steps were recorded",)),
        (skewed() * ([1] * 4 + [0] * 4), JOB, GIVEN, ("a half of 8 experts has", "all ranks' counts")),
        (skewed() * ([1] + [0] * 7), JOB, GIVEN, ("at most 1 of 8 experts of a layer", "all ranks' counts")),
    ],
)
def test_a_record_that_cannot_say_says_what_would_help(
    load: np.ndarray, job: RecordedJob, given: dict[str, Any], parts: tuple[str, ...]
) -> None:
    found = judged(load, job, given)
    assert found.pays is None and all(part in found.paragraph() for part in parts)
    assert "\n" not in found.paragraph()
    shown = found.fields()
    assert shown["pays"] is shown["move_seconds"] is shown["imbalance"]["now"] is shown["step_saved"]["share"] is None
    assert shown["advice"] == found.paragraph() != ""


def test_a_folder_says_what_was_recorded_of_its_job(tmp_path: Path) -> None:
    writer = Recorder(tmp_path, 2, 8, replace(JOB, step_seconds=0.0, optimizer_bytes=0))
    for seconds in (9.0, 0.5, 0.4):
        measured = RecordedJob(step_seconds=seconds, optimizer_bytes=JOB.optimizer_bytes)
        writer.write(skewed(8).astype(np.int64), 2, measured)
    writer.close()
    found = read_record(tmp_path)
    assert found.job == JOB and found.steps_per_window == 2
    assert read_record(tmp_path / "load.jsonl").job == JOB, "the file is no trace of Megatron's"


def test_windows_of_other_numbers_of_steps_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a job without an interval writes them."""
    writer = Recorder(tmp_path, 2, 8, JOB)
    load = skewed(40).astype(np.int64)
    writer.write(load[:30], 4)
    writer.write(load[30:], 7)
    writer.close()
    found = read_record(tmp_path)
    assert (len(found.alike().load), found.steps_per_window) == (30, 4)
    assert ": 10 of 40. " in assess(found, GIVEN).paragraph()
    assert main(["assess", str(tmp_path)]) == 0
    assert "than 4, as most have, were left out: 10 of 40." in " ".join(capsys.readouterr().out.split())


def test_a_balanced_run_says_its_links_and_the_imbalance_that_its_steps_were_measured_with(tmp_path: Path) -> None:
    """With experts in logical order its steps would take longer."""
    links = {"intra_node_bandwidth": 400.0, "inter_node_bandwidth": 50.0}
    of_job = replace(JOB, ranks=RANKS, interval=INTERVAL, step_seconds=0.0, **links)
    writer = Recorder(tmp_path, LAYERS, EXPERTS, of_job)
    load = np.full((30, LAYERS, EXPERTS), 100)
    load[:, :, : EXPERTS // RANKS] = 500
    writer.hear(LoadMeasured(30, 30, ((1.2,) * LAYERS,) * 30, STEP_SECONDS, load=load))
    writer.close()
    found = read_record(tmp_path)
    assert found.job.step_seconds == STEP_SECONDS and found.steps_per_window == 1
    assert (found.job.intra_node_bandwidth, found.job.imbalance) == (400.0, pytest.approx(1.2))
    assessed = assess(found, GIVEN)
    way = assessed.ways["replicas"]
    seconds = way.move_seconds / way.moving / assessed.figures.every
    assert seconds == pytest.approx(STEP_SECONDS / (0.6 + 0.4 * found.job.imbalance / 2.5), rel=1e-3)
