"""The cost of a rebalance as ranks and experts grow, part by part, in one process and without a network.

Times are CPU time of one rank, one thread. What all ranks do together is given as bytes and rounds, and as seconds
predicted from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from eplb_runtime.load.counter import MAX_BUCKETS
from eplb_runtime.migration.schedule import TransferSchedule, make_schedule
from eplb_runtime.moe.routing.lookup import SlotTable
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings
from eplb_runtime.placement import Placement
from eplb_runtime.planner.api import plan
from eplb_runtime.topology import DEFAULT_INTER_NODE_BANDWIDTH, Topology

from .harness import command
from .planner.loads import draw_load

EXPERT_BYTES = 528_482_304
"""DeepSeek-V3's expert, 44.0 M parameters, with float32 master weights and Adam's two moments."""
STAGING_BYTES = 256 << 20
"""`BalancerConfig`'s default: less than one such expert, so that a rank receives one a round."""
LAYERS = 58
SIZES = tuple(
    (experts // homes, experts) for homes in (1, 4, 8, 32) for experts in (64, 256, 1024) if experts >= 8 * homes
)
"""(ranks, experts), at 1, 4, 8 and 32 experts a rank."""
STEP_OF_VOTE_SECONDS = 50e-6
"""Between two ranks' CPUs, one way; a vote takes ``log2 R`` of them."""


def run(
    repeats: int = 3,
    replica_slots: int = 0,
    layers: int = LAYERS,
    sizes: Sequence[tuple[int, int]] = SIZES,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure every size; the least of ``repeats`` counts.

    Args:
        replica_slots: of a rank; with some, the splitter's tables are among the maps.
        sizes: (ranks, experts).

    Returns:
        JSON-able, ``{"scale": rows}``. A row has ``ranks``, ``experts``, ``layers``, ``plan_ms`` (of the default policy
        from logical order, on rank 0), ``broadcast_kb`` and ``message_ms`` (a plan that moves everything, written and
        read), ``schedule_ms`` (its rounds, on every rank), ``maps_ms`` (all placements and device tables on the way),
        ``rounds``, ``slowest_over_bound`` (the bytes that the busiest rank of each round receives, summed, over what
        the rank receives that receives most in all) and ``pause_seconds`` (predicted: these bytes at 50 GB/s, one NIC
        a rank, votes, schedule and maps).
    """
    rows = []
    for ranks, experts in sizes:
        on_progress(f"{ranks} ranks, {experts} experts")
        rows.append(_row(ranks, experts, layers, replica_slots, repeats))
    return {"scale": rows}


def _row(ranks: int, experts: int, layers: int, replica_slots: int, repeats: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    load_LE = draw_load(generator, layers, experts, 0.54, 0.91)
    load_TLE = generator.poisson(load_LE / MAX_BUCKETS, (MAX_BUCKETS, layers, experts))
    current = Placement.initial(layers, experts, ranks, replica_slots)
    sizes = {"topology": Topology(ranks, ranks_per_node=1), "slots_per_rank": current.slots_per_rank}
    plan_seconds, _ = _least(1, lambda: plan(load_TLE, **sizes, current=current))
    target = everywhere_else(current, generator)
    message_seconds, message = _least(repeats, lambda: _message(target))
    schedule_seconds, schedule = _least(
        repeats, lambda: make_schedule(current, target, [EXPERT_BYTES] * layers, STAGING_BYTES)
    )
    maps_seconds, _ = _least(repeats, lambda: _maps(schedule, current))
    taken, bound = int(schedule.load.max(axis=1).sum()), int(schedule.load.sum(axis=0).max())
    votes = schedule.num_rounds * int(np.ceil(np.log2(ranks))) * STEP_OF_VOTE_SECONDS
    return {
        "ranks": ranks,
        "experts": experts,
        "layers": layers,
        "plan_ms": plan_seconds * 1e3,
        "broadcast_kb": len(message) / 1e3,
        "message_ms": message_seconds * 1e3,
        "schedule_ms": schedule_seconds * 1e3,
        "maps_ms": maps_seconds * 1e3,
        "rounds": schedule.num_rounds,
        "slowest_over_bound": taken / bound,
        "pause_seconds": taken / DEFAULT_INTER_NODE_BANDWIDTH + votes + schedule_seconds + maps_seconds,
    }


def everywhere_else(current: Placement, generator: np.random.Generator) -> Placement:
    """Homes in a random order, the same number on each rank; replica slots hold the experts of the next ranks."""
    shape = (current.num_layers, current.num_ranks, current.slots_per_rank)
    homes = current.num_experts // current.num_ranks
    order_LE = generator.permuted(np.tile(np.arange(current.num_experts), (current.num_layers, 1)), axis=1)
    slots = np.empty(shape, dtype=np.int32)
    slots[:, :, :homes] = order_LE.reshape(current.num_layers, current.num_ranks, homes)
    for replica in range(current.slots_per_rank - homes):
        slots[:, :, homes + replica] = np.roll(slots[:, :, 0], -1 - replica, axis=1)
    home = np.empty((current.num_layers, current.num_experts), dtype=np.int32)
    first_R = np.arange(current.num_ranks)[:, None] * current.slots_per_rank
    np.put_along_axis(home, order_LE, (first_R + np.arange(homes)).reshape(1, -1).astype(np.int32), axis=1)
    return Placement(slots.reshape(current.num_layers, -1), current.num_experts, current.num_ranks, home, 1)


def _message(target: Placement) -> bytes:
    message = json.dumps({"placement": target.to_json()}).encode()
    if Placement.from_json(json.loads(message)["placement"]) != target:
        raise RuntimeError("a plan did not arrive as it was sent")
    return message


def _maps(schedule: TransferSchedule, current: Placement) -> None:
    """Everything that follows the placement after each round, on one rank."""
    device = torch.device("cpu")
    followers: list[Any] = [SlotTable(current, device)]
    if current.replica_slots:
        followers.append(BatchSplitter(current, device, 0, SplitSettings(ranks_per_node=1)))
    placement = schedule.current
    for round_ in schedule.rounds:
        placement = schedule.after(placement, round_)
        for follower in followers:
            follower.prepare(placement, round_.layers)()


def _least(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the quickest run of ``work``, after one that compiles; and its result."""
    result = work()
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return min(seconds), result


if __name__ == "__main__":
    command(run)
