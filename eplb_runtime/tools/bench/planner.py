"""Plans of this package's policies on this machine: how balanced, how near to the bound, how long.

Every row of a load and shape comes from one run on one thread: ratios mean something where milliseconds do not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...placement import Placement
from ...planner.evaluate import predicted_imbalance
from ...planner.planning import plan
from ...planner.policies.deepseek import balance as balance_deepseek
from ...planner.search.bounds import lower_bound
from ...topology import Topology
from ..formats.loads import read_load

MAX_WINDOWS = 24
"""Longer series are merged into at most so many windows; each is planned for and judged by itself."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class PlanShape:
    """A cluster to plan for; ``groups`` 1: no group rule."""

    ranks: int
    ranks_per_node: int
    slots_per_rank: int
    groups: int = 1

    @property
    def slots(self) -> int:
        return self.ranks * self.slots_per_rank

    @property
    def topology(self) -> Topology:
        return Topology(self.ranks, self.ranks_per_node)


Planner = Callable[[FloatArray, PlanShape], Placement]
"""Plans a window ``[L, E]``."""


def run(
    load_files: Sequence[str | Path] = (),
    repeats: int = 5,
    on_progress: Callable[[str], None] = lambda what: None,
    others: Mapping[str, Planner] | None = None,
) -> dict[str, Any]:
    """Plan every load for every shape that fits its number of experts.

    Args:
        load_files: load files; none: :func:`generated_loads`.
        repeats: timings of a load's first window; each further window is timed once. The median counts.
        on_progress: called with what is measured next.
        others: planners of other projects by name, for every shape.

    Returns:
        JSON-able, ``{"planner": rows}``. A row has ``load``, ``layers``, ``experts``, ``ranks``, ``slots``, ``groups``,
        ``planner``, ``balancedness`` and ``bound`` (mean / max rank load, mean over layers and windows; the bound is
        that of slots that may hold any expert), ``ms`` (CPU time of one plan of all layers) and ``time_ratio`` (to
        ``deepseek`` in the same shape).

    Raises:
        PlanError, FormatError: a planner or a file cannot be used.
    """
    loads = {Path(path).name: _few_windows(read_load(path)) for path in load_files} or generated_loads()
    rows: list[dict[str, Any]] = []
    for name, load in loads.items():
        for shape in shapes_for(load.shape[2]):
            rows += _rows(
                name, load, shape, {**_planners(load.shape[2], shape), **(others or {})}, repeats, on_progress
            )
    return {"planner": rows}


def generated_loads(seed: int = 0) -> dict[str, FloatArray]:
    """Loads ``[1, L, E]`` by a generator that is calibrated on measured ones.

    Expert shares are lognormal; each layer draws its spread, the standard deviation of the log. Measured, 10th to 90th
    percentile over layers: DeepSeek-V3 in prefill .54 - .91 (hottest expert 4.2 - 10.4 times the mean), in decode
    .49 - .77; gpt-oss-20b by windows of 5,000 tokens: coefficient of variation .77, hottest expert 2.1 - 3.7 times the
    mean, which a spread of .6 - .9 over 32 experts gives. The third is a large model of the future, spread .3 - .7.
    """
    generator = np.random.default_rng(seed)
    return {
        "58 x 256, as DeepSeek-V3": draw_load(generator, 58, 256, 0.54, 0.91)[None],
        "24 x 32, as gpt-oss-20b": draw_load(generator, 24, 32, 0.6, 0.9)[None],
        "96 x 1024": draw_load(generator, 96, 1024, 0.3, 0.7)[None],
    }


def draw_load(generator: np.random.Generator, layers: int, experts: int, low: float, high: float) -> FloatArray:
    """``[L, E]``: lognormal shares, each layer with a spread between these; 100,000 tokens an expert on average."""
    spread = generator.uniform(low, high, (layers, 1))
    load = np.exp(spread * generator.standard_normal((layers, experts)))
    return np.asarray(np.round(load / load.mean(axis=1, keepdims=True) * 100_000))


def shapes_for(experts: int) -> list[PlanShape]:
    """Clusters worth planning for: about four experts a rank, without replicas and with one replica slot a rank.

    256 experts also get the shapes in which DeepSeek-V3 is served: 32 ranks with and without the rule that its 8
    groups stay on a node each, and 144 ranks of two slots; 1,024 experts get 1,024 ranks of two slots instead.
    """
    if experts == 1024:
        return [PlanShape(1024, 8, 2)]
    ranks = 1
    while ranks * 2 <= min(64, experts // 4) and experts % (ranks * 2) == 0:
        ranks *= 2
    node = min(8, ranks)
    shapes = [PlanShape(ranks, node, experts // ranks), PlanShape(ranks, node, experts // ranks + 1)]
    if experts == 256:
        shapes = [PlanShape(32, 8, 9), PlanShape(32, 8, 9, groups=8), PlanShape(144, 8, 2), *shapes]
    return [shape for shape in shapes if shape.slots_per_rank <= experts]  # no rank could use more


def _planners(experts: int, shape: PlanShape) -> dict[str, Planner]:
    """Ours that can plan for the shape; DeepSeek's rule comes first."""
    made: dict[str, Planner] = {"deepseek": _deepseek}
    made["hierarchical" if shape.groups > 1 else "free"] = _by_policy("hierarchical" if shape.groups > 1 else "free")
    if shape.groups == 1 and experts % shape.ranks == 0:
        made["incremental (home layout)"] = _by_policy("incremental")
    return made


def _deepseek(window: FloatArray, shape: PlanShape) -> Placement:
    nodes = shape.ranks // shape.ranks_per_node if shape.groups > 1 else 1
    slots = balance_deepseek(window, shape.slots, shape.groups, nodes, shape.ranks)[0]
    return Placement(slots, window.shape[1], shape.ranks)


def _by_policy(policy: str) -> Planner:
    def planned(window: FloatArray, shape: PlanShape) -> Placement:
        per_rank, groups = shape.slots_per_rank, shape.groups
        return plan(window, shape.topology, slots_per_rank=per_rank, policy=policy, groups=groups).placement

    return planned


def _rows(
    name: str,
    load: FloatArray,
    shape: PlanShape,
    planners: Mapping[str, Planner],
    repeats: int,
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    windows, layers, experts = load.shape
    bound = np.mean([1 / lower_bound(window, shape.ranks, shape.slots_per_rank) for window in load])
    rows = []
    for planner, function in planners.items():
        on_progress(f"{name}, {shape.ranks} ranks, {shape.slots} slots: {planner}")
        function(load[0, :1], shape)  # compiles
        seconds, balance = [], []
        for index, window in enumerate(load):
            for _ in range(repeats if index == 0 else 1):
                began = time.process_time()
                placement = function(window, shape)
                seconds.append(time.process_time() - began)
            balance.append(1 / predicted_imbalance(window, placement))
        rows.append(
            {
                "load": name if windows == 1 else f"{name}, {windows} windows",
                "layers": layers,
                "experts": experts,
                "ranks": shape.ranks,
                "slots": shape.slots,
                "groups": shape.groups,
                "planner": planner,
                "balancedness": float(np.mean(balance)),
                "bound": float(bound),
                "ms": float(np.median(seconds)) * 1e3,
            }
        )
    reference = rows[0]["ms"]
    return [row | {"time_ratio": row["ms"] / reference if reference else None} for row in rows]


def _few_windows(load: FloatArray) -> FloatArray:
    merged = -(-len(load) // MAX_WINDOWS)
    whole = len(load) // merged
    return np.asarray(load[: whole * merged].reshape(whole, merged, *load.shape[1:]).sum(axis=1))
