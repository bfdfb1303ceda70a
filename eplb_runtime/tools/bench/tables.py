"""The tables of planner/README.md, made anew: ``eplb-runtime bench planner --table``.

What is ours is measured in the same run; what other projects reached is cited, with where it was measured. Nothing of
theirs is needed to make the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from . import families, next_windows, per_batch, planner
from .families import Family
from .peers import find_peer
from .per_batch import Sweep
from .planner import PlanShape

Row = Mapping[str, Any]
PLANS, NEXT, SUITE, BATCHES = "Plans", "Next windows", "Suite", "Copies for a batch"
"""Titles, as they stand above the tables."""
CITED_PLANS = {
    (58, 256, 32, 288, 8): ("342 / 25 / 35", "", ".8584 beside .8538, 236 ms"),
    (58, 256, 32, 288, 1): ("813 / 47 / 35", "1.96", ".9993 beside .9933, 326 ms"),
    (58, 256, 144, 288, 1): ("1,892 / 121 / 35", "1.96", ".8657 beside .8657, 276 ms"),
    (58, 256, 64, 256, 1): ("1,553 / 59 / 54", "", ""),
    (58, 256, 64, 320, 1): ("2,210 / 102 / 46", "", ""),
    (24, 32, 8, 32, 1): ("15 / 1 / 3", ".05", ".9920 beside .9737, 33 ms"),
    (24, 32, 8, 40, 1): ("19 / 2 / 2", ".06", ".9983 beside .9735, 39 ms"),
    (96, 1024, 1024, 2048, 1): ("> 150 s / 9,800 / 550", "37", ".9759 beside .9759, 7,938 ms"),
}
"""(layers, experts, ranks, slots, groups) -> milliseconds of DeepSeek's EPLB, SGLang's and vLLM's planner, which make
one plan; those of TensorRT-LLM's C++; balancedness of the best public planner (gem5) beside DeepSeek's on the same
load, and its milliseconds. Measured with their own code on loads of DeepSeek-V3 and gpt-oss-20b, one thread of a 2-core
machine."""
CITED_MINDSPEED = {
    ("normal(1, .3)", 32, 320): "1.214, 77 %",
    ("normal(1, .3)", 32, 384): "1.214, 64 %",
    ("normal(1, .3)", 32, 288): "1.214, 86 %",
    ("normal(1, .3)", 64, 384): "1.347, 65 %",
    ("normal(1, .3)", 16, 288): "1.135, 83 %",
    ("W2 hot rank", 8, 80): "1.022, 71 %",
    ("W5 zero experts", 8, 80): "1.026, 71 %",
    ("W6 rotating hotspot", 8, 80): "1.517, 74 %",
}
"""(load, ranks, slots) -> what MindSpeed's planner, which makes no copies, reached on the same series, run beside."""


def run(
    load_files: Sequence[str | Path] = (),
    peers: Sequence[str] = (),
    repeats: int = 5,
    suite: tuple[Sequence[Family], Sequence[int], Sweep] = (families.FAMILIES, families.SEEDS, Sweep()),
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Measure all that the tables hold.

    Args:
        load_files: measured loads; each takes the place of the generated load with as many layers and experts.
        peers: other planners to run beside, as for `planner.run`: in the tables that have columns for them, theirs
            stand there in place of what is cited.
        repeats: as for `planner.run`.
        suite: families and seeds of their series, and the sweep of copies for a batch.

    Returns:
        JSON-able: ``planner`` and ``next_windows`` as of `planner.run`, ``suite`` as of `families.run`, ``per_batch``
        as of `per_batch.run`.

    Raises:
        PlanError, LoadFileError: a peer or a file cannot be used.
    """
    others = {name: find_peer(name) for name in peers}
    loads = planner.measured_loads(load_files)
    shapes = {load.shape[1:] for load in loads.values()}
    generated = planner.generated_loads().items()
    loads |= {name: load for name, load in generated if load.shape[1:] not in shapes}
    chosen, seeds, sweep = suite
    return {
        "planner": planner.measure(loads, others, repeats, on_progress),
        "next_windows": next_windows.run(others, on_progress),
        "suite": families.run(chosen, seeds, on_progress),
        "per_batch": per_batch.run(sweep, on_progress=on_progress),
    }


def markdown(result: Mapping[str, Sequence[Row]]) -> str:
    """All tables of a result of `run`, each under its title."""
    made = (
        (PLANS, plans(result["planner"])),
        (NEXT, next_loads(result["next_windows"])),
        (SUITE, suite_rows(result["suite"])),
        (BATCHES, batches(result["per_batch"])),
    )
    return "\n\n".join(f"{title}:\n\n{table(rows)}" for title, rows in made)


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with equal keys as a Markdown table."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([row[head] for head in heads] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def plans(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Balancedness and milliseconds of each planner, a row for each load and shape."""
    made = []
    for key, of_shape in _grouped(rows, ("load", "layers", "experts", "ranks", "slots", "groups")).items():
        _, layers, experts, ranks, slots, groups = key
        by_planner = {row["planner"]: row for row in of_shape}
        theirs, compiled, best = CITED_PLANS.get((layers, experts, ranks, slots, groups), ("", "", ""))
        others = {name: row for name, row in by_planner.items() if name not in _OURS}
        if others:
            theirs = " / ".join(f"{name}: {_plan_of(row)}" for name, row in others.items())
        free = by_planner.get("free") or by_planner.get("hierarchical")
        made.append(
            {
                "shape": plan_label(layers, experts, PlanShape(ranks, 1, slots // ranks, groups)),
                "DeepSeek, SGLang, vLLM: ms (cited)": theirs,
                "TensorRT-LLM: ms (cited)": compiled,
                "gem5 (cited)": best,
                "ours, DeepSeek's plan": _plan_of(by_planner.get("deepseek")),
                "ours, `free`": _plan_of(free) + (" (`hierarchical`)" if groups > 1 else ""),
                "ours, `incremental` (homes)": _plan_of(by_planner.get("incremental (home layout)")),
            }
        )
    return made


_OURS = ("deepseek", "free", "hierarchical", "incremental (home layout)")


def plan_label(layers: int, experts: int, shape: PlanShape) -> str:
    """First cell of a row of `plans`."""
    grouped = f", {shape.groups} groups" if shape.groups > 1 else ""
    return f"{layers} x {experts}, EP{shape.ranks}, {shape.slots} slots{grouped}"


def next_loads(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Imbalance of the next windows and the slots moved for it."""
    made = []
    for key, of_load in _grouped(rows, ("load", "experts", "ranks", "slots")).items():
        name, experts, ranks, slots = key
        by_planner = {row["planner"]: row for row in of_load}
        others = [f"{name}: {_moved(row)}" for name, row in by_planner.items() if name not in _PLACED]
        made.append(
            {
                "load": next_label(name, ranks, slots // ranks - experts // ranks),
                "no planner": _number(by_planner["no planner"]["imbalance"]),
                "ours, where it pays": _moved(by_planner["incremental"]),
                "ours, first plan": _moved(by_planner["incremental, a first plan"]),
                "plain graph": _moved(by_planner["plain graph"]),
                "DeepSeek's rule": _moved(by_planner["deepseek"]),
                "MindSpeed (cited)": "; ".join(others) or CITED_MINDSPEED.get((name, ranks, slots), ""),
            }
        )
    return made


_PLACED = ("no planner", "incremental", "incremental, a first plan", "plain graph", "deepseek", "free", "LPLB's graph")


def next_label(load: str, ranks: int, replicas: int) -> str:
    """First cell of a row of `next_loads`."""
    return f"{load}, EP{ranks}, {replicas} {'copy' if replicas == 1 else 'copies'} a rank"


def suite_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The families; what is moved is a share of all slots, a window where the load drifts."""
    made = []
    for row in rows:
        often = " a window" if row["drifts"] else ""
        made.append(
            {
                "load": suite_label(row["load"], row["experts"], row["ranks"], row["replicas"]),
                "no planner": _number(row["no_planner"]),
                "DeepSeek's rule": f"{_number(row['deepseek'])}, {row['deepseek_moved']:.0%}{often}",
                "ours": f"{_number(row['ours'])}, {_share(row['moved'])}{often}",
                "worst series": _number(row["ours_worst"]),
            }
        )
    return made


def suite_label(load: str, experts: int, ranks: int, replicas: int) -> str:
    """First cell of a row of `suite_rows`."""
    return f"{load}: {experts} experts, EP{ranks}, k {replicas}"


def batches(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The sweep, a row for each exponent."""
    made = []
    for zipf, of_zipf in _grouped(rows, ("zipf",)).items():
        cells = {"Zipf": f"{zipf[0]:g}"}
        for row in of_zipf:
            noise = f"share off by {row['jitter']:g}" if row["jitter"] else "one share for all"
            cells[f"no copies ({noise})"] = _number(row["no_copies"])
            cells[f"per batch ({noise})"] = _number(row["per_batch"])
            cells[f"persistent ({noise})"] = _number(row["persistent"])
        made.append(cells)
    return made


def _grouped(rows: Sequence[Row], names: Sequence[str]) -> dict[tuple[Any, ...], list[Row]]:
    grouped: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[name] for name in names), []).append(row)
    return grouped


def _plan_of(row: Row | None) -> str:
    if row is None:
        return ""
    digits = 0 if row["ms"] >= 10 else 1
    return f"{row['balancedness']:.3f}, {row['ms']:,.{digits}f} ms"


def _moved(row: Row) -> str:
    return f"{_number(row['imbalance'])}, {_share(row['moved'])}"


def _number(value: float) -> str:
    return f"{np.round(value, 3):.3f}"


def _share(value: float) -> str:
    return f"{value:.1%}" if value < 0.1 else f"{value:.0%}"
