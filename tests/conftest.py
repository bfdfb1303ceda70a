"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "support"))

LONGEST_FIRST = (
    "test_verify_misuse",
    "test_verify",
    "test_checkpoint",
    "test_verify_and_benches",
    "test_examples",
    "test_megatron_rows",
    "test_fully_shard",
    "test_changed_after_attach",
    "test_rollout_phases",
    "test_pipelining",
    "test_export",
    "test_loops",
    "test_checkpoint_folder",
    "test_votes_in_doubt",
    "test_any_module",
    "test_megatron_newer",
    "test_migration_beside_training",
    "test_faults",
    "test_planner_process",
    "test_bits",
    "test_demo",
    "test_setting_up",
    "test_kernels",
    "test_static_policies",
)
"""Files whose tests take longest: they begin first, so that no worker waits at the end for another's long file."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was skipped: a line for each reason."""
    if not torch.cuda.is_available():
        terminalreporter.write_line("left out: tests/gpu, without a CUDA device")
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in reports)
    for reason, number in reasons.most_common():
        terminalreporter.write_line(f"skipped {number}: {reason}")
