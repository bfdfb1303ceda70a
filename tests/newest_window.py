"""A planner that answers each window, noise too: what a job's small model gives its router is little else."""

from __future__ import annotations

from typing import Any

import numpy as np

import eplb_runtime as eplb


def plan_newest(load: np.ndarray, *args: Any, **terms: Any) -> eplb.Plan:
    """As `eplb_runtime.plan`, for the newest window alone."""
    return eplb.plan(np.asarray(load)[-1:], *args, **terms)
