"""Dispatch and combine once each way, and write to ``<folder>/bytes.json`` what has left the hosts meanwhile."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatched, Dispatcher
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical

RANKS_PER_HOST, SLOTS, TOKENS, WIDTH, TOP_K = 4, 8, 256, 1024, 8
GROUPS, TOP_GROUPS = 8, 4


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    ways = {
        "all_to_all": AllToAll(DispatchContext.of(group, SLOTS)),
        "logical": Hierarchical(DispatchContext.of(group, SLOTS), RANKS_PER_HOST),
        "by_rank": Hierarchical(DispatchContext.of(group, SLOTS), RANKS_PER_HOST, "by_rank"),
    }
    found: dict[str, dict] = {}
    for routing in ("group-limited", "free"):
        hidden, slots, weights = batch(rank, num_ranks, routing == "group-limited")
        of_routing = found[routing] = {"rows": rows_that_cross(slots, rank)}
        results = {}
        with torch.no_grad():
            for name, way in ways.items():
                arrived, there = crossed(there_by, way, hidden, slots, weights)
                results[name], back = crossed(way.combine, arrived.rows_MD, arrived)
                of_routing[name] = {"there": there, "back": back}
        assert torch.equal(results["logical"], results["all_to_all"])
        torch.testing.assert_close(results["by_rank"], results["all_to_all"])
    if rank == 0:
        (folder / "bytes.json").write_text(json.dumps({"row_bytes": hidden[0].nbytes, **found}))
    dist.barrier()


def batch(rank: int, num_ranks: int, group_limited: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Eight experts a token: of all, or of four of the eight groups that experts stand in, one after another."""
    generator = torch.Generator().manual_seed(rank)
    experts = num_ranks * SLOTS
    score = torch.rand(TOKENS, experts, generator=generator)
    if group_limited:
        taken = torch.rand(TOKENS, GROUPS, generator=generator).topk(TOP_GROUPS).indices
        of_group = torch.zeros(TOKENS, GROUPS).scatter_(1, taken, 1.0)
        score += of_group.repeat_interleave(experts // GROUPS, dim=1)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    return hidden, score.topk(TOP_K).indices, torch.rand(TOKENS, TOP_K, generator=generator)


def rows_that_cross(slots_TK: torch.Tensor, rank: int) -> dict[str, int]:
    """Of all ranks: choices on other hosts, ranks there that a token visits, hosts there."""
    of_rank_TK = slots_TK // SLOTS
    others = [other for other in range(dist.get_world_size()) if other // RANKS_PER_HOST != rank // RANKS_PER_HOST]
    ranks_TR = torch.stack([(of_rank_TK == other).any(dim=1) for other in others], dim=1)
    hosts_TN = ranks_TR.view(len(slots_TK), -1, RANKS_PER_HOST).any(dim=2)
    choices = (of_rank_TK // RANKS_PER_HOST != rank // RANKS_PER_HOST).sum()
    numbers = torch.stack([choices, ranks_TR.sum(), hosts_TN.sum()])
    dist.all_reduce(numbers)
    return dict(zip(("choices", "ranks", "hosts"), numbers.tolist(), strict=True))


def there_by(way: Dispatcher, hidden: Tensor, slots: Tensor, weights: Tensor) -> Dispatched:
    return way.dispatch(hidden, weights, way.plan(slots))


def crossed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What ``work`` gives, and the bytes that have left all hosts meanwhile, the protocols' own among them."""
    dist.barrier()
    before = left_this_host()
    dist.barrier()
    result = work(*arguments)
    dist.barrier()
    left = torch.tensor(left_this_host() - before if dist.get_rank() % RANKS_PER_HOST == 0 else 0)
    dist.all_reduce(left)
    return result, int(left)


def left_this_host() -> int:
    found = re.search(r"eth0:((?:\s+\d+)+)", Path("/proc/self/net/dev").read_text())
    assert found is not None
    return int(found[1].split()[8])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
