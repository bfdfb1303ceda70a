"""The imbalance of a load that was recorded without a balancer: what `report` shows of such a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..load.series import RecordedJob, holds_series, read_job, read_series
from ..placement import Placement
from ..planner.evaluate import predicted_imbalance
from ..utils.files import FileError
from .event_log import holds_events

FEW_RANKS = (8, 4, 2)
"""Of these the first that divides the experts, where the job's own ranks say nothing of imbalance."""


@dataclass(frozen=True)
class RecordedLoad:
    """Imbalance of a recorded load, with experts in logical order.

    Args:
        ranks: EP size that it is of: the job's, or one of ``FEW_RANKS``; 1: nothing divides the experts.
        is_own: whether the job has so many ranks.
        steps: training steps in which tokens were recorded.
        imbalance_TL: float64 ``[T, L]``, max / mean rank load of each window.
        rank_load_LR: float64 ``[L, R]``, tokens of each rank over all windows.
        job: what the record says.
    """

    ranks: int
    is_own: bool
    steps: int
    imbalance_TL: NDArray[np.float64]
    rank_load_LR: NDArray[np.float64]
    job: RecordedJob
    experts: int

    def fields(self) -> dict[str, Any]:
        """The summary that ``eplb-runtime report --json`` prints."""
        windows, layers = self.imbalance_TL.shape
        return {
            "ranks": self.ranks,
            "layers": layers,
            "experts": self.experts,
            "windows": windows,
            "steps": self.steps,
            "imbalance": {
                "mean": float(self.imbalance_TL.mean()),
                "p95": float(np.percentile(self.imbalance_TL, 95)),
                "max": float(self.imbalance_TL.max()),
            },
            "imbalance_by_layer": self.imbalance_TL.mean(axis=0).tolist(),
        }


def holds_recorded_load(folder: Path) -> bool:
    """Return whether a folder holds a recorded load and no job of a balancer."""
    return folder.is_dir() and holds_series(folder) and not holds_events(folder)


def recorded_load(folder: Path) -> RecordedLoad:
    """What the folder of ``eplb.record`` says of imbalance.

    Raises:
        FileError: a file is broken, or no token has been recorded yet.
        OSError: it cannot be read.
    """
    try:
        load, steps = read_series(folder)
        job = read_job(folder)
    except FileError as error:
        raise FileError(f"{folder}: {error}") from None
    has_tokens_T = load.any(axis=(1, 2))  # others are of steps in evaluation mode
    if not has_tokens_T.any():
        raise FileError(f"{folder}: no token has been recorded yet")
    load, num_steps = load[has_tokens_T], int(np.array(steps)[has_tokens_T].sum())
    layers, experts = load.shape[1:]
    own = job.ep_size if job.ep_size > 1 else job.ranks
    is_own = own > 1 and experts % own == 0
    ranks = own if is_own else next((ranks for ranks in FEW_RANKS if experts % ranks == 0), 1)
    placement = Placement.initial(layers, experts, ranks, 0)
    return RecordedLoad(
        ranks=ranks,
        is_own=is_own,
        steps=num_steps,
        imbalance_TL=predicted_imbalance(load.astype(np.float64), placement),
        rank_load_LR=load.sum(axis=0).reshape(layers, ranks, -1).sum(axis=2).astype(np.float64),
        job=job,
        experts=experts,
    )
