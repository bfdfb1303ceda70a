"""Fixtures that every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

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
