"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real expert loads; tests that need it are skipped where it is missing."""
    beside = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("EPLB_SHARED_DATA", beside))
    if not folder.is_dir():
        pytest.skip(f"no expert load data at {folder}; set EPLB_SHARED_DATA to its folder")
    return folder
