"""The layers in which one placement gains over another by more than the noise of the scenarios."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ..traffic import worth_by_scenario
from ..types import PlanRequest

NOISE = 1.0
"""A layer's gain must be so many times the standard error of its mean over the scenarios."""


def gain_and_noise(
    request: PlanRequest, current: Placement, other: Placement
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what each layer gains from ``other``, mean over the scenarios, and how much of that may be noise.

    Returns:
        float64 ``[L]`` each; by the splitter itself.
    """
    gain_WL = worth_by_scenario(request, current) - worth_by_scenario(request, other)
    if len(gain_WL) == 1 or request.declared:
        return gain_WL.mean(axis=0), np.zeros(gain_WL.shape[1])
    return gain_WL.mean(axis=0), NOISE * gain_WL.std(axis=0, ddof=1) / np.sqrt(len(gain_WL))


def where_it_pays(request: PlanRequest, current: Placement, other: Placement) -> Placement:
    """Return ``other`` in the layers that gain more than noise, and ``current`` in the rest."""
    gain_L, noise_L = gain_and_noise(request, current, other)
    return choose((gain_L > 0) & (gain_L > noise_L), other, current)


def choose(first_L: NDArray[np.bool_], one: Placement, other: Placement) -> Placement:
    """Return layers of ``one`` where ``first_L`` (bool ``[L]``) holds, of ``other`` elsewhere; both home layouts."""
    if one.home is None or other.home is None or not first_L.any():
        return other
    return Placement(
        np.where(first_L[:, None], one.physical_to_logical, other.physical_to_logical),
        one.num_experts,
        one.num_ranks,
        np.where(first_L[:, None], one.home, other.home),
        other.epoch,
    )
