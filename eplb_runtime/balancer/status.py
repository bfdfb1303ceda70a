"""A balancer in words: what it balances and how it goes, and a line in the log for each rebalance."""

from __future__ import annotations

import logging

from ..config import BalancerConfig
from ..events import Event, EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned, brief
from ..placement import Placement
from ..topology import Topology
from ..utils.tables import text_table

logger = logging.getLogger("eplb_runtime")


def balancer_table(
    config: BalancerConfig, topology: Topology, placement: Placement, step: int, events: EventLog
) -> str:
    """What a balancer balances, and how it goes."""
    measured = events.of_type(LoadMeasured)
    committed = [event for event in events if isinstance(event, RebalanceCommitted)]
    moved = sum(event.moved_experts for event in committed)
    pause = sum(event.pause_seconds for event in committed)
    copies = int((placement.copy_count - 1).sum())
    rows = [
        ("experts", f"{placement.num_layers} layers of {placement.num_experts}"),
        ("ranks", f"{placement.num_ranks} share a layer, {topology.ranks_per_node} a node"),
        ("slots per rank", f"{placement.slots_per_rank}, {placement.replica_slots} of them for copies"),
        ("policy", f"{config.policy}, a decision every {config.interval} steps, gate {config.gate}"),
        ("steps", str(step)),
        ("placement", f"epoch {placement.epoch}, {copies} copies stand"),
        ("measured last", brief(measured[-1]) if measured else "nothing yet"),
        ("rebalances", f"{len(committed)}, {moved} experts moved, {pause:.3g} s pause"),
        ("dropped", str(len(events.of_type(RebalanceAborted)))),
    ]
    return text_table(("balancer", ""), rows)


class RebalanceLine:
    """A listener that logs a line for each rebalance, with what was predicted of it."""

    def __init__(self) -> None:
        self._planned: RebalancePlanned | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, RebalancePlanned):
            self._planned = event
        if not isinstance(event, RebalanceCommitted):
            return
        planned, self._planned = self._planned, None
        predicted = ""
        if planned is not None and planned.moves:
            predicted = f", imbalance {planned.imbalance_before:.3f} -> {planned.imbalance_after:.3f} predicted"
            if planned.seconds_saved is not None and planned.seconds_spent is not None:
                predicted += f", to save {planned.seconds_saved:.3g} s for {planned.seconds_spent:.3g} s"
        logger.info("step %d: %s%s", event.step, brief(event), predicted)
