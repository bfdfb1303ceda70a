"""``eplb-runtime bubbles``: how long pipeline schedules leave ranks idle, and what uneven experts make of it."""

from __future__ import annotations

import argparse
from typing import Any

from .arguments import (
    LOAD,
    InputError,
    add_command,
    add_dense_layers,
    adder,
    names,
    not_negative_float,
    positive,
    positive_float,
    windows,
)
from .inputs import read_windows
from .printing import print_json, print_table


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "bubbles",
        _run,
        "play pipeline schedules and say how long ranks are idle",
        """
  eplb-runtime bubbles --ranks 2,4,8 --microbatches 32 --overlapped 3
  eplb-runtime bubbles --schedule dualpipev --ranks 4 --microbatches 16 --forward 10 --input 11 --weight 9
  eplb-runtime bubbles --schedule 1f1b --ranks 4 --imbalance 1.8,1.4,1.3,1.2 --after 1.1,1.05,1.05,1.02
  eplb-runtime bubbles --schedule zbv --ranks 4 --microbatches 16 --load load.npz --ep-ranks 8 --slots-per-rank 5
""",
    )
    add = adder(command)
    add("--schedule", "NAME,...", _schedules, "1f1b, zb1p, zbv, interleaved, dualpipe, dualpipev (default: all)")
    add("--ranks", "P,...", _ranks, "ranks of the pipeline (default: 4)", default=[4])
    add("--microbatches", "M", positive, "of a step (default: 32)", default=32)
    add("--forward", "T", positive_float, "time of a stage's forward (default: 1)", default=1.0)
    add("--input", "T", positive_float, "of its gradient of inputs (default: 1)", default=1.0)
    add("--weight", "T", positive_float, "of its gradient of weights (default: 1)", default=1.0)
    add("--overlapped", "T", positive_float, "of a forward and a backward together (default: their sum)")
    add("--imbalance", "X,...", _imbalances, "max / mean rank load of each stage's MoE layers")
    add("--after", "X,...", _imbalances, "the same after a plan")
    add("--load", "FILE", str, f"both from a load, before and after a plan for it; {LOAD}")
    add("--windows", "A:B", windows, "of the load, only these", default=slice(None))
    add("--ep-ranks", "R", positive, "with --load: ranks that share a stage's experts")
    add("--slots-per-rank", "S", positive, "with --load: experts that each holds, copies included")
    add(
        "--moe-share",
        "X",
        _share,
        "of a stage's time that goes with its busiest rank's load (default: 0.6)",
        default=0.6,
    )
    add_dense_layers(command)


def _schedules(text: str) -> list[str]:
    """As they are named elsewhere, too: 1F1B, DualPipeV."""
    return [name.lower() for name in names(text)]


def _run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    from ..tools.bubbles import SCHEDULES, Times, follow, stages_of, table_of

    times = Times(arguments.forward, arguments.input, arguments.weight, arguments.overlapped)
    is_odd = any(ranks % 2 for ranks in arguments.ranks)
    schedules = arguments.schedule or [name for name in SCHEDULES if name != "dualpipe" or not is_odd]
    tables = [(name, table_of(name, ranks, arguments.microbatches)) for name in schedules for ranks in arguments.ranks]
    rows: list[dict[str, Any]] = []
    for name, table in tables:
        stages = stages_of(table)
        for load, stretch_S in _loads(arguments, stages).items():
            played = follow(table, times, stretch_S)
            formula = SCHEDULES[name].formula if stretch_S is None else None
            rows.append(
                {
                    "schedule": name,
                    "ranks": len(table),
                    "microbatches": arguments.microbatches,
                    "load": load,
                    **played.summary(),
                    "formula": formula(len(table), times) if formula is not None else None,
                }
            )
    if arguments.json:
        print_json({"rows": rows})
        return
    shown = [{key: "" if value is None else value for key, value in row.items()} for row in rows]
    print_table("a step of each schedule; bubble: idle time of a rank, mean over ranks", shown)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse arguments that do not fit together before anything is computed."""
    if arguments.after is not None and arguments.imbalance is None:
        raise InputError("--after needs --imbalance: what it was before")
    if arguments.load is not None:
        if arguments.imbalance is not None:
            raise InputError("--imbalance and --load both say how uneven stages are: give one")
        if arguments.ep_ranks is None or arguments.slots_per_rank is None:
            raise InputError("--load needs --ep-ranks and --slots-per-rank: where its experts are")


def _loads(arguments: argparse.Namespace, stages: int) -> dict[str, list[float] | None]:
    """By name: how many times as long each stage takes; None: experts are even."""
    from ..tools.bubbles import stage_imbalance, stretch

    loads: dict[str, list[float] | None] = {"even": None}
    if arguments.load is not None:
        load_TLE = read_windows(arguments.load, arguments)
        before_S, after_S = stage_imbalance(load_TLE, arguments.ep_ranks, arguments.slots_per_rank, stages)
        loads |= {"before": stretch(before_S, arguments.moe_share), "after": stretch(after_S, arguments.moe_share)}
    for name, imbalance_S in (("before", arguments.imbalance), ("after", arguments.after)):
        if imbalance_S is not None:
            if len(imbalance_S) != stages:
                raise InputError(f"{len(imbalance_S)} stages are given an imbalance, the schedule has {stages}")
            loads[name] = stretch(imbalance_S, arguments.moe_share)
    return loads


def _ranks(text: str) -> list[int]:
    """``2,4`` -> [2, 4]."""
    return [positive(part) for part in text.split(",")]


def _imbalances(text: str) -> list[float]:
    """``1.4,1`` -> [1.4, 1.0]."""
    found = [positive_float(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: max / mean rank load is 1 or more")
    return found


def _share(text: str) -> float:
    found = not_negative_float(text)
    if found > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: give a share, 0 to 1")
    return found
