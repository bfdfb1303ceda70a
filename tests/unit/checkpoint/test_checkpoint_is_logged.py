"""Saving and loading say where, in a line of the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

from eplb_runtime.checkpoint import load, save


def test_saving_and_loading_say_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "eplb_runtime")
    model = nn.Linear(2, 2)
    save(tmp_path / "first", model)
    assert caplog.messages[-1] == f"checkpoint saved to {tmp_path / 'first'}"
    load(tmp_path / "first", model)
    assert caplog.messages[-1] == f"checkpoint loaded from {tmp_path / 'first'}"
