"""The folder of a run: its state by the events on disk, and its recorded load with what is known of the job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_high
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob, read_series
from ..utils.files import FileError
from .events_file import holds_events, read_events
from .run_state import RunState, state_of


@dataclass(frozen=True, eq=False)
class JobRecord:
    """A recorded load, and what is known of the job that it is of.

    Args:
        load: ``[T, L, E]``, tokens of each logical expert, oldest window first.
        steps_T: training steps of each window; empty: unknown.
    """

    load: NDArray[Any]
    steps_T: Sequence[int] = ()
    job: RecordedJob = field(default_factory=RecordedJob)

    @property
    def steps_per_window(self) -> int:
        """Return the training steps that most windows are of; 0: unknown."""
        return median_high(self.steps_T) if len(self.steps_T) else 0

    def alike(self) -> JobRecord:
        """Return the record without windows of other numbers of steps: a last one, and those of an earlier job."""
        same_T = np.array([steps == self.steps_per_window for steps in self.steps_T] or [True] * len(self.load))
        return replace(self, load=self.load[same_T], steps_T=[self.steps_per_window] * int(same_T.sum()))


def read_run(folder: Path) -> JobRecord:
    """Read the folder of a run, or of ``eplb.record``.

    Raises:
        FileError: a file of the series is broken.
        OSError: it cannot be read.
    """
    found = JobRecord(*read_series(folder))
    if not holds_events(folder):
        return found
    try:
        state = state_of_run(folder)
    except FileError:
        return found
    # A class of links that the job did not have was not measured.
    job, node = found.job, found.job.ranks_per_node
    if node > 1:
        job = replace(job, intra_node_bandwidth=state.job["intra_node_bandwidth"] / 1e9)
    if job.ranks > node > 0:
        job = replace(job, inter_node_bandwidth=state.job["inter_node_bandwidth"] / 1e9)
    if state.measured is not None:
        seconds = float(state.measured["step_seconds"])
        job = replace(job, step_seconds=seconds, imbalance=float(state.measured["imbalance"].mean()))
        if state.share.source == "measured":  # of the same time as the seconds of a step
            job = replace(job, expert_seconds=state.share.value * seconds)
    return replace(found, job=job)


def state_of_run(run: Path) -> RunState:
    """Return the state of a run by its events on disk.

    Raises:
        FileError: there is no log, or it tells of no job.
        OSError: it cannot be read.
    """
    state = state_of(read_events(run))
    if not state.job:
        raise FileError(f"{run}: its log does not say what job it is of; is it whole?")
    return state
