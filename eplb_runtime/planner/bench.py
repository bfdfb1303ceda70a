"""How good and how fast the free-layout planners are, on generated loads and on the user's, beside other planners.

Every planner gets the same loads in the same process, one thread, kernels compiled before the clock starts. Read the
ratios: milliseconds depend on the machine. Balancedness is mean / max rank load by even split, averaged over layers and
windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .bounds import lower_bound
from .peers import PeerPlanner, load_peer
from .policies.deepseek import balance as deepseek
from .policies.free import balance as free
from .policies.hierarchical import balance as hierarchical
from .policies.hierarchical import hottest_rank
from .types import PlanError

FloatArray = NDArray[np.float64]
Planner = Callable[[FloatArray, "Shape"], NDArray[Any]]

MAX_WINDOWS = 8
"""Of a longer series, so many windows, evenly spaced, are planned one by one."""

SPILLED = 2
MAX_PEER_SLOTS = 20_000
"""Peers plan at most so many slots, by leaving out layers: the slowest needs minutes for a large model."""


@dataclass(frozen=True)
class Shape:
    """Ranks and slots to plan for; ``groups`` > 1 asks for the group rule."""

    num_ranks: int
    slots_per_rank: int
    groups: int = 1
    num_nodes: int = 1

    @property
    def num_slots(self) -> int:
        return self.num_ranks * self.slots_per_rank


def synthetic_load(layers: int, experts: int, skew: float, seed: int = 0, tokens: int = 1 << 20) -> FloatArray:
    """Generated tokens per expert: log-normal shares, every layer with other hot experts.

    Calibration: the sorted loads of a layer of DeepSeek-V3 follow a log-normal closely. With 256 experts ``skew`` 0.73
    (coefficient of variation 0.84, hottest expert 6 x the mean) is its decode traffic, 0.66 to 0.87 (0.75 to 1.07,
    6 x to 8 x) its prefill from 512 to 4,096 tokens. 0.6 is the mild skew of a model trained with a balancing loss:
    with 32 experts the hottest has 3 x the mean, as in gpt-oss-20b.

    Args:
        skew: standard deviation of the logarithm of an expert's share.
        tokens: expert assignments a layer, about (each expert's are rounded down).

    Returns:
        float64 ``[layers, experts]``, whole numbers.
    """
    share = np.random.default_rng(seed).lognormal(sigma=skew, size=(layers, experts))
    return np.asarray(np.floor(share / share.sum(axis=1, keepdims=True) * tokens))


def generated_workloads() -> list[tuple[str, FloatArray, list[Shape]]]:
    """Name, load ``[T, L, E]`` and shapes of the workloads of a run without load files."""
    return [
        (
            "prefill-like, 58 x 256",
            synthetic_load(58, 256, 0.87)[None],
            [Shape(32, 9), Shape(32, 9, 8, 4), Shape(64, 4), Shape(64, 5)],
        ),
        ("decode-like, 58 x 256", synthetic_load(58, 256, 0.73, 1)[None], [Shape(144, 2), Shape(32, 9)]),
        ("small, 24 x 32", synthetic_load(24, 32, 0.6, 2)[None], [Shape(8, 4), Shape(8, 5)]),
        ("large, 96 x 1024", synthetic_load(96, 1024, 0.6, 3)[None], [Shape(1024, 2)]),
    ]


def shapes_for(experts: int) -> list[Shape]:
    """What to plan a load of so many experts for: eight, four and two slots a rank, with and without spare slots.

    256 experts give EP32 with 9 slots a rank, the same with 8 groups on 4 nodes, EP64 with 4 and 5, EP144 with 2.
    """
    shapes = []
    if experts % 8 == 0 and experts >= 16:
        shapes.append(Shape(experts // 8, 9))
        if experts % 32 == 0 and experts > 32:
            shapes.append(Shape(experts // 8, 9, 8, 4))
    if experts % 4 == 0 and experts >= 8:
        shapes += [Shape(experts // 4, 4), Shape(experts // 4, 5)]
    if experts % 16 == 0:
        shapes.append(Shape(experts * 9 // 16, 2))
    return shapes


def run(load_files: Sequence[str | Path], peers: Sequence[str], repeats: int) -> dict[str, Any]:
    """Measure every planner on every workload.

    Args:
        load_files: files that ``load.files.read_load`` reads; none: the generated workloads.
        peers: ``vllm``, ``sglang`` or files, see ``peers.load_peer``.
        repeats: plans timed per planner and workload; the fastest counts.

    Returns:
        ``{"planners": [row, ...]}``, rows with ``load``, ``ranks``, ``slots_per_rank``, ``group_rule``, ``planner``,
        ``layers``, ``balancedness``, ``bound`` (no plan can be above), ``milliseconds`` (one plan of all those layers)
        and ``times_deepseek`` (the same by our compiled ``deepseek`` for those layers: 1).

    Raises:
        PlanError: a peer that cannot be used, or a load whose number of experts no shape fits.
        LoadFileError: a file that cannot be read.
    """
    planners = [load_peer(name) for name in peers]
    rows: list[dict[str, Any]] = []
    for name, windows, shapes in _workloads(load_files):
        for shape in shapes:
            rows += _measure(name, windows, shape, planners, repeats)
    return {"planners": rows}


def _workloads(load_files: Sequence[str | Path]) -> list[tuple[str, FloatArray, list[Shape]]]:
    if not load_files:
        return generated_workloads()
    from ..load.files import read_load

    workloads = []
    for path in load_files:
        load = read_load(path)
        shapes = shapes_for(load.shape[2])
        if not shapes:
            raise PlanError(f"{path}: {load.shape[2]} experts: give a multiple of 4, at least 8")
        chosen = np.unique(np.linspace(0, len(load) - 1, min(len(load), MAX_WINDOWS)).astype(int))
        workloads.append((Path(path).name, load[chosen], shapes))
    return workloads


def _measure(
    name: str, windows: FloatArray, shape: Shape, peers: Sequence[tuple[str, PeerPlanner]], repeats: int
) -> list[dict[str, Any]]:
    layers = windows.shape[1]
    peer_layers = max(1, min(layers, MAX_PEER_SLOTS // shape.num_slots))
    planners = [(label, layers, planner) for label, planner in _ours(shape)]
    planners += [(label, peer_layers, _of_peer(peer)) for label, peer in peers]
    reference: dict[int, float] = {}
    rows = []
    for label, count, planner in planners:
        load = np.ascontiguousarray(windows[:, :count])
        if count not in reference:
            reference[count] = _milliseconds(_deepseek, load, shape, repeats)
        milliseconds = reference[count] if planner is _deepseek else _milliseconds(planner, load, shape, repeats)
        bound = [1.0 / lower_bound(window, shape.num_ranks, shape.slots_per_rank) for window in load]
        rows.append(
            {
                "load": name,
                "ranks": shape.num_ranks,
                "slots_per_rank": shape.slots_per_rank,
                "group_rule": shape.groups > 1,
                "planner": label,
                "layers": count,
                "balancedness": round(float(np.mean([_balancedness(planner, window, shape) for window in load])), 4),
                "bound": round(float(np.mean(bound)), 4),
                "milliseconds": round(milliseconds, 2),
                "times_deepseek": round(milliseconds / reference[count], 1),
            }
        )
    return rows


def _ours(shape: Shape) -> list[tuple[str, Planner]]:
    if shape.groups == 1:
        return [("deepseek", _deepseek), ("free", _free)]
    return [("deepseek", _deepseek), ("hierarchical", _hierarchical), (f"hierarchical, {SPILLED} spilled", _spilling)]


def _deepseek(load: FloatArray, shape: Shape) -> NDArray[Any]:
    return deepseek(load, shape.num_slots, shape.groups, shape.num_nodes, shape.num_ranks)[0]


def _free(load: FloatArray, shape: Shape) -> NDArray[Any]:
    return free(load, shape.num_ranks, shape.slots_per_rank)


def _hierarchical(load: FloatArray, shape: Shape) -> NDArray[Any]:
    return hierarchical(load, shape.num_ranks, shape.slots_per_rank, shape.groups, shape.num_nodes)


def _spilling(load: FloatArray, shape: Shape) -> NDArray[Any]:
    sizes = (shape.num_ranks, shape.slots_per_rank, shape.groups, shape.num_nodes)
    return hierarchical(load, *sizes, spilled_experts=SPILLED)


def _of_peer(peer: PeerPlanner) -> Planner:
    return lambda load, shape: peer(load, shape.num_slots, shape.groups, shape.num_nodes, shape.num_ranks)


def _milliseconds(planner: Planner, windows: FloatArray, shape: Shape, repeats: int) -> float:
    """One plan of all layers, the fastest of ``repeats``, averaged over windows; the kernels are compiled before."""
    planner(windows[0, :1], shape)
    seconds = []
    for window in windows:
        fastest = float("inf")
        for _ in range(max(repeats, 1)):
            began = time.perf_counter()
            planner(window, shape)
            fastest = min(fastest, time.perf_counter() - began)
        seconds.append(fastest)
    return float(np.mean(seconds)) * 1e3


def _balancedness(planner: Planner, load: FloatArray, shape: Shape) -> float:
    hottest = hottest_rank(load, planner(load, shape).astype(np.int32), shape.num_ranks)
    mean = load.sum(axis=1) / shape.num_ranks
    return float(np.mean(np.where(hottest > 0, mean / np.where(hottest > 0, hottest, 1.0), 1.0)))
