"""All tests of this folder need a GPU: without one they are not collected."""

from __future__ import annotations

import torch
from device import DEVICE

collect_ignore_glob = [] if DEVICE.type != "cuda" or torch.cuda.is_available() else ["test_*.py"]
