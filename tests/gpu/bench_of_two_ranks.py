"""A bench of ranks, by two of them that may share the GPU: ``python tests/gpu/bench_of_two_ranks.py MODULE``.

The command ``bench`` refuses ranks that share one, as their seconds are no figures; their ratios in one run are.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import torch  # noqa: E402
from device import NCCL, SHARED, device_of  # noqa: E402
from support.ranks import run_ranks  # noqa: E402

REPEATS = 5


def measured(rank: int, name: str) -> dict[str, Any]:
    device = device_of(rank)
    torch.cuda.set_device(device)
    return import_module(name).run(device, REPEATS)


if __name__ == "__main__":
    found = run_ranks(2, measured, sys.argv[1], backend=NCCL, start_method="spawn", **SHARED)[0]
    for key, value in found.items():
        for one in value if isinstance(value, list) else [value]:
            print(f"{key}: {json.dumps(one)}")
