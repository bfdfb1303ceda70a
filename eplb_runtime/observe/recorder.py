"""Write the measured load of a job down as it comes: a series that `simulate` plays through other policies."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob, SeriesWriter
from ..utils.files import FileError
from ..utils.worker import Worker

logger = logging.getLogger("eplb_runtime")

MOST_WAITING = 64
"""Measurements that wait for the disk; what comes beyond is left out."""
CLOSING_SECONDS = 10.0


class Recorder:
    """Appends to the series of a run, on a thread of its own; a disk that is full, slow or gone hurts nobody.

    Args:
        run: folder of the run.
        num_layers, num_experts: L and E.
        job: what is known of the job at its start.

    Raises:
        FileError: the run holds the load of another model.
        OSError: the folder cannot be written to.
    """

    def __init__(self, run: Path, num_layers: int, num_experts: int, job: RecordedJob | None = None) -> None:
        self._writer = SeriesWriter(run, num_layers, num_experts, job)
        self._run = run
        self._worker = Worker("eplb_runtime recorder")
        self._room = threading.Semaphore(MOST_WAITING)
        self._ended = ""

    def write(self, load_TLE: NDArray[np.int64], steps: int, job: RecordedJob | None = None) -> None:
        """Add windows, ``[T, L, E]`` summed over ranks, of so many training steps each, and what has been measured of
        the job. Never waits, never raises."""
        if self._ended or self._worker.closed:
            return
        if not self._room.acquire(blocking=False):
            logger.warning("%s: the disk is too slow; %d windows of load are not recorded", self._run, len(load_TLE))
            return
        self._worker.submit(partial(self._append, load_TLE.copy(), steps, job))

    def close(self) -> None:
        """What was given is written, if the disk is quick enough."""
        if not self._worker.closed:
            self._worker.submit(self._writer.close)
            self._worker.close(CLOSING_SECONDS)

    def _append(self, load_TLE: NDArray[np.int64], steps: int, job: RecordedJob | None) -> None:
        self._room.release()
        if self._ended:
            return
        try:
            self._writer.append(load_TLE, steps, job)
        except (OSError, FileError) as error:
            self._ended = str(error)
            logger.warning("%s: load is not recorded any more: %s", self._run, error)
