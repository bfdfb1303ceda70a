"""Loads that a user knows before they come (replayed routing, a fixed curriculum): checked, and summed over ranks.

Each rank may declare the tokens of its own batches, or one rank all of them: what ranks declare is added up, as what
they count is, and only its proportions matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ..distributed.consensus import extremes


class DeclaredLoadError(ValueError):
    """A declared load that no decision can use; one line that says why."""


def checked_declaration(load: Any, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """``load`` as float64 ``[T, L, E]`` on the host.

    Args:
        load: a tensor, an array or lists: ``[L, E]``, or ``[T, L, E]`` of successive windows.

    Raises:
        DeclaredLoadError: another shape, no numbers, or not finite, negative or all zero.
    """
    try:
        if torch.is_tensor(load):
            load = load.detach().cpu() if load.is_complex() else load.detach().cpu().double()  # bfloat16 is not numpy's
        values = np.asarray(load)
        if values.dtype.kind == "c":
            raise TypeError
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise DeclaredLoadError("a declared load is an array of numbers: give [layers, experts]") from None
    if array.ndim not in (2, 3) or array.shape[-2:] != (num_layers, num_experts) or not array.size:
        raise DeclaredLoadError(
            f"the declared load has shape {array.shape}: give [{num_layers}, {num_experts}], all MoE layers of the "
            f"model and its logical experts, or [windows, {num_layers}, {num_experts}]"
        )
    if not (np.isfinite(array).all() and (array >= 0).all() and array.any()):
        raise DeclaredLoadError("a declared load is tokens per expert: give finite numbers of 0 or more, not all 0")
    return array if array.ndim == 3 else array[None]


def summed(
    declared: NDArray[np.float64] | None, shape: tuple[int, int], group: dist.ProcessGroup
) -> NDArray[np.float64] | None:
    """What the ranks of ``group`` declared, float64 ``[T, L, E]``, the same on each; None: nobody did. Collective.

    Args:
        shape: (L, E).

    Raises:
        DeclaredLoadError: two ranks declared different numbers of windows; on every rank.
    """
    windows = 0 if declared is None else len(declared)
    least, most = map(int, extremes(torch.tensor(windows), group, has_values=declared is not None))
    if least > most:
        return None
    if most != least:
        raise DeclaredLoadError(f"ranks declared loads of {least} and of {most} windows: declare as many on each")
    total = torch.zeros(most, *shape, dtype=torch.float64)
    if declared is not None:
        total += torch.from_numpy(declared)
    dist.all_reduce(total, group=group)
    return total.numpy()
