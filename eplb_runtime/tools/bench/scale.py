"""What a rebalance costs as ranks and experts grow, part by part, in one process and without a network.

Times are CPU time of one rank, one thread. What all ranks do together stands beside them as bytes and rounds, and as
seconds predicted from them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...load.counter import MAX_BUCKETS
from ...migration.difference import apply, difference
from ...migration.schedule import TransferSchedule, make_schedule
from ...moe.routing.lookup import SlotTable
from ...moe.routing.splitter import BatchSplitter, SplitSettings
from ...placement import Placement
from ...planner.evaluate import predicted_imbalance
from ...planner.planning import plan
from ...planner.policies.free import balance as balance_free
from ...topology import DEFAULT_INTER_NODE_BANDWIDTH, Topology
from .planner import draw_load

EXPERT_BYTES = 528_482_304
"""DeepSeek-V3's expert, 44.0 M parameters, with float32 master weights and Adam's two moments."""
STAGING_BYTES = 256 << 20
"""`BalancerConfig`'s default: less than one such expert, so that a rank receives one a round."""
LAYERS = 58
SPREAD = (0.54, 0.91)
"""Of the loads, as `bench planner` draws DeepSeek-V3's."""
SIZES = tuple(
    (experts // homes, experts) for homes in (1, 4, 8, 32) for experts in (64, 256, 1024) if experts >= 8 * homes
)
"""(ranks, experts), at 1, 4, 8 and 32 experts a rank."""
STEP_OF_VOTE_SECONDS = 50e-6
"""Between two ranks' CPUs, one way; a vote takes ``log2 R`` of them."""


@dataclass(frozen=True)
class _Question:
    """One row: a job, and two placements with all homes planned anew."""

    ranks: int
    experts: int
    load_TLE: NDArray[np.int64]
    current: Placement
    target: Placement
    topology: Topology


def run(
    repeats: int = 3,
    sizes: Sequence[tuple[int, int]] = SIZES,
    layers: int = LAYERS,
    replica_slots: int = 0,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure every size; the least of ``repeats`` counts.

    Args:
        sizes: (ranks, experts); rows of equally many experts a rank should follow one another, growing.
        replica_slots: of a rank; with some, the splitter's tables are among the maps.
        on_progress: called with what is measured next.

    Returns:
        JSON-able, ``{"scale": rows}``. A row has ``ranks``, ``experts``, ``experts_per_rank``, ``layers`` and

        * ``aggregate_ms``: of a measurement of 32 buckets, a sum with another rank's and the imbalance of each bucket;
        * ``plan_ms``: of the ``incremental`` policy, on rank 0;
        * ``broadcast_kb`` and ``message_ms``: a plan that moves everything, written and read;
        * ``schedule_ms``: its rounds, on every rank;
        * ``maps_ms``: all placements and device tables on the way, over all rounds;
        * ``rounds``, and ``slowest_over_bound``: the bytes that the busiest rank of each round receives, summed, over
          what the rank receives that receives most in all;
        * ``pause_seconds``, predicted: these bytes at 50 GB/s, one NIC a rank, votes, schedule and maps;
        * ``growth``: for each of these that grows with size, how many times the value of the row before, over how
          many times R x L; None in the first row of so many experts a rank.
    """
    rows: list[dict[str, Any]] = []
    for ranks, experts in sizes:
        on_progress(f"{ranks} ranks, {experts} experts")
        question = _question(ranks, experts, layers, replica_slots)
        row = _row(question, repeats)
        rows.append(row | {"growth": _growth(rows[-1] if rows else None, row)})
    return {"scale": rows}


def _question(ranks: int, experts: int, layers: int, replica_slots: int) -> _Question:
    """Two windows of independent loads; each placement is packed from scratch for its own, so nearly all homes move."""
    generator = np.random.default_rng(0)
    before, after = (draw_load(generator, layers, experts, *SPREAD) for _ in range(2))
    topology = Topology(ranks, ranks_per_node=1)
    current, target = (_packed(load, ranks, replica_slots) for load in (before, after))
    buckets = np.random.default_rng(3).poisson(after / MAX_BUCKETS, (MAX_BUCKETS, layers, experts))
    return _Question(ranks, experts, buckets.astype(np.int64), current, target.with_epoch(1), topology)


def _packed(load_LE: NDArray[np.float64], ranks: int, replica_slots: int) -> Placement:
    """Homes by the ``free`` policy's packing, and copies of each layer's hottest experts on the ranks after theirs."""
    layers, experts = load_LE.shape
    homes = experts // ranks
    map_LRS = np.full((layers, ranks, homes + replica_slots), -1, dtype=np.int32)
    map_LRS[:, :, :homes] = balance_free(load_LE, ranks, homes).reshape(layers, ranks, homes)
    hottest_LR = np.argsort(-load_LE, axis=1, kind="stable")[:, :ranks]
    for replica in range(replica_slots):
        copied_LR = np.roll(hottest_LR, replica, axis=1).astype(np.int32)
        is_here_LR = (map_LRS == copied_LR[:, :, None]).any(axis=2)
        map_LRS[:, :, homes + replica] = np.where(is_here_LR, -1, copied_LR)
    home_LE = np.empty((layers, experts), dtype=np.int32)
    slots = (np.arange(ranks)[:, None] * (homes + replica_slots) + np.arange(homes)).reshape(1, -1)
    np.put_along_axis(home_LE, map_LRS[:, :, :homes].reshape(layers, -1).astype(np.int64), slots, axis=1)
    return Placement(map_LRS.reshape(layers, -1), experts, ranks, home_LE)


def _row(question: _Question, repeats: int) -> dict[str, Any]:
    current, target = question.current, question.target
    nbytes = [EXPERT_BYTES] * current.num_layers
    aggregate_seconds, _ = _least(repeats, lambda: _aggregate(question))
    plan_seconds, _ = _least(1, lambda: _plan(question))
    message_seconds, message = _least(repeats, lambda: _message(current, target))
    schedule_seconds, schedule = _least(repeats, lambda: _schedule(current, target, nbytes))
    table, splitter = _followers(current)
    maps_seconds, _ = _least(repeats, lambda: _maps(schedule, table, splitter))
    taken, bound = schedule.bytes_of_busiest()
    votes = schedule.num_rounds * int(np.ceil(np.log2(question.ranks))) * STEP_OF_VOTE_SECONDS
    return {
        "ranks": question.ranks,
        "experts": question.experts,
        "experts_per_rank": question.experts // question.ranks,
        "layers": current.num_layers,
        "aggregate_ms": aggregate_seconds * 1e3,
        "plan_ms": plan_seconds * 1e3,
        "broadcast_kb": len(message) / 1e3,
        "message_ms": message_seconds * 1e3,
        "schedule_ms": schedule_seconds * 1e3,
        "maps_ms": maps_seconds * 1e3,
        "rounds": schedule.num_rounds,
        "slowest_over_bound": taken / bound,
        "pause_seconds": taken / DEFAULT_INTER_NODE_BANDWIDTH + votes + schedule_seconds + maps_seconds,
    }


GROWING = ("aggregate_ms", "plan_ms", "broadcast_kb", "message_ms", "schedule_ms", "maps_ms", "rounds", "pause_seconds")


def _growth(before: dict[str, Any] | None, row: dict[str, Any]) -> dict[str, float] | None:
    if before is None or before["experts_per_rank"] != row["experts_per_rank"]:
        return None
    size = row["ranks"] * row["layers"] / (before["ranks"] * before["layers"])
    return {name: row[name] / before[name] / size for name in GROWING}


def _aggregate(question: _Question) -> NDArray[np.float64]:
    total = question.load_TLE + question.load_TLE
    return np.stack([predicted_imbalance(bucket.astype(np.float64), question.current) for bucket in total])


def _plan(question: _Question) -> Placement:
    return plan(
        question.load_TLE,
        question.topology,
        slots_per_rank=question.current.slots_per_rank,
        current=question.current,
    ).placement


def _message(current: Placement, target: Placement) -> bytes:
    message = json.dumps({"digest": target.digest(), "placement": difference(current, target)}).encode()
    read = json.loads(message)
    if apply(current, read["placement"]).digest() != read["digest"]:
        raise RuntimeError("a plan did not arrive as it was sent")
    return message


def _schedule(current: Placement, target: Placement, nbytes: Sequence[int]) -> TransferSchedule:
    schedule = make_schedule(current, target, nbytes, STAGING_BYTES)
    schedule.digest()
    return schedule


def _followers(placement: Placement) -> tuple[SlotTable, BatchSplitter | None]:
    """What a rank keeps of a placement."""
    device = torch.device("cpu")
    splitter = None
    if placement.replica_slots:
        splitter = BatchSplitter(placement, device, 0, SplitSettings(ranks_per_node=1))
    return SlotTable(placement, device), splitter


def _maps(schedule: TransferSchedule, table: SlotTable, splitter: BatchSplitter | None) -> Placement:
    """Everything that follows the placement after each round, on one rank."""
    standing = schedule.current
    for round_ in schedule.rounds:
        standing = schedule.after(standing, round_)
        table.prepare(standing, round_.layers)()
        if splitter is not None:
            splitter.prepare(standing, round_.layers)()
    return standing


def _least(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of the quickest run of ``work``, after one that compiles; and what it gave."""
    result = work()
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        result = work()
        seconds.append(time.process_time() - began)
    return min(seconds), result
