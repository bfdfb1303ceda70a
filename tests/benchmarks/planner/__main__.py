"""The planner's tables: plans beside other planners, and the suite of loads that come next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.placement import Placement
from eplb_runtime.tools.bench import planner
from eplb_runtime.tools.bench.planner import PlanShape

from ..harness import command
from . import suite
from .peers import Peer, find_peer

TABLES = ("plans", "suite")


def run(
    loads: Sequence[str] = (),
    repeats: int = 5,
    peers: tuple[str, ...] = (),
    tables: tuple[str, ...] = TABLES,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure what the tables (names out of `TABLES`) hold: plans for load files (none: the series that comes with the
    package), each timed ``repeats`` times, by ours and other planners (``peers``: see :func:`peers.find_peer`).

    JSON-able, by table: rows of `bench.planner.measure` and `suite.run`; and `suite.behind`. PlanError, FileError: a
    peer or a file cannot be used."""
    others = {name: _planner(find_peer(name)) for name in peers}
    made: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "plans": lambda: _plans(loads, repeats, others),
        "suite": lambda: suite.run(on_progress=on_progress),
    }
    result: dict[str, Any] = {name: made[name]() for name in tables}
    return {**result, "behind": suite.behind(result["suite"])} if "suite" in result else result


def _plans(files: Sequence[str], repeats: int, others: dict[str, planner.Planner]) -> list[dict[str, Any]]:
    rows = []
    for name, load in planner.read_loads(files or ["sample"]).items():
        for shape in planner.shapes_for(load):
            rows += planner.measure(name, load, shape, others, repeats)
    return rows


def _planner(peer: Peer) -> planner.Planner:
    def planned(window: NDArray[np.float64], shape: PlanShape) -> Placement:
        nodes = shape.ranks // shape.ranks_per_node if shape.groups > 1 else 1
        slots = peer(window, shape.ranks * shape.slots_per_rank, shape.groups, nodes, shape.ranks)
        return Placement(slots, window.shape[1], shape.ranks)

    return planned


if __name__ == "__main__":
    command(run)
