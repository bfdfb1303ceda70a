"""Loads that a user knows before they come (replayed routing, a fixed curriculum): checked, and summed over ranks.

Each rank may declare the tokens of its own batches, or one rank all of them: what ranks declare is added up, as what
they count is, and only its proportions matter. A load is given as tokens per expert, or as the experts of each token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.consensus import extremes
from .checks import checked_load

PADDED, MANY = -1, 0.05
"""The id in place of an expert's where a token is padding; and the share of tokens of which that is said."""
_CHUNK_IDS = 1 << 22
"""Ids that are counted at a time, which bounds the memory besides the ids themselves."""


class DeclaredLoadError(ValueError):
    """A declared load that no decision can use; one line that says why."""


def checked_declaration(load: Any, num_layers: int, num_experts: int) -> tuple[NDArray[np.float64], list[Tensor]]:
    """``load``, as `Balancer.declare` takes it, as float64 ``[T, L, E]`` on the host; and its parts that are experts of
    tokens, for `padding_in`.

    Raises:
        DeclaredLoadError: another shape, or values that are no load; all zero; or ids of no expert.
    """
    parts = _parts_of(load)
    found = np.concatenate([_as_load(one, num_layers, num_experts) for one in parts])
    tokens = [torch.as_tensor(one) for one in parts if _is_topk_ids(one, num_layers, num_experts)]
    if not found.any() and not tokens:
        raise DeclaredLoadError("the declared load has no token: give tokens per expert, not all 0")
    return found, tokens


def padding_in(tokens: Sequence[Tensor]) -> str:
    """Return a line on tokens ``[N, L, K]`` that are padding (-1 in each layer) or look like it, if many."""
    padded = [ids_NLK == PADDED for ids_NLK in tokens]
    first = [ids_NLK == torch.arange(ids_NLK.shape[2], device=ids_NLK.device) for ids_NLK in tokens]
    likely = f"go to the first experts in each layer, as padding does: give {PADDED} for it"
    for found, said in ((padded, f"are padding ({PADDED}), and not counted"), (first, likely)):
        alike = sum(int(is_NLK.all(dim=(1, 2)).sum()) for is_NLK in found)
        if alike and alike >= MANY * (all_tokens := sum(map(len, tokens))):
            return f"{alike / all_tokens:.0%} of the declared tokens {said}"
    return ""


def _parts_of(load: Any) -> Sequence[Any]:
    """Return the micro-batches of a list or tuple of arrays, else the load alone."""
    if not isinstance(load, list | tuple) or not load:
        return [load]
    return load if all(isinstance(one, Tensor | np.ndarray) and one.ndim > 1 for one in load) else [load]


def _is_topk_ids(load: Any, num_layers: int, num_experts: int) -> bool:
    """Whether this is the shape and kind of the experts of each token, ``[N, L, K]`` with K < E."""
    if getattr(load, "ndim", 0) != 3 or load.shape[1] != num_layers or not 0 < load.shape[2] < num_experts:
        return False
    if isinstance(load, Tensor):
        return not (load.is_floating_point() or load.is_complex() or load.dtype is torch.bool)
    return bool(load.dtype.kind in "iu")


def _as_load(load: Any, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """float64 ``[T, L, E]`` of tokens per expert or experts of tokens; all zero where these are padding."""
    if _is_topk_ids(load, num_layers, num_experts):
        return _counted(load, num_layers, num_experts)[None]
    array = checked_load(load, "the declared load", DeclaredLoadError)
    if array.shape[1:] != (num_layers, num_experts):
        raise DeclaredLoadError(
            f"the declared load has shape {tuple(np.shape(load))}: give [{num_layers}, {num_experts}], all MoE layers "
            f"of the model and its logical experts, [micro-batches, {num_layers}, {num_experts}], or whole numbers "
            f"[tokens, {num_layers}, k], the experts of each token"
        )
    return array


def _counted(topk_ids: Any, num_layers: int, num_experts: int) -> NDArray[np.float64]:
    """Return float64 ``[L, E]``: how many of the tokens ``[N, L, K]`` go to each expert; padding (-1) to none."""
    ids_NLK = torch.as_tensor(topk_ids).detach()
    top_k = ids_NLK.shape[2]
    # A column for padding comes first, so that an id + 1 is its column.
    first_L1 = torch.arange(num_layers, device=ids_NLK.device)[:, None] * (num_experts + 1) + 1
    counts = torch.zeros(num_layers * (num_experts + 1), dtype=torch.int64, device=ids_NLK.device)
    for ids_CLK in ids_NLK.split(max(1, _CHUNK_IDS // (num_layers * top_k))):
        ids_CLK = ids_CLK.long()
        if not len(ids_CLK):
            continue
        least, most = (int(bound) for bound in ids_CLK.aminmax())
        if least < PADDED or most >= num_experts:
            raise DeclaredLoadError(
                f"the declared experts of tokens have an id {least if least < PADDED else most}: give logical ids from "
                f"0 to {num_experts - 1}, and {PADDED} for padding"
            )
        counts += torch.bincount((ids_CLK + first_L1).flatten(), minlength=len(counts))
    counts_LE = counts.view(num_layers, num_experts + 1)[:, 1:]
    return np.asarray(counts_LE.cpu().numpy(), dtype=np.float64)


def summed(
    declared: NDArray[np.float64] | None, shape: tuple[int, int], group: dist.ProcessGroup
) -> NDArray[np.float64] | None:
    """Return what the ranks of ``group`` declared, float64 ``[T, L, E]``, the same on each; None: nobody did.
    Collective."""
    batches = 0 if declared is None else len(declared)
    least, most = map(int, extremes(torch.tensor(batches), group, has_values=declared is not None))
    if least > most:
        return None
    if most != least:
        raise DeclaredLoadError(f"ranks declared loads of {least} and of {most} micro-batches: declare as many on each")
    total = torch.zeros(most, *shape, dtype=torch.float64)
    if declared is not None:
        total += torch.from_numpy(declared)
    dist.all_reduce(total, group=group)
    if not total.any():
        raise DeclaredLoadError("the ranks declared no token: all of it is padding")
    return total.numpy()
