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
    measured = events.of_type(LoadMeasured)
    committed = [event for event in events if isinstance(event, RebalanceCommitted)]
    moved = sum(event.moved_experts for event in committed)
    placed = sum(event.placed_replicas for event in committed)
    replicas = f"{counted(placed, 'replica')} placed, " if placed else ""
    pause = sum(event.pause_seconds for event in committed)
    cadence = f"a decision every {config.interval} steps" if config.interval else "decisions by rebalance() alone"
    rows = [
        ("experts", f"{placement.num_layers} layers of {placement.num_experts}"),
        ("ranks", f"{placement.num_ranks} share a layer, {topology.ranks_per_node} a node"),
        ("slots per rank", f"{placement.slots_per_rank}, {placement.replica_slots} of them for copies"),
        ("policy", f"{config.policy}, {cadence}, gate {config.gate}"),
        ("steps", str(step)),
        ("placement", f"epoch {placement.epoch}, {int((placement.copy_count - 1).sum())} copies stand"),
        ("measured last", measured[-1].brief() if measured else "nothing yet"),
        ("rebalances", f"{len(committed)}, {counted(moved, 'expert')} moved, {replicas}{pause:.3g} s pause"),
        ("dropped", str(len(events.of_type(RebalanceAborted)))),
    ]
    return text_table(("balancer", ""), rows)


class DecisionLine:
    """Listener that logs a line for each decision and rebalance; of decisions that stay for one reason the first."""

    def __init__(self) -> None:
        self._measured: LoadMeasured | None = None
        self._planned: RebalancePlanned | None = None
        self._reason = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, LoadMeasured):
            self._measured = event
        elif isinstance(event, RebalancePlanned):
            measured, self._measured, self._planned = self._measured, None, event
            before, self._reason = self._reason, "" if event.moves else _NUMBERS.sub("", event.reason)
            if not self._reason or self._reason != before:
                _log(event.step, *([] if measured is None else [measured.brief()]), event.brief())
        elif isinstance(event, RebalanceCommitted):
            _log(event.step, f"{event.brief()}{self._predicted()}")

    def _predicted(self) -> str:
        planned, self._planned = self._planned, None
        if planned is None or not planned.moves or planned.seconds_saved is None or planned.seconds_spent is None:
            return ""
        return f", to save {planned.seconds_saved:.3g} s for {planned.seconds_spent:.3g} s"


_NUMBERS, _WIDTH = re.compile(r"[\d.]+"), 120


def _log(step: int, *parts: str) -> None:
    """Log the parts as a line; where it is too long those before the last go, then fields of it, whole ones."""
    while len(line := f"step {step}: {'; '.join(parts)}") > _WIDTH and len(parts) > 1:
        parts = (*parts[:-2], parts[-1])
    while len(line) > _WIDTH and (fields := re.split(r"[;,] (?!.*[;,] )", line))[1:]:
        line = fields[0]
    logger.info("%s", shorten(line, _WIDTH, placeholder=" ..."))
