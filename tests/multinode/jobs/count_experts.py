"""Move experts and refresh copies between hosts, and count what goes through each host's cable meanwhile.

The command line names a folder; each rank writes ``<folder>/counted.<rank>.json``: the topology that it attached with
and, for each case, the bytes that left through this host's cable, the seconds that it took, and the bytes that would
have to leave at least.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from numpy.typing import NDArray

import eplb_runtime as eplb
from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.planner.cost import CostModel

EXPERTS, LAYERS, WIDTH = 8, 2, 256
WEIGHT_BYTES = 3 * WIDTH * WIDTH * 4
RECORD_BYTES = 3 * WEIGHT_BYTES
"""Of an expert with Adam's two moments, float32."""


def sent_through_cable() -> int:
    """Bytes that have left this host by ``eth0``, with their headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "eth0":
            return int(counters.split()[8])
    raise OSError("this host has no eth0")


def counted(work: Callable[[], object], least: int) -> dict[str, float]:
    """What leaves this host while all ranks do something."""
    dist.barrier()
    before, began = sent_through_cable(), time.perf_counter()
    work()
    dist.barrier()
    return {"sent": sent_through_cable() - before, "seconds": time.perf_counter() - began, "least": least}


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


def migrate(balancer: eplb.Balancer, target: Placement) -> dict[str, float]:
    """Bytes of a migration; at least one record has to leave for every expert whose node changes."""
    node_size = balancer.topology.ranks_per_node
    here = dist.get_rank() // node_size
    from_LE, to_LE = (placement.home_rank // node_size for placement in (balancer.placement, target))
    leaving = int(((from_LE == here) & (to_LE != here)).sum())
    said = counted(lambda: balancer.rebalancer._migrate(target), leaving * RECORD_BYTES)
    assert balancer.placement.digest() == target.digest()
    return {**said, "moved": int((from_LE != to_LE).sum())}


def planned(balancer: eplb.Balancer) -> Placement:
    """What the planner makes of a load that each node can level by itself, and two nodes could level together."""
    ranks = dist.get_world_size()
    load_LE = np.where(balancer.placement.home_rank % 2 == 0, 900.0, 100.0)
    cost = CostModel(home_bytes=RECORD_BYTES, replica_bytes=WEIGHT_BYTES)
    made = eplb.plan(load_LE, balancer.topology, slots_per_rank=EXPERTS // ranks, current=balancer.placement, cost=cost)
    assert made.moved_homes > 0
    return made.placement


def refresh(balancer: eplb.Balancer) -> dict[str, float]:
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
    said = counted(work, crossings * LAYERS * WEIGHT_BYTES)
    for bank in replicas._banks.values():
        for parameter, rows in zip(bank.parameters, bank.replicas, strict=True):
            home = parameter[0].detach().clone()
            dist.broadcast(home, src=0)
            assert dist.get_rank() < ranks - 2 or torch.equal(rows[0], home)
    return said


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
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
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
