"""`eplb-runtime verify` on loops that users could write: those of `support.misuse` that are wrong in one thing, and
those that are right."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import misuse
import pytest
import served

from eplb_runtime.tools.verification import verify_command

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

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


@pytest.mark.parametrize("case", misuse.CASES)
def test_no_wrong_loop_is_called_right_in_silence_and_no_right_one_wrong(case: str, jobs: Path) -> None:
    command = [sys.executable, "-S", served.__file__, str(jobs), misuse.__file__, case]
    report = verify_command(command, steps=8).to_dict()
    is_silent = report["verdict"] == "right" and not report["said"]
    assert is_silent == (misuse.CASES[case] in misuse.RIGHT), report
    assert EXPECTED.get(case, bool)(report), report
