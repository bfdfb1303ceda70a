"""Count what goes through each host's cable while experts move and copies are refreshed, or while tokens travel.

The command line names a folder and ``experts`` or ``tokens``. Of experts each rank writes
``<folder>/counted.<rank>.json``: the topology that it attached with and, for each case, the bytes that left through
this host's cable and those that would have to leave at least. Of tokens the first rank writes ``<folder>/bytes.json``:
what has left all hosts on the way there and back.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from support.moe_models import batch_of, make_model
from torch import Tensor

import eplb_runtime as eplb
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatched, Dispatcher
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner.cost import CostModel

EXPERTS, LAYERS, WIDTH = 8, 2, 256
WEIGHT_BYTES = 3 * WIDTH * WIDTH * 4
RECORD_BYTES = 3 * WEIGHT_BYTES
"""Of an expert with Adam's two moments, float32."""
RANKS_PER_HOST, SLOTS, TOKENS, HIDDEN, TOP_K = 4, 8, 256, 1024, 8
GROUPS, TOP_GROUPS = 8, 4


def sent_through_cable() -> int:
    """Bytes that have left this host by ``eth0``, with their headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise OSError("this host has no eth0")


def counted(work: Callable[..., Any], *arguments: Any) -> tuple[Any, int]:
    """What ``work`` gives, and the bytes that leave this host while all ranks do it, the protocols' own among them."""
    dist.barrier()
    before = sent_through_cable()
    dist.barrier()
    result = work(*arguments)
    dist.barrier()
    return result, sent_through_cable() - before


# -- experts


def attach(replica_slots: int) -> eplb.Balancer:
    """A job that has taken one step, so that its optimizer has state."""
    model = make_model("olmoe", experts=EXPERTS, layers=LAYERS, width=WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = eplb.BalancerConfig(
        policy="static",
        dense_gradients="allreduce",
        replica_slots=replica_slots,
        migration=eplb.MigrationConfig(transport="auto"),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    ids = batch_of(dist.get_rank(), 0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return balancer


def moved(balancer: eplb.Balancer, rank_LE: NDArray[np.int64]) -> Placement:
    """The placement with homes on these ranks, in logical order on each."""
    order_LP = rank_LE.argsort(axis=1, kind="stable")
    return Placement(order_LP, EXPERTS, dist.get_world_size(), order_LP.argsort(axis=1), balancer.placement.epoch + 1)


def migrate(balancer: eplb.Balancer, target: Placement) -> dict[str, int]:
    """Bytes of a migration; at least one record has to leave for every expert whose node changes."""
    node_size = balancer.topology.ranks_per_node
    here = dist.get_rank() // node_size
    from_LE, to_LE = (placement.home_rank // node_size for placement in (balancer.placement, target))
    leaving = int(((from_LE == here) & (to_LE != here)).sum())
    _, sent = counted(balancer.rebalancer._migrate, target)
    assert balancer.placement.digest() == target.digest()
    return {"sent": sent, "least": leaving * RECORD_BYTES}


def planned(balancer: eplb.Balancer) -> Placement:
    """What the planner makes of a load that each node can level by itself, and two nodes could level together."""
    ranks = dist.get_world_size()
    load_LE = np.where(balancer.placement.home_rank % 2 == 0, 900.0, 100.0)
    cost = CostModel(home_bytes=RECORD_BYTES, replica_bytes=WEIGHT_BYTES)
    made = eplb.plan(load_LE, balancer.topology, slots_per_rank=EXPERTS // ranks, current=balancer.placement, cost=cost)
    assert made.moved_homes > 0
    return made.placement


def refresh(balancer: eplb.Balancer) -> dict[str, int]:
    """Bytes of a refresh of every layer's expert 0, whose home is on the first rank, with copies on all ranks of the
    last two that have one; at least its weights have to reach each other node that has any."""
    ranks, node_size = dist.get_world_size(), balancer.topology.ranks_per_node
    standing = balancer.placement
    map_LRS = standing.physical_to_logical.copy().reshape(LAYERS, ranks, standing.slots_per_rank)
    map_LRS[:, :, standing.homes_per_rank :] = EMPTY
    map_LRS[:, ranks - 2 :, standing.homes_per_rank] = 0
    home = standing.require_homes()
    target = Placement(map_LRS.reshape(LAYERS, -1), EXPERTS, ranks, home, standing.epoch + 1)
    balancer.rebalancer._migrate(target)
    replicas = balancer.runtime.maps.replicas
    assert replicas is not None
    nodes = {rank // node_size for rank in range(ranks - 2, ranks)} - {0}
    replicas.wait_all()

    def work() -> None:
        replicas.refresh()
        replicas.wait_all()

    crossings = len(nodes) if dist.get_rank() // node_size == 0 else 0
    _, sent = counted(work)
    for bank in replicas._banks.values():
        for parameter, rows in zip(bank.parameters, bank.replicas, strict=True):
            home = parameter[0].detach().clone()
            dist.broadcast(home, src=0)
            assert dist.get_rank() < ranks - 2 or torch.equal(rows[0], home)
    return {"sent": sent, "least": crossings * LAYERS * WEIGHT_BYTES}


def count_experts(folder: Path) -> None:
    balancer = attach(0)
    ranks, node_size = dist.get_world_size(), balancer.topology.ranks_per_node
    rank_LE, cases = balancer.placement.home_rank.astype(np.int64), {}
    result: dict[str, Any] = {"topology": asdict(balancer.topology), "cases": cases}
    first_of_node = rank_LE - rank_LE % node_size
    cases["within"] = migrate(balancer, moved(balancer, first_of_node + (rank_LE + 1) % node_size))
    cases["across"] = migrate(balancer, moved(balancer, (rank_LE + node_size) % ranks))
    cases["planned"] = migrate(balancer, planned(balancer))
    balancer.close()
    balancer = attach(1)
    cases["copies"] = refresh(balancer)
    balancer.close()
    (folder / f"counted.{dist.get_rank()}.json").write_text(json.dumps(result))


# -- tokens


def count_tokens(folder: Path) -> None:
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


def batch(rank: int, num_ranks: int, group_limited: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Eight experts a token: of all, or of four of the eight groups that experts stand in, one after another."""
    generator = torch.Generator().manual_seed(rank)
    experts = num_ranks * SLOTS
    score = torch.rand(TOKENS, experts, generator=generator)
    if group_limited:
        taken = torch.rand(TOKENS, GROUPS, generator=generator).topk(TOP_GROUPS).indices
        of_group = torch.zeros(TOKENS, GROUPS).scatter_(1, taken, 1.0)
        score += of_group.repeat_interleave(experts // GROUPS, dim=1)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    return hidden, score.topk(TOP_K).indices, torch.rand(TOKENS, TOP_K, generator=generator)


def rows_that_cross(slots_TK: Tensor, rank: int) -> dict[str, int]:
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
    """What ``work`` gives, and the bytes that have left all hosts meanwhile."""
    result, sent = counted(work, *arguments)
    left = torch.tensor(sent if dist.get_rank() % RANKS_PER_HOST == 0 else 0)
    dist.all_reduce(left)
    return result, int(left)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    {"experts": count_experts, "tokens": count_tokens}[sys.argv[2]](Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()
