"""Token dispatch between ranks, router weights too, against plain all-to-alls of a row for each choice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...moe.dispatch.all_to_all import AllToAll
from ...moe.dispatch.base import DispatchContext
from ...moe.routing.slots import RowCounts
from . import timed

SLOTS, TOP_K, HIDDEN = 4, 4, 512  # slots of a rank, choices of a token, numbers in a row


def run(device: torch.device, repeats: int = 20) -> dict[str, Any]:
    """Time dispatch and combine, forward and backward, with experts that do nothing and even choices. Collective.

    Returns:
        JSON-able; ``"dispatch"`` rows have ``tokens`` (of a rank), ``replicas`` (whether counts were known before, as
        from a split over replicas), ``rows`` and ``bytes`` (hidden states that rank 0 sends to others), ``ms``,
        ``all_to_all_ms`` and ``ratio`` of the two.
    """
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, slots_per_rank=SLOTS))  # type: ignore[arg-type]
    rows = []
    for tokens in (256, 2048):
        *ways, plain = _ways(dispatcher, device, tokens)
        seconds = timed([plain, *ways], repeats, device, dist.group.WORLD)
        plain_ms, *by_way = (1e3 * seconds.median(dim=0).values).tolist()
        for replicas, way, ms in zip((False, True), ways, by_way, strict=True):
            given = {"tokens": tokens, "replicas": replicas, "rows": (sent := way()), "bytes": 4 * HIDDEN * sent}
            rows.append({**given, "ms": ms, "all_to_all_ms": plain_ms, "ratio": ms / plain_ms})
    return {"ranks": dist.get_world_size(), "device": device.type, "dispatch": rows}


def _ways(dispatcher: AllToAll, device: torch.device, tokens: int) -> list[Callable[[], int]]:
    """Return functions that carry a batch of this rank and return rows sent: by the dispatcher without and with known
    counts, and by plain exchanges."""
    ranks, generator = dist.get_world_size(), torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(tokens, HIDDEN, generator=generator).to(device).requires_grad_()
    slots = torch.stack([torch.randperm(SLOTS * ranks, generator=generator)[:TOP_K] for _ in range(tokens)])
    slots_TK = slots.to(device)
    weights_TK = torch.full((tokens, TOP_K), 1 / TOP_K, device=device, requires_grad=True)
    sent_P = torch.bincount(slots.reshape(-1), minlength=SLOTS * ranks)
    received = torch.empty_like(sent_P).to(device)
    dist.all_to_all_single(received, sent_P.to(device))
    known = RowCounts(sent_P.numpy(), received.view(ranks, SLOTS).cpu().numpy())
    out = torch.randn(tokens * TOP_K // ranks * ranks, HIDDEN, device=device)
    back = torch.empty_like(out)

    def dispatch(counts: RowCounts | None = None) -> int:
        dispatched = dispatcher.dispatch(hidden_TD, weights_TK, metadata := dispatcher.plan(slots_TK, counts))
        dispatcher.combine(dispatched.rows_MD, dispatched).sum().backward()
        return sum(metadata.tokens.splits.sent)

    def plain() -> int:
        for _ in range(4):
            dist.all_to_all_single(back, out)
        return len(out)

    return [dispatch, lambda: dispatch(known), plain]
