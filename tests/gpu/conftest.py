"""All tests of this folder need a GPU."""

from __future__ import annotations

import pytest
import torch
from device import DEVICE


@pytest.fixture(autouse=True)
def needs_the_device() -> None:
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
