"""Fixtures that every test may use."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from packaging.version import Version

SECONDS = Path(__file__).with_name("seconds.json")
"""Seconds that the tests of a file took, where these are some: measured with ``EPLB_TEST_SECONDS=write``."""

settings.register_profile("no clock", deadline=None)  # machines are busy; no test asserts how long something takes
settings.load_profile("no clock")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real measurements: ``EPLB_SHARED_DATA``, or ``../shared/data`` beside the project."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("EPLB_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}: set EPLB_SHARED_DATA to the folder of measured loads")
    return folder


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Our command with these words; the one line with which it refuses them, and exit status 2."""
    from eplb_runtime.cli import main

    def run(*words: str | Path) -> str:
        try:
            status = main([*map(str, words)])
        except SystemExit as stop:
            status = int(stop.code or 0)
        said = capsys.readouterr()
        assert status == 2 and said.out == "" and said.err.count("\n") == 1, said
        return said.err

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files begin first, so that no process waits at the end; what torch is too old for is skipped."""
    seconds = json.loads(SECONDS.read_text())
    items.sort(key=lambda item: -seconds.get(item.path.stem, 0))
    if Version(torch.__version__) < Version("2.13"):
        older = pytest.mark.skip(reason="pipelines, torchtitan and Triton's interpreter need torch 2.13")
        for item in items:
            if any(word in item.nodeid for word in ("pipelin", "torchtitan", "stages_are_saved", "test_kernels_give")):
                item.add_marker(older)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was skipped: a line for each reason."""
    if not torch.cuda.is_available():
        terminalreporter.write_line("left out: tests/gpu, without a CUDA device")
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")
    if os.environ.get("EPLB_TEST_SECONDS") == "write" and terminalreporter.config.getoption("numprocesses", None):
        took: Counter[str] = Counter()
        for report in chain.from_iterable(terminalreporter.stats.values()):
            if isinstance(report, pytest.TestReport):
                took[Path(report.fspath).stem] += report.duration
        longest = {name: round(seconds) for name, seconds in took.most_common() if seconds >= 2}
        SECONDS.write_text(json.dumps(longest, indent=0) + "\n")
