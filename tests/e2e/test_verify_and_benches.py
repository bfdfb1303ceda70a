"""The commands that need ranks, as a user starts them: exit statuses, documented keys, one-line refusals."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import forked, misuse, served
from support.ranks import run_ranks

from eplb_runtime.cli import main
from eplb_runtime.tools.bench import train as bench_train
from eplb_runtime.tools.bench.train import Workload
from eplb_runtime.tools.verification import verify_command

ROOT = Path(__file__).resolve().parents[2]
SKEWED = ("skewed", "skewed, balanced")
OURS = [sys.executable, "-m", "eplb_runtime.cli"]
VERIFY = [*OURS, "verify", "--", "sh", "-c", "echo $$; exec sleep 600"]
SLEEPS = ["-n1", "-r1", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
BENCH = [sys.executable, "-c", f"from eplb_runtime.tools.launch import *; start_ranks({SLEEPS}, 1, 'timeit')"]


def shell(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*OURS, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("launcher", [(forked.__file__,), pytest.param(TORCHRUN, marks=pytest.mark.long)])
def test_verify_runs_a_job_and_names_what_is_wrong_with_it(launcher: tuple[str, ...], tmp_path: Path) -> None:
    script, step = (ROOT / "launch/examples/any_module.py").read_text(), "        optimizer.step()\n"
    clipped = script.replace(step, f"        nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n{step}")
    assert clipped != script
    (tmp_path / "train.py").write_text(clipped)
    done = shell("verify", "--steps", "3", "--json", "--", sys.executable, *launcher, tmp_path / "train.py")
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"], report["repeats"]) == (1, "wrong", True)
    assert report["moved"]["equal"] is False and "clip_grad_norm_" in report["reason"]
    assert "step 3 of 3" in done.stderr


def test_a_job_that_fails_or_does_not_attach_is_unknown(capfd: pytest.CaptureFixture[str]) -> None:
    failing = main(["verify", "--json", "--", sys.executable, "-S", "-c", "raise SystemExit('no data')"])
    out, err = capfd.readouterr()
    assert (failing, json.loads(out)["verdict"]) == (3, "unknown") and "exit status 1" in out and "no data" in err
    other = main(["verify", "--", sys.executable, "-S", "-c", "print('hello')"])
    printed = capfd.readouterr()
    assert other == 3 and "reached no eplb_runtime.attach" in printed.out and "hello" in printed.err


@pytest.mark.parametrize("command", [VERIFY, BENCH])
def test_what_is_ended_ends_what_it_has_started_and_removes_its_folder(command: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    ours = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    job = next(int(line) for line in ours.stdout or () if line.strip().isdigit())
    ended = os.pidfd_open(job)
    ours.terminate()
    assert ours.wait(120) in (128 + signal.SIGINT, -signal.SIGINT) and not list(tmp_path.glob("eplb_verify_*"))
    assert select.select([ended], [], [], 60)[0]


def test_a_bench_that_needs_ranks_starts_them() -> None:
    done = shell("bench", "dispatch", "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["ranks"], len(result["dispatch"])) == (2, 4)
    keys = {"tokens", "replicas", "rows", "bytes", "ms", "all_to_all_ms", "ratio"}
    assert set(result["dispatch"][0]) == keys and all(row["rows"] < row["tokens"] for row in result["dispatch"])


def measure(rank: int) -> tuple[dict, dict]:
    from benchmarks.dispatch import run as dispatchers

    from eplb_runtime.tools.bench.migrate import run

    cpu = torch.device("cpu")
    return run(cpu, 2, "torch", ((32, 64),)), dispatchers(cpu, 1, hidden=64, ranks_per_node=1)


def test_bench_migrate_and_the_table_of_dispatchers_have_the_documented_keys() -> None:
    moved, result = json.loads(json.dumps(run_ranks(2, measure)[0]))
    row = moved["migrate"][0]
    assert moved["transport"] == "torch" and set(row) == {"expert_mib", "gb_per_second", "plain_gb_per_second", "ratio"}
    assert row["expert_mib"] == 3 * 3 * 32 * 64 * 4 / 2**20
    assert (result["experts"], result["ranks_per_node"]) == (64, 1)
    ways = [("all_to_all", "logical"), ("hierarchical", "logical"), ("hierarchical", "by_rank")]
    assert [(row["dispatch"], row["order"]) for row in result["ways"]] == ways * 7
    skewed, balanced = [[r["imbalance"] for r in result["ways"] if r["load"] == load] for load in SKEWED]
    assert all(after < 1.01 < before for before, after in zip(skewed, balanced, strict=True))
    assert all(row["why"] for row in result["left_out"])


def measure_training(rank: int) -> dict:
    work = Workload(layers=2, hidden=32, width=32, tokens=64, interval=4, settle_blocks=3, blocks=2)
    return bench_train.run(torch.device("cpu"), work=work)


def test_bench_train_moves_experts_where_load_is_skewed_and_has_the_documented_keys() -> None:
    result = json.loads(json.dumps(run_ranks(2, measure_training)[0]))
    assert list(result) == ["ranks", "timed", "train", "overhead"] and result["overhead"] > -1
    assert result["timed"] == "medians of 2 blocks of 4 steps: 8 calls of each variant, in turns"
    static, homes, *_ = result["train"]
    quoted = re.findall(r"^\| .*\(`(\w+)`\) \| \d+ ms \| [\d.]+ \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [row["variant"] for row in result["train"]] == [*quoted, "attached"] and len(quoted) == 4
    keys = {"variant", "step_ms", "slowest_over_fastest", "imbalance", "homes_moved", "over_static"}
    for row in result["train"]:
        assert set(row) == keys
    assert static["homes_moved"] == 0 and static["over_static"] == 1 == result["train"][3]["imbalance"]
    assert homes["homes_moved"] > 0 and homes["imbalance"] < static["imbalance"] > 1.2


# -- `eplb-runtime verify` on loops that users could write: those of `support.misuse` that are wrong in one thing,
# and those that are right


EXPECTED: dict[str, Callable[[dict[str, Any]], bool]] = {
    "ema_in_generator": lambda report: "ema_in_generator" in report["unregistered"][0]["holder"],
    "compute_by_index": lambda report: report["moved"]["equal"] is False,
    "compute": lambda report: report["moved"]["equal"] and report["single"]["equal"],
    "clip_what_attach_has_replaced": lambda report: "before attach are in use still" in report["reason"],
    "summed_by_the_loop": lambda report: "times as large as the experts" in report["reason"],
}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket behind which jobs run."""
    path = tmp_path_factory.mktemp("jobs") / "socket"
    with subprocess.Popen([sys.executable, served.__file__, path], stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None and server.stdout.readline() == b"listens\n"
            yield path
        finally:
            server.kill()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", misuse.CASES)
def test_no_wrong_loop_is_called_right_in_silence_and_no_right_one_wrong(case: str, jobs: Path) -> None:
    command = [sys.executable, "-S", served.__file__, str(jobs), misuse.__file__, case]
    report = verify_command(command, steps=8).to_dict()
    is_silent = report["verdict"] == "right" and not report["said"]
    assert is_silent == (misuse.CASES[case] in misuse.RIGHT), report
    assert EXPECTED.get(case, bool)(report), report
