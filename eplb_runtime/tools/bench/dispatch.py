"""Token dispatch between ranks, beside plain all-to-alls of a row for each choice.

As in training, router weights want gradients and travel too. The dispatcher may send fewer rows: a token once for all
of its choices on a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...moe.dispatch.all_to_all import AllToAll
from ...moe.dispatch.base import DispatchContext
from .timing import timed

SLOTS, TOP_K, HIDDEN = 4, 4, 512
"""Slots of a rank, choices of a token, numbers in a row."""


def run(device: torch.device, repeats: int = 20) -> dict[str, Any]:
    """Dispatch and combine, forward and backward, with experts that do nothing and even choices. Collective.

    Returns:
        JSON-able; ``"dispatch"`` rows have ``tokens`` (of a rank), ``ms``, ``all_to_all_ms`` and ``ratio`` of the two.
    """
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, slots_per_rank=SLOTS))  # type: ignore[arg-type]
    rows = []
    for tokens in (256, 2048):
        seconds = timed(_ways(dispatcher, device, tokens), repeats, device, dist.group.WORLD)
        ms, plain_ms = (1e3 * seconds.median(dim=0).values).tolist()
        rows.append({"tokens": tokens, "ms": ms, "all_to_all_ms": plain_ms, "ratio": ms / plain_ms})
    return {"ranks": dist.get_world_size(), "device": device.type, "dispatch": rows}


def _ways(dispatcher: AllToAll, device: torch.device, tokens: int) -> list[Callable[[], None]]:
    """Return functions that carry a batch of this rank: by the dispatcher, and by plain exchanges."""
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(tokens, HIDDEN, generator=generator).to(device).requires_grad_()
    slots = torch.stack([torch.randperm(SLOTS * ranks, generator=generator)[:TOP_K] for _ in range(tokens)])
    slots_TK = slots.to(device)
    weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K, device=device, requires_grad=True)
    per_rank = torch.bincount(slots.reshape(-1) // SLOTS, minlength=ranks)
    received = torch.empty_like(per_rank).to(device)
    dist.all_to_all_single(received, per_rank.to(device))
    sent, arrives = per_rank.tolist(), received.tolist()
    out = torch.randn(tokens * TOP_K, HIDDEN, device=device)
    there, back = torch.empty(sum(arrives), HIDDEN, device=device), torch.empty_like(out)

    def dispatch() -> None:
        dispatched = dispatcher.dispatch(hidden_TD, weights_TK, dispatcher.plan(slots_TK))
        dispatcher.combine(dispatched.rows_MD, dispatched).sum().backward()

    def plain() -> None:
        for _ in range(2):
            dist.all_to_all_single(there, out, arrives, sent)
            dist.all_to_all_single(back, there, sent, arrives)

    return [dispatch, plain]
