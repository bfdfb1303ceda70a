"""Where uneven experts stretch a pipeline's stages, before and after a plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...planner import plan
from ...planner.evaluate import predicted_imbalance
from ...topology import Topology
from .playing import BubbleError


def stretch(imbalance_S: Sequence[float], moe_share: float) -> list[float]:
    """How many times as long stages take, if ``moe_share`` of their time goes with their busiest rank's load."""
    return [1 - moe_share + moe_share * imbalance for imbalance in imbalance_S]


def stage_imbalance(
    load_TLE: NDArray[np.float64], ep_ranks: int, slots_per_rank: int, stages: int
) -> tuple[list[float], list[float]]:
    """Imbalance of each stage before and after a plan; its layers follow one another, equally many a stage.

    Args:
        load_TLE: float64 ``[T, L, E]``, tokens per expert. Experts lie in order before; the plan is made for all
            windows.

    Returns:
        Max / mean rank load of each stage, mean over its layers and windows.

    Raises:
        BubbleError: there are fewer layers than stages.
        PlanError, PlacementError: ranks and slots do not fit the load.
    """
    layers, experts = load_TLE.shape[1:]
    if layers < stages:
        raise BubbleError(f"the load has {layers} MoE layers for {stages} stages: give at least one each")
    planned = plan(load_TLE, Topology(ep_ranks, ep_ranks), slots_per_rank=slots_per_rank)
    homes = Placement.initial(layers, experts, ep_ranks)
    stage_L = np.arange(layers) * stages // layers
    found = []
    for placement in (homes, planned.placement):
        of_layers = predicted_imbalance(load_TLE, placement).mean(axis=0)
        found.append([float(of_layers[stage_L == stage].mean()) for stage in range(stages)])
    return found[0], found[1]
