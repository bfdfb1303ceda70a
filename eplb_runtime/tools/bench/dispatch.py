"""Token dispatch between ranks, beside plain all-to-alls of a row for each choice.

As in training, router weights want gradients and travel too. The dispatcher may send fewer rows: a token once for all
of its choices on a rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ...moe.dispatch.all_to_all import AllToAll
from ...moe.dispatch.base import DispatchContext
from .timing import timed

TOKENS = (256, 2048)
SLOTS = 4
"""Of a rank."""


def run(
    device: torch.device, repeats: int = 20, tokens: tuple[int, ...] = TOKENS, hidden: int = 512, top_k: int = 4
) -> dict[str, Any]:
    """Dispatch and combine with experts that do nothing and even choices. Collective.

    Args:
        tokens: of each rank; a row for each.

    Returns:
        JSON-able; ``"dispatch"`` rows have ``pass`` (``"forward"``, or ``"forward + backward"``), ``tokens``, ``mib``
        (a row for each choice of a rank, both ways), ``ms``, ``all_to_all_ms`` and ``ratio`` of the two.
    """
    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllToAll(DispatchContext.of(group, slots_per_rank=SLOTS))
    rows = []
    for count in tokens:
        batch = _Batch(dispatcher, group, device, count, hidden, top_k)
        for backward in (False, True):
            ways = [lambda: batch.dispatch(backward), lambda: batch.plain(backward)]  # noqa: B023
            ms, plain_ms = (1e3 * timed(ways, repeats, device, group).median(dim=0).values).tolist()
            rows.append(
                {
                    "pass": "forward + backward" if backward else "forward",
                    "tokens": count,
                    "mib": batch.out.nbytes * 2 * (1 + backward) / 2**20,
                    "ms": ms,
                    "all_to_all_ms": plain_ms,
                    "ratio": ms / plain_ms,
                }
            )
    return {"ranks": group.size(), "device": device.type, "hidden": hidden, "top_k": top_k, "dispatch": rows}


class _Batch:
    """Tokens of one rank, carried by the dispatcher or by plain exchanges."""

    def __init__(
        self,
        dispatcher: AllToAll,
        group: dist.ProcessGroup,
        device: torch.device,
        tokens: int,
        hidden: int,
        top_k: int,
    ) -> None:
        self._dispatcher, self._group = dispatcher, group
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._hidden_TD = torch.randn(tokens, hidden, generator=generator).to(device)
        choices = [torch.randperm(SLOTS * group.size(), generator=generator)[:top_k] for _ in range(tokens)]
        self._slots_TK = torch.stack(choices).to(device)
        self._weights_TK = torch.full((tokens, top_k), 1 / top_k, device=device)
        per_rank = torch.bincount(self._slots_TK.reshape(-1).cpu() // SLOTS, minlength=group.size())
        received = torch.empty_like(per_rank).to(device)
        dist.all_to_all_single(received, per_rank.to(device), group=group)
        self._sent, self._arrives = per_rank.tolist(), received.tolist()
        self.out = torch.randn(tokens * top_k, hidden, device=device)
        self._there, self._back = torch.empty(sum(self._arrives), hidden, device=device), torch.empty_like(self.out)

    def dispatch(self, backward: bool) -> None:
        hidden_TD = self._hidden_TD.requires_grad_(backward)
        weights_TK = self._weights_TK.requires_grad_(backward)
        dispatched = self._dispatcher.dispatch(hidden_TD, weights_TK, self._dispatcher.plan(self._slots_TK))
        result = self._dispatcher.combine(dispatched.rows_MD, dispatched)
        if backward:
            result.sum().backward()

    def plain(self, backward: bool) -> None:
        for _ in range(1 + backward):
            dist.all_to_all_single(self._there, self.out, self._arrives, self._sent, group=self._group)
            dist.all_to_all_single(self._back, self._there, self._sent, self._arrives, group=self._group)
