"""Homes packed anew by experts that would rather stay, and an honest estimate of what each such placement gains.

A packing that fits some windows looks better on these than on the next. So each placement is judged on windows that it
was not packed for: expert by expert, the window that comes is left out of the mean that is packed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...load.least_loaded import least_loaded, set_value, tournament
from ...utils.jit import jit


@jit(error_model="numpy")
def pack_staying(
    load_E: NDArray[np.float64], home_E: NDArray[np.int32], ranks: int, slack: float, packed_E: NDArray[np.int32]
) -> None:
    """Place experts, heaviest first, each on the least loaded rank, or where it is if that is little worse.

    Args:
        home_E: home ranks now.
        slack: share of the mean rank load by which an expert's own rank may exceed the least loaded one.
        packed_E: out.
    """
    room, load_R = load_E.size // ranks, np.zeros(ranks)
    filled_R = np.zeros(ranks, dtype=np.int64)
    most = slack * load_E.sum() / ranks
    open_ranks = tournament(load_R)
    for expert in np.argsort(-load_E, kind="mergesort"):
        rank, own = least_loaded(open_ranks), home_E[expert]
        if filled_R[own] < room and load_R[own] <= load_R[rank] + most:
            rank = own
        packed_E[expert] = rank
        load_R[rank] += load_E[expert]
        filled_R[rank] += 1
        set_value(open_ranks, rank, load_R[rank] if filled_R[rank] < room else np.inf)


@jit(error_model="numpy")
def peak(load_E: NDArray[np.float64], home_E: NDArray[np.int32], load_R: NDArray[np.float64]) -> float:
    """Max / mean rank load; 1 without load.

    Args:
        load_R: room to work in.
    """
    load_R[:] = 0.0
    total = 0.0
    for expert in range(load_E.size):
        load_R[home_E[expert]] += load_E[expert]
        total += load_E[expert]
    return float(load_R.max() * load_R.size / total) if total > 0.0 else 1.0


@jit(error_model="numpy")
def left_out(
    scenario_WE: NDArray[np.float64],
    expected_E: NDArray[np.float64],
    choice_NE: NDArray[np.int64],
    home_E: NDArray[np.int32],
    ranks: int,
    slack_X: NDArray[np.float64],
) -> NDArray[np.float64]:
    """float64 ``[X + 1, N]``: max / mean rank load with homes packed at each slack, and in the last row as they are.

    Args:
        scenario_WE: loads that may come, around ``expected_E``; a single one is packed itself.
        choice_NE: for each load to judge by, the scenario that each expert has its tokens from.
    """
    scenarios, experts = scenario_WE.shape
    result_XN = np.empty((slack_X.size + 1, len(choice_NE)))
    came_E, other_E, load_R = np.empty(experts), np.empty(experts), np.empty(ranks)
    packed_E = np.empty(experts, dtype=np.int32)
    for index in range(len(choice_NE)):
        for expert in range(experts):
            came_E[expert] = scenario_WE[choice_NE[index, expert], expert]
            others = expected_E[expert] * scenarios - came_E[expert]
            other_E[expert] = max(others, 0.0) if scenarios > 1 else came_E[expert]
        for rung in range(slack_X.size):
            pack_staying(other_E, home_E, ranks, slack_X[rung], packed_E)
            result_XN[rung, index] = peak(came_E, packed_E, load_R)
        result_XN[-1, index] = peak(came_E, home_E, load_R)
    return result_XN
