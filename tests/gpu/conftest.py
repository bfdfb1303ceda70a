"""All tests of this folder need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device import DEVICE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skipped by a mark, so that no fixture that several tests share is made first."""
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
