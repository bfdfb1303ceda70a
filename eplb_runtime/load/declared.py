"""Loads that a user knows before they come (replayed routing, a fixed curriculum): checked, and summed over ranks.

Each rank may declare the tokens of its own batches, or one rank all of them. Only the sum's proportions matter.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.consensus import gather_json
from . import checked_load

PADDED = -1
"""The id in place of an expert's where a token is padding."""
_CHUNK_IDS = 1 << 22
"""Ids that are counted at a time, which bounds the memory on top of the ids themselves."""


class DeclaredLoadError(ValueError):
    """A declared load that no decision can use; one line that says why."""


def checked_declaration(load: Any, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """Return a declared load as tokens of each expert, float64 ``[T, L, E]`` on the host. ``load``: counts ``[L, E]``
    or ``[T, L, E]``; integers ``[N, L, K]``, the experts of N tokens (-1: padding), for T = 1; or a list of such
    arrays, joined along T. DeclaredLoadError: another shape, no numbers of tokens, ids of no expert, or only zeros."""
    of_batches = isinstance(load, list | tuple) and len(load) > 0
    of_batches = of_batches and all(isinstance(one, Tensor | np.ndarray) and one.ndim > 1 for one in load)
    found, knows_tokens = [], False
    for part in load if of_batches else [load]:
        if _is_topk_ids(part, num_layers, num_experts):
            knows_tokens = True
            found.append(_counted(torch.as_tensor(part).detach(), num_experts)[None])
            continue
        found.append(checked_load(part, "the declared load", DeclaredLoadError))
        if found[-1].shape[1:] != (num_layers, num_experts):
            raise DeclaredLoadError(
                f"the declared load has shape {tuple(np.shape(part))}: give [{num_layers}, {num_experts}], all MoE "
                f"layers of the model and its logical experts, [micro-batches, {num_layers}, {num_experts}], or whole "
                f"numbers [tokens, {num_layers}, k], the experts of each token"
            )
    if not (knows_tokens or any(map(np.any, found))):  # tokens may all be padding, on one rank
        raise DeclaredLoadError("the declared load has no token: give tokens per expert, not all 0")
    return np.concatenate(found)


def _is_topk_ids(load: Any, num_layers: int, num_experts: int) -> bool:
    """Return whether this is the shape and kind of the experts of each token, ``[N, L, K]`` with K < E."""
    if getattr(load, "ndim", 0) != 3 or load.shape[1] != num_layers or not 0 < load.shape[2] < num_experts:
        return False
    if isinstance(load, Tensor):
        return not (load.is_floating_point() or load.is_complex() or load.dtype is torch.bool)
    return bool(load.dtype.kind in "iu")


def _counted(ids_NLK: Tensor, num_experts: int) -> NDArray[np.float64]:
    """Return float64 ``[L, E]``: how many of the tokens go to each expert; padding (-1) to none."""
    _, layers, top_k = ids_NLK.shape
    # A column for padding comes first, so that an id + 1 is its column.
    first_L1 = torch.arange(layers, device=ids_NLK.device)[:, None] * (num_experts + 1) + 1
    counts = torch.zeros(layers * (num_experts + 1), dtype=torch.int64, device=ids_NLK.device)
    for ids_CLK in ids_NLK.split(max(1, _CHUNK_IDS // (layers * top_k))):
        ids_CLK = ids_CLK.long()
        wrong = ids_CLK[(ids_CLK < PADDED) | (ids_CLK >= num_experts)]
        if len(wrong):
            raise DeclaredLoadError(
                f"the declared experts of tokens have an id {int(wrong[0])}: give logical ids from 0 to "
                f"{num_experts - 1}, and {PADDED} for padding"
            )
        counts += torch.bincount((ids_CLK + first_L1).flatten(), minlength=len(counts))
    return np.asarray(counts.view(layers, -1)[:, 1:].cpu().numpy(), dtype=np.float64)


def summed(
    declared: NDArray[np.float64] | None, shape: tuple[int, int], group: dist.ProcessGroup
) -> NDArray[np.float64] | None:
    """Return the sum over ranks of ``declared`` (None: nothing), float64 ``[T, L, E]``, equal on all; None: no rank
    declared. Collective. DeclaredLoadError: ranks declared different numbers T of micro-batches, or no token."""
    said = gather_json(None if declared is None else len(declared), group)
    if not (batches := sorted({number for number in said if number is not None})):
        return None
    if batches[1:]:
        both = f"{batches[0]} and of {batches[-1]}"
        raise DeclaredLoadError(f"ranks declared loads of {both} micro-batches: declare as many on each")
    total = torch.zeros(batches[0], *shape, dtype=torch.float64)
    if declared is not None:
        total += torch.from_numpy(declared)
    dist.all_reduce(total, group=group)
    if not total.any():
        raise DeclaredLoadError("the ranks declared no token: all of it is padding")
    return total.numpy()
