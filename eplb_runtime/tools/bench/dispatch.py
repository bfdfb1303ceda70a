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

SLOTS = 4
"""Of a rank."""


def run(
    device: torch.device, repeats: int = 20, tokens: tuple[int, ...] = (256, 2048), hidden: int = 512, top_k: int = 4
) -> dict[str, Any]:
    """Dispatch and combine with experts that do nothing and even choices. Collective.

    Args:
        tokens: of each rank; a row for each.

    Returns:
        JSON-able; ``"dispatch"`` rows have ``pass`` (``"forward"``, or ``"forward + backward"``), ``tokens``, ``mib``
        (a row for each choice of a rank, both ways), ``ms``, ``all_to_all_ms`` and ``ratio`` of the two.
    """
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, slots_per_rank=SLOTS))  # type: ignore[arg-type]
    rows = []
    for count in tokens:
        for backward in (False, True):
            ways = _ways(dispatcher, device, (count, hidden, top_k), backward)
            ms, plain_ms = (1e3 * timed(ways, repeats, device, dist.group.WORLD).median(dim=0).values).tolist()
            rows.append(
                {
                    "pass": "forward + backward" if backward else "forward",
                    "tokens": count,
                    "mib": count * top_k * hidden * 4 * 2 * (1 + backward) / 2**20,
                    "ms": ms,
                    "all_to_all_ms": plain_ms,
                    "ratio": ms / plain_ms,
                }
            )
    return {"ranks": dist.get_world_size(), "device": device.type, "hidden": hidden, "top_k": top_k, "dispatch": rows}


def _ways(
    dispatcher: AllToAll, device: torch.device, sizes: tuple[int, int, int], backward: bool
) -> list[Callable[[], None]]:
    """Return functions that carry a batch of this rank: by the dispatcher, and by plain exchanges."""
    (tokens, hidden, top_k), ranks = sizes, dist.get_world_size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(tokens, hidden, generator=generator).to(device).requires_grad_(backward)
    slots = torch.stack([torch.randperm(SLOTS * ranks, generator=generator)[:top_k] for _ in range(tokens)])
    slots_TK = slots.to(device)
    weights_TK = torch.full((tokens, top_k), 1 / top_k, device=device, requires_grad=backward)
    per_rank = torch.bincount(slots.reshape(-1) // SLOTS, minlength=ranks)
    received = torch.empty_like(per_rank).to(device)
    dist.all_to_all_single(received, per_rank.to(device))
    sent, arrives = per_rank.tolist(), received.tolist()
    out = torch.randn(tokens * top_k, hidden, device=device)
    there, back = torch.empty(sum(arrives), hidden, device=device), torch.empty_like(out)

    def dispatch() -> None:
        dispatched = dispatcher.dispatch(hidden_TD, weights_TK, dispatcher.plan(slots_TK))
        result = dispatcher.combine(dispatched.rows_MD, dispatched)
        if backward:
            result.sum().backward()

    def plain() -> None:
        for _ in range(1 + backward):
            dist.all_to_all_single(there, out, arrives, sent)
            dist.all_to_all_single(back, there, sent, arrives)

    return [dispatch, plain]
