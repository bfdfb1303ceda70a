"""The tables of DeepEP's announcement for what is there: every dispatcher that these ranks can have, forward only.

Eight experts a token, of all or of four of eight groups, as DeepSeek-V3 routes; load even, skewed, and skewed with
homes moved by the planner; and small batches, as in decoding. Bandwidth is counted as DeepEP's own test counts it, the
same for all: a row in bfloat16 for each token that visits the busiest rank, over the time of the slowest.
"""

from collections.abc import Callable
from dataclasses import replace
from math import lcm
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from eplb_runtime.config import BalancerConfig, ConfigError, DispatchConfig
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatched, Dispatcher
from eplb_runtime.moe.dispatch.choosing import OVER_TORCH, choose_together, make_dispatcher
from eplb_runtime.moe.kernel_selection import kernels_for
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.tools.bench import timed
from eplb_runtime.tools.launch import launcher_environment
from eplb_runtime.topology import Topology

from .harness import command

TOP_K, GROUPS, TOP_GROUPS = 8, 8, 4
SECONDS_TO_AGREE = 120.0
LEAST_EXPERTS = 64
FEW_TOKENS = 128
"""A small batch, for which DeepEP has kernels of their own."""
OF_THEIR_OWN_KERNELS = (2048, 2560, 4096, 5120, 6144, 7168, 8192)
"""Hidden sizes that DeepEP has low-latency kernels for; float8 is shown for the same."""
SKEW = 1.0
"""Standard deviation of the logarithm of how much experts are liked."""


def run(
    device: torch.device, repeats: int = 20, tokens: int = 256, hidden: int = 512, ranks_per_node: int = 0
) -> dict[str, Any]:
    """Collective over all ranks, of which each has so many tokens of a ``hidden`` size, in bfloat16.
    ``ranks_per_node``: 0: those of the launcher.

    JSON-able: ``"ways"`` rows with ``dispatch``, ``order``, ``tokens``, ``routing``, ``load``, ``imbalance`` (of
    choices over ranks), ``dispatch_ms``, ``dispatch_gbps``, ``combine_ms``, ``combine_gbps`` (10^9 bytes a second of
    the busiest rank); and ``"left_out"``: dispatchers that these ranks cannot have, and why."""
    group = dist.group.WORLD
    assert group is not None
    ranks = group.size()
    topology = Topology.from_launcher(launcher_environment(), ranks)
    if ranks_per_node:
        topology = Topology(ranks, ranks_per_node)
    slots = lcm(ranks, GROUPS) * -(-LEAST_EXPERTS // lcm(ranks, GROUPS)) // ranks
    ways, left_out = _ways(group, device, topology, slots, hidden)
    few = {way: made for way, made in ways.items() if "low latency" in way[0] or "float8" not in way[0]}
    many = {way: made for way, made in ways.items() if "low latency" not in way[0]}
    rows = []
    for routing in ("free", f"{TOP_GROUPS} of {GROUPS} groups"):
        for load in ("even", "skewed", "skewed, balanced"):
            ids_TK = _choices(tokens, ranks * slots, routing != "free", 0.0 if load == "even" else SKEW).to(device)
            home_E = _homes(ids_TK, topology, slots, load == "skewed, balanced").to(device)
            rows += _rows(many, (repeats, group), home_E[ids_TK], slots, hidden, {"routing": routing, "load": load})
    slots_TK = _choices(FEW_TOKENS, ranks * slots, False, 0.0).to(device)
    rows += _rows(few, (repeats, group), slots_TK, slots, hidden, {"routing": "free", "load": "even"})
    return {"experts": ranks * slots, "ranks_per_node": topology.ranks_per_node, "ways": rows, "left_out": left_out}


def _ways(
    group: dist.ProcessGroup, device: torch.device, topology: Topology, slots: int, hidden: int
) -> tuple[dict[tuple[str, str], Dispatcher], list[dict[str, str]]]:
    made: dict[tuple[str, str], Dispatcher] = {}
    left_out = []
    plain = DispatchContext.of(group, slots)
    ours = device.type == "cuda"
    if not ours:
        left_out.append({"dispatch": f"{' and '.join(OVER_TORCH)}, kernels", "why": "our kernels are for GPUs"})
    for name in ("all_to_all", "hierarchical", "deepep"):
        asked = BalancerConfig(dispatch=name)
        if problem := choose_together(asked, group, topology, slots, device, SECONDS_TO_AGREE).problem:
            left_out += [{"dispatch": title, "why": problem} for title in dict.fromkeys(v[0] for v in _variants(name))]
            continue
        for title, order, more in _variants(name):
            if "kernels" in more and not ours:
                continue
            if more and name == "deepep" and hidden not in OF_THEIR_OWN_KERNELS:
                left_out.append({"dispatch": title, "why": f"not for rows of {hidden}: --hidden 7168"})
                continue
            try:
                config = BalancerConfig(dispatch=DispatchConfig(name, combine_order=order, **more))
                context = replace(plain, kernels=kernels_for(device)) if config.dispatch.kernels else plain
                made[title, order] = make_dispatcher(config, name, topology, context)
            except ConfigError as error:
                left_out.append({"dispatch": title, "why": str(error)})
    return made, left_out


def _variants(name: str) -> list[tuple[str, Literal["logical", "by_rank"], dict[str, Any]]]:
    """Title, order and further settings of each way that a dispatcher has."""
    orders: tuple[Literal["logical", "by_rank"], ...] = ("logical",) if name == "all_to_all" else ("logical", "by_rank")
    variants: list[tuple[str, Literal["logical", "by_rank"], dict[str, Any]]] = [(name, order, {}) for order in orders]
    if name in OVER_TORCH:
        variants += [(f"{name}, kernels", order, {"kernels": True}) for order in orders]
    if name == "deepep":
        variants += [(f"{name}, float8", order, {"dtype": "float8"}) for order in ("logical", "by_rank")]
        variants += [(f"{name}, low latency", "by_rank", {"low_latency_tokens": FEW_TOKENS})]
    return variants


def _rows(
    ways: dict[tuple[str, str], Dispatcher],
    timing: tuple[int, dist.ProcessGroup],
    slots_TK: Tensor,
    slots: int,
    hidden: int,
    named: dict[str, str],
) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(slots_TK.shape[0], hidden, generator=generator).to(slots_TK.device, torch.bfloat16)
    weights_TK = torch.full(slots_TK.shape, 1 / TOP_K, device=slots_TK.device)
    of_rank_TK = slots_TK // slots
    choices_R = torch.bincount(of_rank_TK.reshape(-1).cpu(), minlength=dist.get_world_size())
    visits_TR = torch.zeros(slots_TK.shape[0], len(choices_R)).scatter_(1, of_rank_TK.cpu(), 1.0)
    both = torch.stack([choices_R.double(), visits_TR.sum(dim=0).double()]).to(slots_TK.device)
    dist.all_reduce(both)
    busiest_bytes = both[1].max().item() * hidden_TD[0].nbytes
    carriers, arrived = dict[tuple[str, str], Dispatcher](), dict[tuple[str, str], Dispatched]()

    def there(way: tuple[str, str]) -> None:
        carriers[way] = carrier = ways[way].carrier(hidden_TD, weights_TK)
        arrived[way] = carrier.dispatch(hidden_TD, weights_TK, carrier.plan(slots_TK))

    def back(way: tuple[str, str]) -> None:
        carriers[way].combine(arrived[way].rows_MD, arrived[way])

    calls: list[Callable[[], object]] = []
    for way in ways:
        calls += [lambda way=way: there(way), lambda way=way: back(way)]  # type: ignore[misc]
    with torch.no_grad():
        ms = (1e3 * timed(calls, timing[0], slots_TK.device, timing[1]).median(dim=0).values).tolist()
    return [
        {
            "dispatch": name,
            "order": order,
            "tokens": slots_TK.shape[0],
            **named,
            "imbalance": (both[0].max() / both[0].mean()).item(),
            "dispatch_ms": dispatch_ms,
            "dispatch_gbps": busiest_bytes / dispatch_ms / 1e6,
            "combine_ms": combine_ms,
            "combine_gbps": busiest_bytes / combine_ms / 1e6,
        }
        for (name, order), dispatch_ms, combine_ms in zip(ways, ms[::2], ms[1::2], strict=True)
    ]


def _choices(tokens: int, experts: int, group_limited: bool, skew: float) -> Tensor:
    """int64 ``[T, K]`` logical ids, other ones on each rank; which experts are liked is the same everywhere."""
    liked_E = torch.randn(experts, generator=torch.Generator().manual_seed(1)) * skew
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    score_TE = liked_E - torch.rand(tokens, experts, generator=generator).log().neg().log()
    if group_limited:
        # A group is as good as its two best experts.
        of_group_TG = score_TE.view(tokens, GROUPS, -1).topk(2, dim=2).values.sum(dim=2)
        taken_TG = torch.zeros(tokens, GROUPS).scatter_(1, of_group_TG.topk(TOP_GROUPS, dim=1).indices, 1.0)
        score_TE = score_TE.masked_fill(taken_TG.repeat_interleave(experts // GROUPS, dim=1) == 0, -torch.inf)
    return score_TE.topk(TOP_K, dim=1).indices


def _homes(ids_TK: Tensor, topology: Topology, slots: int, balanced: bool) -> Tensor:
    """int64 ``[E]``: the slot of each expert, in logical order or as planned for this very load."""
    experts = topology.num_ranks * slots
    load_E = torch.bincount(ids_TK.reshape(-1).cpu(), minlength=experts).to(ids_TK.device)
    dist.all_reduce(load_E)
    placement = Placement.initial(1, experts, topology.num_ranks)
    if balanced:
        load_LE = load_E.cpu().numpy()[None]
        placement = plan(load_LE, topology, slots_per_rank=slots, current=placement, gate="off").placement
    return torch.from_numpy(placement.require_homes()[0].astype(np.int64))


if __name__ == "__main__":
    command(run, ranks=2)
