"""Measure the splitter on this machine: how near to the optimum, how many microseconds a layer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...moe.routing import water_filling
from ...moe.routing.sources import split_for_rank
from ...moe.routing.tables import SplitTables
from ...planner import plan
from ...topology import Topology
from .exact import lowest_peaks

TOKENS_PER_RANK = 8192
LAYERS = 16
SHAPES = ((32, 1), (32, 2), (64, 1))
"""(ranks, replica slots a rank); with 256 experts the second is EP32 with 64 redundant."""


def run(
    load_files: Iterable[str | Path] = (),
    repeats: int = 20,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Split batches that differ from the load their placement was planned for.

    Each layer's batch is drawn from expert shares that scatter around the planned ones (a Dirichlet of concentration
    four an expert: about as far as one batch's shares are from the mean of many).

    Args:
        load_files: load files to use in place of the generated load; those whose experts the ranks of a shape do not
            divide are left out of it.
        repeats: of each timing; the least counts.
        on_progress: called with what is measured next.

    Returns:
        JSON-able; ``"split"``: one row for each load and shape: ``load``, ``ranks``, ``redundant``, ``even`` and
        ``water_filling`` (imbalance, mean over layers), ``gap_mean`` and ``gap_max`` (above the exact linear program,
        as a share; None without scipy), ``totals_us`` and ``even_us`` (quotas of the copies, microseconds a layer, all
        layers in one call), ``rank_us`` (all that one rank needs to route a batch, one layer a call).
    """
    from ..formats.loads import read_load

    loads = {Path(path).name: np.asarray(read_load(path), dtype=np.float64) for path in load_files}
    if not loads:
        generator = np.random.default_rng(0)
        loads = {"generated": generator.lognormal(0.0, 1.0, (LAYERS, 256))}
    rows = []
    for name, load in loads.items():
        load = load.mean(axis=0) if load.ndim == 3 else load
        for ranks, replica_slots in SHAPES:
            if load.shape[1] % ranks == 0:
                on_progress(f"{name}, {ranks} ranks, {ranks * replica_slots} redundant")
                rows.append(_row(name, load[:LAYERS], ranks, replica_slots, repeats))
    return {"tokens_per_rank": TOKENS_PER_RANK, "split": rows}


def _row(name: str, load: NDArray[np.float64], ranks: int, replica_slots: int, repeats: int) -> dict[str, Any]:
    experts = load.shape[1]
    topology = Topology(ranks, 8 if ranks % 8 == 0 else ranks)
    placement = plan(load, topology, slots_per_rank=experts // ranks + replica_slots).placement
    tables = SplitTables.of(placement)
    generator = np.random.default_rng(0)
    shares = [generator.dirichlet(layer / layer.sum() * 4 * experts + 1e-9) for layer in load]
    counts_LRE = np.array([generator.multinomial(TOKENS_PER_RANK, share, size=ranks) for share in shares])
    totals_LE = counts_LRE.sum(axis=1)
    filled = water_filling.split_totals(totals_LE, tables)
    even = water_filling.split_totals(totals_LE, tables, mode="even")
    mean = totals_LE.sum(axis=1) / ranks
    peak = _peaks(filled, tables)
    gaps = _gaps(totals_LE, peak, tables)
    near = topology.ranks_per_node
    return {
        "load": name,
        "ranks": ranks,
        "redundant": ranks * replica_slots,
        "even": float((_peaks(even, tables) / mean).mean()),
        "water_filling": float((peak / mean).mean()),
        "gap_mean": None if gaps is None else float(gaps.mean()),
        "gap_max": None if gaps is None else float(gaps.max()),
        "totals_us": _microseconds(lambda: water_filling.split_totals(totals_LE, tables), repeats) / len(load),
        "even_us": _microseconds(lambda: water_filling.split_totals(totals_LE, tables, mode="even"), repeats)
        / len(load),
        "rank_us": _microseconds(lambda: split_for_rank(counts_LRE[0], tables, 0, 0, ranks_per_node=near), repeats),
    }


def _microseconds(work: Callable[[], object], repeats: int) -> float:
    work()
    least = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least * 1e6


def _peaks(quota_LEC: NDArray[np.int64], tables: SplitTables) -> NDArray[np.int64]:
    """int64 ``[L]``: tokens of the busiest rank."""
    peaks = np.empty(len(quota_LEC), dtype=np.int64)
    for layer, (quota_EC, rank_EC) in enumerate(zip(quota_LEC, tables.rank_LEC, strict=True)):
        there = rank_EC >= 0
        load_R = np.zeros(tables.num_ranks, dtype=np.int64)
        np.add.at(load_R, rank_EC[there], quota_EC[there])
        peaks[layer] = load_R.max()
    return peaks


def _gaps(totals_LE: NDArray[np.int64], peak_L: NDArray[np.int64], tables: SplitTables) -> NDArray[np.float64] | None:
    """float64 ``[L]``: how far the busiest rank is above the exact linear program (HiGHS), or None without scipy."""
    try:
        return peak_L / lowest_peaks(totals_LE, tables) - 1.0
    except ImportError:
        return None
