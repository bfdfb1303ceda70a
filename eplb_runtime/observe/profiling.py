"""Traces of a training job by torch.profiler: one file a rank, of a few steps after the first ones."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

SKIP, WARM_UP = 2, 1
"""Steps that are let go before those that are recorded: without the profiler, and with it."""


def profiler(folder: Path, steps: int = 4, skip: int = SKIP) -> profile:
    """Return a torch profiler that records some steps of this rank and writes ``rank<N>.json.gz``; call its ``step``
    after each training step. The threads of gloo and of the balancer are recorded, too.

    Args:
        folder: made if it is not there; a trace that is there is replaced.
        steps: that are recorded.
        skip: steps before them, without the warm-up of one step.

    Raises:
        OSError: the folder cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank{dist.get_rank() if dist.is_initialized() else 0}.json.gz"
    return profile(
        activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()],
        schedule=schedule(wait=skip, warmup=WARM_UP, active=steps, repeat=1),
        on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)),
        experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
    )
