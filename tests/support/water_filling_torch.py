"""Dealing choices out in torch: a reference that gives the same slots as the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def assign_slots(expert_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor) -> Tensor:
    """The slot that computes each choice of this rank's tokens, int64 ``[T, K]``: the first ``sent_EC[e, 0]`` choices
    of expert e, in order of (token, k), go to its first copy, the next ``sent_EC[e, 1]`` to its second, and so on; -1,
    no choice, stays -1. ``sent_EC``: this source rank's row of ``split_counts``; ``copy_slot_EC``: of the tables."""
    flat = expert_TK.reshape(-1).to(torch.int64)
    order = torch.argsort(flat, stable=True)
    occurrence = torch.empty_like(order)
    occurrence[order] = torch.arange(len(flat), device=flat.device) - torch.searchsorted(flat[order], flat[order])
    expert = flat.clamp(min=0)
    slot = copy_slot_EC[expert, (occurrence[:, None] >= sent_EC.cumsum(1)[expert][:, :-1]).sum(1)]
    return torch.where(flat < 0, -1, slot).reshape(expert_TK.shape)
