"""A job's events, made up: a small job rebalances, stays, loses its ranks and finds them again."""

from collections.abc import Iterator

import numpy as np

from eplb_runtime import BalancerConfig, Topology
from eplb_runtime.events import (
    BalancingPaused,
    BalancingResumed,
    Event,
    GuardFinding,
    LoadMeasured,
    RebalanceAborted,
    RebalanceCommitted,
    RebalancePlanned,
)
from eplb_runtime.observe.events_file import Record, job_record, record_of
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.evaluate import predicted_imbalance

LAYERS, EXPERTS, RANKS, INTERVAL = 3, 16, 4, 5
TOPOLOGY = Topology(RANKS, 2)
CONFIG = BalancerConfig(interval=INTERVAL, replica_slots=1)
STEP_SECONDS = 0.25
EXPERT_BYTES = 1000
PHASES = {"prepare": 0.001, "post": 0.002, "transfer": 0.01, "verify": 0.003, "vote": 0.004, "commit": 0.005}


def start() -> Placement:
    return Placement.initial(LAYERS, EXPERTS, RANKS, replica_slots=1)


def job(now: float = 1000.0) -> Record:
    return job_record(CONFIG, TOPOLOGY, start(), world_size=RANKS, now=now)


def decisions(rounds: int = 3, seed: int = 0) -> Iterator[list[Event]]:
    """For each decision, what is heard at its step."""
    generator = np.random.default_rng(seed)
    placement = start()
    for round_ in range(1, rounds + 1):
        step = round_ * INTERVAL
        if round_ % 2:  # another set of experts is hot
            hot = generator.integers(1, 9, (LAYERS, EXPERTS)) ** 2
        load_TLE = generator.poisson(10 * hot, (INTERVAL, LAYERS, EXPERTS)).astype(np.int64)
        imbalance_TL = predicted_imbalance(load_TLE.astype(np.float64), placement)
        rows = tuple(tuple(row) for row in imbalance_TL.tolist())
        heard: list[Event] = [
            LoadMeasured(step, INTERVAL, rows, STEP_SECONDS, load=load_TLE, placements=((INTERVAL, placement),))
        ]
        made = plan(load_TLE, TOPOLOGY, slots_per_rank=placement.slots_per_rank, current=placement)
        before = predicted_imbalance(load_TLE.mean(axis=0), placement)
        moves = round_ != 2 and made.moved_slots > 0
        heard.append(
            RebalancePlanned(
                step,
                epoch=placement.epoch + 1,
                moves=made.moved_slots if moves else 0,
                decision="rebalance" if moves else "stay",
                code="pays" if moves else "does not pay",
                reason="saves 2 s for 0.1 s" if moves else "would save 0.1 s, less than 1.2 x the 1 s it costs",
                imbalance_before=float(before.mean()),
                imbalance_after=float((made.imbalance_after if moves else before).mean()),
                plan_seconds=0.02,
                imbalance_bound=float(made.lower_bound.mean()),
                seconds_saved=2.0,
                seconds_spent=0.1,
                by_layer=np.stack([before, made.imbalance_after if moves else before, made.lower_bound]),
            )
        )
        if moves:
            heard.append(_committed(step, placement, made.placement))
            placement = made.placement.with_epoch(placement.epoch + 1)
        yield heard


def _committed(step: int, before: Placement, after: Placement) -> RebalanceCommitted:
    old, new = before.require_homes(), after.require_homes()
    layer, expert = np.nonzero(old != new)
    transfers = np.stack([layer, expert, old[layer, expert], new[layer, expert]], axis=1)
    crossing = int((before.rank_of(transfers[:, 2]) != after.rank_of(transfers[:, 3])).sum())
    after = after.with_epoch(before.epoch + 1)
    return RebalanceCommitted(
        step,
        epoch=after.epoch,
        digest=after.digest(),
        moved_experts=crossing,
        received_bytes=0,
        pause_seconds=sum(PHASES.values()),
        phase_seconds=PHASES,
        placement=after,
        transfers=transfers.astype(np.int64),
        expert_bytes=(EXPERT_BYTES,) * LAYERS,
    )


def troubles(step: int) -> list[Event]:
    """What goes wrong, one of each kind."""
    return [
        RebalanceAborted(step, 1, "staged", "rank 2: checksum", committed_layers=(0,), left_layers=(1, 2)),
        BalancingPaused(step, "rank 3 has not answered for 30 s"),
        BalancingResumed(step + 4, tries=2),
        GuardFinding(step + 5, "weights of layer 0 differ on ranks 0 and 1"),
    ]


def records(rounds: int = 3, with_troubles: bool = True, now: float = 1000.0) -> list[Record]:
    """The job and its events, as listeners get them."""
    found = [job(now)]
    heard = [event for events in decisions(rounds) for event in events]
    heard += troubles(rounds * INTERVAL) if with_troubles else []
    return found + [record_of(event, start(), now + event.step) for event in heard]
