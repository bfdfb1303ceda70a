"""Measure token dispatch between ranks, beside plain all-to-alls of a row for each choice in the same run.

As in training, router weights want gradients and travel too. A dispatcher may send fewer rows: a token once for all of
its choices on a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...moe.dispatch.all_to_all import AllToAll
from ...moe.dispatch.base import DispatchContext, Dispatcher
from ...topology import Topology
from ..launch import launcher_environment
from . import dispatch_ways

TOKENS = (256, 2048)


def run(
    device: torch.device,
    repeats: int = 20,
    tokens: tuple[int, ...] = TOKENS,
    hidden: int = 512,
    top_k: int = 4,
    ranks_per_node: int | None = None,
) -> dict[str, Any]:
    """Dispatch and combine with experts that do nothing; choices are even, four slots a rank. Collective.

    Args:
        device: of this rank.
        repeats: the two ways take turns; a repeat takes as long as its slowest rank, the median counts.
        tokens: of each rank; a row for each.
        ranks_per_node: what is taken for a node by `dispatch_ways`, which see; None: what the launcher says.

    Returns:
        JSON-able; ``"dispatch"`` rows have ``pass`` (``"forward"``, or ``"forward + backward"``), ``tokens``, ``mib``
        (a row for each choice of a rank, both ways), ``ms``, ``all_to_all_ms`` and ``ratio`` (1: no slower than these
        rows themselves). Besides what `dispatch_ways.run` returns, with the fewest tokens.
    """
    group = dist.group.WORLD
    assert group is not None
    dispatcher = AllToAll(DispatchContext.of(group, slots_per_rank=4))
    rows = [
        _row(dispatcher, group, device, repeats, count, hidden, top_k, backward)
        for count in tokens
        for backward in (False, True)
    ]
    sizes = {"ranks": group.size(), "device": device.type, "hidden": hidden, "top_k": top_k}
    topology = Topology.from_launcher(launcher_environment(), group.size())
    if ranks_per_node is not None:
        topology = Topology(group.size(), ranks_per_node)
    timed = partial(slowest_rank_ms, repeats=repeats, group=group, device=device)
    return {**sizes, "dispatch": rows, **dispatch_ways.run(timed, device, topology, min(tokens), hidden)}


def _row(
    dispatcher: Dispatcher,
    group: dist.ProcessGroup,
    device: torch.device,
    repeats: int,
    tokens: int,
    hidden: int,
    top_k: int,
    backward: bool,
) -> dict[str, Any]:
    slots = 4 * group.size()
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(tokens, hidden, generator=generator).to(device).requires_grad_(backward)
    slots_TK = torch.stack([torch.randperm(slots, generator=generator)[:top_k] for _ in range(tokens)]).to(device)
    weights_TK = torch.full((tokens, top_k), 1 / top_k, device=device).requires_grad_(backward)
    per_rank = torch.bincount(slots_TK.reshape(-1).cpu() // 4, minlength=group.size())
    sent = per_rank.tolist()
    received = torch.empty_like(per_rank).to(device)
    dist.all_to_all_single(received, per_rank.to(device), group=group)
    arrives = received.tolist()
    out = torch.randn(tokens * top_k, hidden, device=device)
    there, back = torch.empty(sum(arrives), hidden, device=device), torch.empty_like(out)

    def dispatch() -> None:
        dispatched = dispatcher.dispatch(hidden_TD, weights_TK, dispatcher.plan(slots_TK))
        result = dispatcher.combine(dispatched.rows_MD, dispatched)
        if backward:
            result.sum().backward()

    def plain() -> None:
        for _ in range(1 + backward):
            dist.all_to_all_single(there, out, arrives, sent, group=group)
            dist.all_to_all_single(back, there, sent, arrives, group=group)

    ms, plain_ms = slowest_rank_ms([dispatch, plain], repeats, group, device)
    return {
        "pass": "forward + backward" if backward else "forward",
        "tokens": tokens,
        "mib": out.nbytes * 2 * (1 + backward) / 2**20,
        "ms": ms,
        "all_to_all_ms": plain_ms,
        "ratio": ms / plain_ms,
    }


def slowest_rank_ms(
    ways: list[Callable[[], object]], repeats: int, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Median over repeats of the slowest rank's milliseconds, for ways that take turns. Collective."""
    seconds = torch.zeros(repeats, len(ways), dtype=torch.float64)
    for repeat in range(-1, repeats):  # the first one warms up
        for index, work in enumerate(ways):
            dist.barrier(group=group)
            _synchronize(device)
            began = time.perf_counter()
            work()
            _synchronize(device)
            if repeat >= 0:
                seconds[repeat, index] = time.perf_counter() - began
    slowest = seconds.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=group)
    return [1e3 * value for value in slowest.cpu().median(dim=0).values.tolist()]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
