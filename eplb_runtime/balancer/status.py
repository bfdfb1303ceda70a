"""A balancer's status as a table, and a log line for each of its decisions."""

from __future__ import annotations

import logging
import re
from textwrap import shorten

from ..config import BalancerConfig
from ..events import Event, EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted, RebalancePlanned
from ..placement import Placement
from ..topology import Topology
from ..utils.text import counted, text_table

logger = logging.getLogger("eplb_runtime")


def balancer_table(
    config: BalancerConfig, topology: Topology, placement: Placement, step: int, events: EventLog
) -> str:
    """The model and the state of its balancing, as a table."""
    measured, dropped = events.of_type(LoadMeasured), len(events.of_type(RebalanceAborted))
    committed = [event for event in events if isinstance(event, RebalanceCommitted)]
    moved, pause = sum(event.moved_experts for event in committed), sum(event.pause_seconds for event in committed)
    placed = counted(sum(event.placed_replicas for event in committed), "replica")
    cadence = f"a decision every {config.interval} steps" if config.interval else "decisions by rebalance() alone"
    rows = [
        ("experts", f"{placement.num_layers} layers of {placement.num_experts}"),
        ("ranks", f"{placement.num_ranks} share a layer, {topology.ranks_per_node} a node"),
        ("slots per rank", f"{placement.slots_per_rank}, {placement.replica_slots} of them for replicas"),
        ("policy", f"{config.policy}, {cadence}, gate {config.gate}"),
        ("placement", f"epoch {placement.epoch}, {int((placement.copy_count - 1).sum())} replicas, at step {step}"),
        ("measured last", measured[-1].brief() if measured else "nothing yet"),
        ("rebalances", f"{len(committed)}, {counted(moved, 'expert')} moved, {placed} placed, {pause:.3g} s pause"),
        ("dropped", str(dropped)),
    ]
    return text_table(("balancer", ""), rows)


class DecisionLine:
    """Listener that logs a line for each decision and rebalance; of decisions that stay for one reason the first."""

    def __init__(self) -> None:
        self._planned: RebalancePlanned | None = None
        self._reason = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RebalancePlanned):
            self._planned, before = event, self._reason
            self._reason = "" if event.moves else _NUMBERS.sub("", event.reason)
            if not self._reason or self._reason != before:
                _log(event, "")
        elif isinstance(event, RebalanceCommitted):
            planned, self._planned, predicted = self._planned, None, ""
            if planned is not None and planned.moves and None not in (planned.seconds_saved, planned.seconds_spent):
                predicted = f", to save {planned.seconds_saved:.3g} s for {planned.seconds_spent:.3g} s"
            _log(event, predicted)


_NUMBERS, _WIDTH = re.compile(r"[\d.]+"), 120


def _log(event: Event, more: str) -> None:
    """Log an event in a line; where it is too long its last fields are left out, whole ones."""
    line = f"step {event.step}: {event.brief()}{more}"
    while len(line) > _WIDTH and (fields := re.split(r"[;,] (?!.*[;,] )", line))[1:]:
        line = fields[0]
    logger.info("%s", shorten(line, _WIDTH, placeholder=" ..."))
