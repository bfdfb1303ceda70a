"""Measure the policies on this machine: how balanced, how near to the bound, how long; beside other planners.

Every row of a load and shape comes from one run on one thread, so ratios mean something where milliseconds do not.
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
from ...planner.policies.free import balance as balance_free
from ...planner.policies.hierarchical import balance as balance_hierarchical
from ...planner.search.bounds import lower_bound
from ...topology import Topology
from . import next_windows
from .peers import Peer, as_placement, find_peer

MAX_WINDOWS = 24
"""Longer series are merged into at most so many windows; each is planned for and judged by itself."""
MAX_SLOTS_OF_PEERS = 50_000
"""Peers plan shapes of at most so many slots over all layers: some take minutes beyond."""

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
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


def run(
    load_files: Sequence[str | Path] = (),
    peers: Sequence[str] = (),
    repeats: int = 5,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Plan every load for every shape that fits its number of experts.

    Args:
        load_files: load files; none: :func:`generated_loads`.
        peers: names or files of other planners, see :func:`peers.find_peer`.
        repeats: timings of a load's first window; each further window is timed once. The median counts.
        on_progress: called with what is measured next.

    Returns:
        JSON-able, ``{"planner": rows, "next_windows": rows}``; the latter, without load files, as
        :func:`next_windows.run` says. A row of the former has ``load``, ``layers``, ``experts``, ``ranks``, ``slots``,
        ``groups``, ``planner``, ``balancedness`` and ``bound`` (mean / max rank load, mean over layers and windows:
        even split in the free layout, water-filling in the home layout; the bound is that of the free layout without
        the group rule), ``ms`` (CPU time of one plan of all layers) and ``time_ratio`` (to our ``deepseek`` in the same
        shape).

    Raises:
        PlanError, LoadFileError: a peer or a file cannot be used.
    """
    others = {name: find_peer(name) for name in peers}
    rows = measure(measured_loads(load_files) or generated_loads(), others, repeats, on_progress)
    return {"planner": rows} | ({} if load_files else {"next_windows": next_windows.run(others, on_progress)})


def measured_loads(load_files: Sequence[str | Path]) -> dict[str, FloatArray]:
    """Loads ``[T, L, E]`` by the names of their files, at most `MAX_WINDOWS` windows of each.

    Raises:
        LoadFileError: a file cannot be used.
    """
    from ..formats.loads import read_load

    return {Path(path).name: _few_windows(read_load(path)) for path in load_files}


def measure(
    loads: Mapping[str, FloatArray],
    others: Mapping[str, Peer],
    repeats: int,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Rows as `run` has them, for loads ``[T, L, E]`` by name."""
    rows: list[dict[str, Any]] = []
    for name, load in loads.items():
        for shape in shapes_for(load.shape[2]):
            rows += _rows(name, load, shape, others, repeats, on_progress)
    return rows


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
    """Clusters worth planning for: about four experts a rank, without copies and with one copy slot a rank.

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


def _rows(
    name: str,
    load: FloatArray,
    shape: PlanShape,
    peers: Mapping[str, Peer],
    repeats: int,
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    windows, layers, experts = load.shape
    ours: dict[str, Callable[[FloatArray], Placement]] = {
        "deepseek": _by_rows(shape, lambda w: _deepseek(w, shape)),
    }
    if shape.groups > 1:
        ours["hierarchical"] = _by_rows(shape, lambda w: _hierarchical(w, shape))
    else:
        ours["free"] = _by_rows(shape, lambda w: balance_free(w, shape.ranks, shape.slots_per_rank))
        if experts % shape.ranks == 0:
            ours["incremental (home layout)"] = lambda w: _from_scratch(w, shape)
    if layers * shape.slots <= MAX_SLOTS_OF_PEERS:
        ours |= {peer: _by_rows(shape, _asked(function, shape)) for peer, function in peers.items()}
    bound = np.mean([1 / lower_bound(window, shape.ranks, shape.slots_per_rank) for window in load])
    rows = []
    for planner, function in ours.items():
        on_progress(f"{name}, {shape.ranks} ranks, {shape.slots} slots: {planner}")
        function(load[0, :1])  # compiles
        seconds, balance = [], []
        for index, window in enumerate(load):
            for _ in range(repeats if index == 0 else 1):
                began = time.process_time()
                placement = function(window)
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


def _by_rows(shape: PlanShape, balance: Callable[[FloatArray], NDArray[np.int32]]) -> Callable[[FloatArray], Placement]:
    return lambda window: as_placement(balance(window), window.shape[1], shape.ranks)


def _deepseek(window: FloatArray, shape: PlanShape) -> NDArray[np.int32]:
    nodes = shape.nodes if shape.groups > 1 else 1
    return balance_deepseek(window, shape.slots, shape.groups, nodes, shape.ranks)[0]


def _hierarchical(window: FloatArray, shape: PlanShape) -> NDArray[np.int32]:
    return balance_hierarchical(window, shape.ranks, shape.slots_per_rank, shape.groups, shape.nodes)


def _asked(peer: Peer, shape: PlanShape) -> Callable[[FloatArray], NDArray[np.int32]]:
    nodes = shape.nodes if shape.groups > 1 else 1
    return lambda window: peer(window, shape.slots, shape.groups, nodes, shape.ranks)


def _from_scratch(window: FloatArray, shape: PlanShape) -> Placement:
    return plan(window, Topology(shape.ranks, shape.ranks_per_node), slots_per_rank=shape.slots_per_rank).placement


def _few_windows(load: FloatArray) -> FloatArray:
    merged = -(-len(load) // MAX_WINDOWS)
    whole = len(load) // merged
    return np.asarray(load[: whole * merged].reshape(whole, merged, *load.shape[1:]).sum(axis=1))
