"""Plans of this package's policies on this machine: how balanced, how near to the bound, how long.

Every row of a load and shape comes from one run on one thread: ratios mean something where milliseconds do not.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...planner.api import plan
from ...planner.evaluate import lower_bound, predicted_imbalance
from ...planner.policies.deepseek import balance as balance_deepseek
from ...topology import Topology
from ..formats.loads import read_load

MAX_WINDOWS = 24  # the newest of a longer series

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PlanShape:
    """A cluster to plan for; ``groups`` 1: no group rule."""

    ranks: int
    ranks_per_node: int
    slots_per_rank: int
    groups: int = 1


Planner = Callable[[FloatArray, PlanShape], Placement]  # of a window ``[L, E]``


def run(loads: Sequence[str | Path] = (), repeats: int = 5) -> dict[str, Any]:
    """Return ``{"planner": rows}``: the rows that `measure` yields for each load and each of `shapes_for`.

    Args:
        loads: load files; none: the series that comes with the package. FileError: one cannot be used.
        repeats: timings of a load's first window; each further window is timed once. The median counts.
    """
    each = ((name, load, shape) for name, load in read_loads(loads or ["sample"]).items() for shape in shapes_for(load))
    return {"planner": [row for one in each for row in measure(*one, {}, repeats)]}


def read_loads(files: Sequence[str | Path]) -> dict[str, FloatArray]:
    """Return the loads ``[T, L, E]`` of files by file name; of a longer series the newest 24 windows."""
    return {Path(path).name: read_load(path)[-MAX_WINDOWS:] for path in files}


def shapes_for(load: FloatArray) -> list[PlanShape]:
    """Return clusters of up to 64 ranks of at least four experts: without replicas, and with a replica slot a rank."""
    experts, ranks = load.shape[2], 1
    while ranks * 2 <= min(64, experts // 4) and experts % (ranks * 2) == 0:
        ranks *= 2
    homes = experts // ranks
    return [PlanShape(ranks, min(8, ranks), slots) for slots in (homes, homes + 1) if slots <= experts]


def measure(
    name: str, load: FloatArray, shape: PlanShape, others: Mapping[str, Planner], repeats: int
) -> Iterator[dict[str, Any]]:
    """Plan each window of a load ``[T, L, E]`` by each of our policies that can plan for a shape, and by ``others``.

    Yields:
        A row for each planner, DeepSeek's rule first: ``load``, ``ranks``, ``slots``, ``groups``, ``planner``,
        ``balancedness`` and ``bound`` (mean / max rank load, mean over layers and windows; the bound is that of slots
        that may hold any expert) and ``ms`` (CPU time of one plan of all layers).
    """
    experts, ranks, slots = load.shape[2], shape.ranks, shape.slots_per_rank
    free = "hierarchical" if shape.groups > 1 else "free"
    planners: dict[str, Planner] = {"deepseek": _deepseek, free: partial(_by_policy, free)}
    if shape.groups == 1 and experts % ranks == 0:
        planners["incremental (home layout)"] = partial(_by_policy, "incremental")
    bound = float(np.mean([1 / lower_bound(window, ranks, slots) for window in load]))
    for planner, function in {**planners, **others}.items():
        function(load[0, :1], shape)  # compiles
        seconds, balance = [], []
        for index, window in enumerate(load):
            for _ in range(repeats if index == 0 else 1):
                began = time.process_time()
                placement = function(window, shape)
                seconds.append(time.process_time() - began)
            balance.append(1 / predicted_imbalance(window, placement))
        given = {"load": name, "ranks": ranks, "slots": ranks * slots, "groups": shape.groups, "planner": planner}
        found = {"balancedness": float(np.mean(balance)), "bound": bound, "ms": float(np.median(seconds)) * 1e3}
        yield {**given, **found}


def _deepseek(window: FloatArray, shape: PlanShape) -> Placement:
    nodes = shape.ranks // shape.ranks_per_node if shape.groups > 1 else 1
    slots = balance_deepseek(window, shape.ranks * shape.slots_per_rank, shape.groups, nodes, shape.ranks)[0]
    return Placement(slots, window.shape[1], shape.ranks)


def _by_policy(policy: str, window: FloatArray, shape: PlanShape) -> Placement:
    topology, per_rank = Topology(shape.ranks, shape.ranks_per_node), shape.slots_per_rank
    return plan(window, topology, slots_per_rank=per_rank, policy=policy, groups=shape.groups).placement
