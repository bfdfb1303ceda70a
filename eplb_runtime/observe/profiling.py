"""Traces of a training job by torch.profiler: one file a rank, of a few steps after the first ones."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

SKIP, WARM_UP = 2, 1
"""Steps that are let go before those that are recorded: without the profiler, and with it."""


class Profiler:
    """Records some steps of this rank and writes ``rank<N>.json.gz``. A context manager.

    The threads of gloo and of the balancer are recorded, too. Spans of the balancer are named by
    `eplb_runtime.utils.spans`.

    Args:
        folder: made if it is not there; a trace that is there is replaced.
        steps: that are recorded.
        skip: steps before them, without the warm-up of one step.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, folder: Path, steps: int = 4, skip: int = SKIP) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.path = folder / f"rank{rank}.json.gz"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=skip, warmup=WARM_UP, active=steps, repeat=1),
            on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(self.path)),
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    def step(self) -> None:
        """A training step is over."""
        self._profile.step()

    def __enter__(self) -> Profiler:
        self._profile.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profile.__exit__(kind, error, trace)
