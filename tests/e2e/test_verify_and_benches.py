"""The commands that need ranks, as a user starts them: exit statuses, documented keys, one-line refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from scripts import run_script

from eplb_runtime.cli import main
from eplb_runtime.observe.traces import analyse, compare, traces_in
from eplb_runtime.tools.bench import count
from eplb_runtime.tools.bench import train as bench_train
from eplb_runtime.tools.bench.train import Workload

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "eplb_runtime.cli"
SKEWED = ("skewed", "skewed, balanced")


def shell(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eplb_runtime.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def test_verify_under_torchrun_prints_one_report_and_ends_with_0() -> None:
    done = run_script(COMMAND, "verify", "--steps", "4", "--replica-slots", "1", "--json", ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert (report["verdict"], report["ranks"], report["moved"]["equal"]) == ("right", 2, True)
    assert report["moved"]["rounding"]["equal"] is True and report["single"]["equal"] is True


def test_verify_runs_a_job_and_names_what_is_wrong_with_it(tmp_path: Path) -> None:
    script = (ROOT / "launch/examples/transformers_loop.py").read_text()
    clipped = script.replace("balancer.clip_grad_norm_(1.0)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)")
    assert clipped != script
    (tmp_path / "train.py").write_text(clipped)
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = shell("verify", "--steps", "3", "--json", "--", *torchrun, tmp_path / "train.py")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["repeats"]) == (1, "wrong", True)
    assert report["moved"]["equal"] is False and "clip_grad_norm_" in report["reason"]
    assert "step 3 of 3" in done.stderr


def test_a_job_that_fails_or_does_not_attach_is_unknown() -> None:
    failing = shell("verify", "--json", "--", sys.executable, "-c", "raise SystemExit('no data')")
    assert (failing.returncode, json.loads(failing.stdout)["verdict"]) == (3, "unknown")
    assert "no data" in json.loads(failing.stdout)["reason"]
    other = shell("verify", "--", sys.executable, "-c", "print('hello')")
    assert other.returncode == 3 and "reached no eplb_runtime.attach" in other.stdout and "hello" in other.stderr


def test_verify_of_one_rank_reads_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eplb_runtime.hosts.transformers.models import small_config

    small_config("qwen3_moe", 8).save_pretrained(tmp_path)
    assert main(["verify", "--steps", "3", "--model-config", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("right: 3 steps, 1 ranks")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model-config", "/nowhere"], "no such file"),
        (["--replica-slots", "1"], "torchrun"),
        (["--family", "unheard-of"], "invalid choice"),
        (["--steps", "0"], "whole number above 0"),
    ],
)
def test_verify_refuses_bad_input_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["verify", *arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    printed = capsys.readouterr()
    assert status == 2 and printed.out == "" and printed.err.count("\n") == 1
    assert said in printed.err


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_every_family_named_can_be_verified(family: str) -> None:
    from eplb_runtime.tools.verification.job import run

    report = run(family=family, steps=3, batch=2, length=16)
    assert report.verdict == "right", str(report)


def test_bench_count_has_the_documented_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = partial(count.run, shapes=((64, 2, 8), (32, 2, 8)), hidden=8, width=8)
    monkeypatch.setattr(count, "run", few)
    assert main(["bench", "count", "--repeats", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result) == ["device", "count"]
    assert [row["tokens"] for row in result["count"]] == [64, 32]
    for row in result["count"]:
        assert set(row) == {
            "tokens",
            "top_k",
            "experts",
            "tokens_per_second",
            "bincount_tokens_per_second",
            "ratio",
            "masked_ratio",
            "share_of_step",
        }


def test_a_bench_that_needs_ranks_starts_them() -> None:
    done = shell("bench", "dispatch", "--repeats", "1", "--hidden", "64", "--ranks-per-node", "1", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["ranks"], len(result["dispatch"])) == (2, 4)
    assert set(result["dispatch"][0]) == {"pass", "tokens", "mib", "ms", "all_to_all_ms", "ratio"}
    assert (result["experts"], result["ranks_per_node"]) == (64, 1)
    ways = [("all_to_all", "logical"), ("hierarchical", "logical"), ("hierarchical", "by_rank")]
    assert [(row["dispatch"], row["order"]) for row in result["ways"]] == ways * 7
    assert [row["tokens"] for row in result["ways"]] == [256] * 18 + [128] * 3
    times = {f"{call}_{what}" for call in ("dispatch", "combine") for what in ("ms", "gbps")}
    assert set(result["ways"][0]) == {"dispatch", "order", "tokens", "routing", "load", "imbalance", *times}
    skewed, balanced = [[r["imbalance"] for r in result["ways"] if r["load"] == load] for load in SKEWED]
    assert all(after < 1.01 < before for before, after in zip(skewed, balanced, strict=True))
    left_out = {"deepep", "deepep, float8", "deepep, low latency"}
    assert {row["dispatch"] for row in result["left_out"]} == {*left_out, "all_to_all and hierarchical, kernels"}
    assert all(row["why"] for row in result["left_out"])


def migrate(rank: int) -> dict:
    from eplb_runtime.tools.bench.migrate import run

    return run(torch.device("cpu"), repeats=2, shapes=((32, 64),))


def test_bench_migrate_has_the_documented_keys() -> None:
    result = json.loads(json.dumps(run_ranks(2, migrate)[0]))
    row = result["migrate"][0]
    assert row["transport"] == "torch"
    assert set(row) == {
        "transport",
        "hidden",
        "width",
        "expert_mib",
        "experts",
        "gb_per_second",
        "transfer_gb_per_second",
        "plain_gb_per_second",
        "ratio",
        "transfer_ratio",
        "wire_ratio",
        "pause_ms_per_expert",
    }
    assert row["expert_mib"] == 3 * 3 * 32 * 64 * 4 / 2**20
    assert [row["place"] for row in result["state"]] == ["on the device", "in host memory"]


def test_bench_migrate_has_what_state_in_other_places_costs() -> None:
    rows = json.loads(json.dumps(run_ranks(4, migrate)[0]))["state"]
    assert [row["place"] for row in rows] == ["on the device", "in host memory", "divided over two"]
    figures = {"mib_per_expert", "ms_per_expert", "bytes_ratio", "ms_ratio"}
    assert all(set(row) == {"place", "transport", "experts", *figures} for row in rows)
    assert [row["experts"] for row in rows] == [16, 16, 8]
    weights, state = 2, 3 * 4
    assert rows[0]["bytes_ratio"] == 1.0 == rows[1]["bytes_ratio"]
    # Weights go to both ranks that hold an expert; its state goes once, in pieces with sums of their own.
    assert rows[2]["bytes_ratio"] == pytest.approx((2 * weights + state) / (weights + state), rel=0.05)


def train(rank: int, traces: Path) -> dict:
    work = Workload(layers=2, hidden=32, width=32, tokens=64, interval=4, settle_blocks=3, blocks=2)
    brief = bench_train.run_brief(torch.device("cpu"), work=work)
    return bench_train.run(torch.device("cpu"), work=work, profile=traces) | {"brief": brief}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    traces = tmp_path_factory.mktemp("traces")
    return json.loads(json.dumps(run_ranks(2, train, traces)[0])), traces


def test_traces_of_bench_train_name_the_phases_of_every_layer_and_compare(trained: tuple[dict, Path]) -> None:
    traces = trained[1]
    for variant in ("static", "homes", "replicas", "even", "attached"):
        for rank, path in enumerate(traces_in(traces / variant)):
            found = analyse(path)
            assert (found.rank, found.device, found.steps) == (rank, "cpu", 3), variant
            phases = {(phase.phase, phase.direction, phase.layer): phase for phase in found.phases}
            forward = {
                (name, "F", layer) for name in ("count", "route", "dispatch", "compute", "combine") for layer in (0, 1)
            }
            # The first layer's input needs no gradient, so its dispatch has none to carry back.
            backward = {("combine", "B", 0), ("combine", "B", 1), ("dispatch", "B", 1)}
            assert phases.keys() >= forward | backward | {("reduce gradients", "", None), ("step boundary", "", None)}
            assert all(phases[key].spans == 3 for key in forward | backward), variant
            assert phases["compute", "F", 1].compute_us > 0 and phases["combine", "F", 1].communication_us > 0
            # Decisions fall into the middle of a block, and are made on a thread of their own.
            assert (("decision: add up load", "", None) in phases) == (variant != "even")
    found = compare(*([analyse(path) for path in traces_in(traces / name)] for name in ("static", "homes")), "a", "b")
    assert found.per == "step" and {"dispatch(F)", "combine(B)"} <= {row.what for row in found.phases}


def test_bench_train_moves_experts_where_load_is_skewed_and_has_the_documented_keys(trained: tuple[dict, Path]) -> None:
    result = trained[0]
    assert list(result) == ["ranks", "train", "ideal_step_ms", "static_imbalance", "overhead", "assess", "brief"]
    static, *_, even = result["train"]
    assert [row["variant"] for row in result["train"]] == ["static", "homes", "replicas", "even"]
    for row in result["train"]:
        shares = {"over_static", "of_even_throughput", "share_of_even_gain", "share_of_ideal_gain"}
        assert set(row) == {"variant", "step_ms", "imbalance", "guard_ms", "homes_moved", "copies"} | shares
        assert row["guard_ms"] > 0
    assert (
        static["homes_moved"] == static["copies"] == 0
        and static["share_of_ideal_gain"] == static["share_of_even_gain"] == 0
        and static["over_static"] == 1 == even["of_even_throughput"]
        and 0 <= even["share_of_even_gain"] <= 1  # a block of it may be slower than one beside it on a busy machine
        and result["static_imbalance"] > 1.2
    )
    for row, measured in zip(result["assess"], result["train"][1:3], strict=True):
        assert (row["variant"], row["step_ms"]) == (measured["variant"], measured["step_ms"])
        assert 0 < row["expert_share"] <= 1 and 1 <= row["imbalance"] < result["static_imbalance"]
        assert row["difference"] == pytest.approx(row["predicted_step_ms"] / row["step_ms"] - 1)
    brief = result["brief"]
    assert list(brief) == ["ranks", "train", "speed_up"] and brief["speed_up"] > 0
    assert [row["variant"] for row in brief["train"]] == ["static", "homes"]
    fixed, moved = brief["train"]
    assert list(fixed) == ["variant", "step_ms", "slowest_over_fastest", "imbalance", "homes_moved"]
    assert fixed["homes_moved"] == 0 < moved["homes_moved"] and moved["imbalance"] < fixed["imbalance"]
    keys = {"static_step_ms", "attached_step_ms", "guard_ms", "overhead", "homes_moved"}
    assert set(result["overhead"][0]) == keys


def test_balanced_choices_are_balanced_and_never_the_same_expert_twice() -> None:
    work = Workload()
    ids = bench_train.choices(work, 1.0, torch.Generator().manual_seed(0))
    assert ids.flatten().bincount(minlength=work.experts).unique().numel() == 1
    skewed = bench_train.choices(work, work.skew, torch.Generator().manual_seed(0))
    for chosen in (ids, skewed):
        assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all()


def test_a_soak_breaks_rebalances_for_a_while_and_changes_no_bit() -> None:
    done = shell("bench", "soak", "--minutes", "0.05", "--bouts", "2", "--seed", "1", "--settings", "overlap", "--json")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["passed"], result["ranks"], result["kills"]) == (True, 3, result["lives"])
    assert sum(row["held"] for row in result["faults"]) == sum(row["drawn"] for row in result["faults"]) > 0


def test_a_soak_under_torchrun_kills_nobody() -> None:
    done = run_script(COMMAND, "bench", "soak", "--minutes", "0.05", "--settings", "plain", "--json", ranks=2)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["passed"], result["ranks"], result["kills"], result["lives"]) == (True, 2, 0, 1)


def test_a_soak_of_settings_that_do_not_exist_is_refused() -> None:
    assert main(["bench", "soak", "--settings", "overlapping"]) == 2
