"""The folder of a run: its state by the events on disk, and its recorded load with what is known of the job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..load.series import JobRecord, read_series
from ..utils.files import FileError
from .events_file import holds_events, read_events
from .run_state import RunState, state_of


def read_run(folder: Path) -> JobRecord:
    """Read the folder of a run, or of ``eplb.record``.

    Raises:
        FileError: a file of the series is broken.
        OSError: it cannot be read.
    """
    found = read_series(folder)
    if not holds_events(folder):
        return found
    try:
        state, _ = state_of_run(folder)
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


def state_of_run(run: Path) -> tuple[RunState, int]:
    """Return the state of a run by its events on disk, and how many of them could not be used.

    Raises:
        FileError: there is no log, or it tells of no job.
        OSError: it cannot be read.
    """
    state, left_out = state_of(read_events(run))
    if not state.job:
        raise FileError(f"{run}: its log does not say what job it is of; is it whole?")
    return state, left_out
