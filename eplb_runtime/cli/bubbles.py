"""``eplb-runtime bubbles``: how long pipeline schedules leave ranks idle, and what uneven experts make of it."""

from __future__ import annotations

import argparse
from typing import Any

from . import arguments as kinds
from .arguments import LOAD, InputError, add_command, option, positive, positive_float, several
from .inputs import read_windows
from .printing import print_json, print_table

EXAMPLES = """
  eplb-runtime bubbles --ranks 2,4,8 --microbatches 32 --overlapped 3
  eplb-runtime bubbles --schedule dualpipev --ranks 4 --microbatches 16 --forward 10 --input 11 --weight 9
  eplb-runtime bubbles --schedule 1f1b --ranks 4 --imbalance 1.8,1.4,1.3,1.2 --after 1.1,1.05,1.05,1.02
  eplb-runtime bubbles --schedule zbv --ranks 4 --microbatches 16 --load load.npz --ep-ranks 8 --slots-per-rank 5
"""


def add(commands: Any) -> None:
    schedules = "1f1b, zb1p, zbv, interleaved, dualpipe, dualpipev (default: all)"
    share = "of a stage's time that goes with its busiest rank's load (default: 0.6)"
    options = [
        option("--schedule", "NAME,...", kinds.names, schedules),
        option("--ranks", "P,...", several(positive), "ranks of the pipeline (default: 4)", [4]),
        option("--microbatches", "M", positive, "of a step (default: 32)", 32),
        option("--forward", "T", positive_float, "time of a stage's forward (default: 1)", 1.0),
        option("--input", "T", positive_float, "of its gradient of inputs (default: 1)", 1.0),
        option("--weight", "T", positive_float, "of its gradient of weights (default: 1)", 1.0),
        option("--overlapped", "T", positive_float, "of a forward and a backward together (default: their sum)"),
        option("--imbalance", "X,...", several(_imbalance), "max / mean rank load of each stage's MoE layers"),
        option("--after", "X,...", several(_imbalance), "the same after a plan"),
        option("--load", "FILE", str, f"both from a load, before and after a plan for it; {LOAD}"),
        option("--windows", "A:B", kinds.windows, "of the load, only these", slice(None)),
        option("--ep-ranks", "R", positive, "with --load: ranks that share a stage's experts"),
        option("--slots-per-rank", "S", positive, "with --load: experts that each holds, copies included"),
        option("--moe-share", "X", kinds.share, share, 0.6),
        kinds.dense_layers(),
    ]
    add_command(commands, "bubbles", _run, "play pipeline schedules and say how long ranks are idle", EXAMPLES, options)


def _run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    from ..tools.bubbles import SCHEDULES, Times, follow, stages_of, table_of

    times = Times(arguments.forward, arguments.input, arguments.weight, arguments.overlapped)
    is_odd = any(ranks % 2 for ranks in arguments.ranks)
    schedules = [name.lower() for name in arguments.schedule or ()]  # also as they are named elsewhere: DualPipeV
    schedules = schedules or [name for name in SCHEDULES if name != "dualpipe" or not is_odd]
    tables = [(name, table_of(name, ranks, arguments.microbatches)) for name in schedules for ranks in arguments.ranks]
    rows: list[dict[str, Any]] = []
    for name, table in tables:
        for load, stretch_S in _loads(arguments, stages_of(table)).items():
            formula = SCHEDULES[name].formula if stretch_S is None else None
            row = {"schedule": name, "ranks": len(table), "microbatches": arguments.microbatches, "load": load}
            row |= follow(table, times, stretch_S).summary()
            rows.append({**row, "formula": formula(len(table), times) if formula is not None else None})
    if arguments.json:
        print_json({"rows": rows})
        return
    shown = [{key: "" if value is None else value for key, value in row.items()} for row in rows]
    print_table("a step of each schedule; bubble: idle time of a rank, mean over ranks", shown)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse arguments that do not fit together before anything is computed."""
    if arguments.after is not None and arguments.imbalance is None:
        raise InputError("--after needs --imbalance: what it was before")
    if arguments.load is not None and arguments.imbalance is not None:
        raise InputError("--imbalance and --load both say how uneven stages are: give one")
    if arguments.load is not None and None in (arguments.ep_ranks, arguments.slots_per_rank):
        raise InputError("--load needs --ep-ranks and --slots-per-rank: where its experts are")


def _loads(arguments: argparse.Namespace, stages: int) -> dict[str, list[float] | None]:
    """Return how many times as long each stage takes, by name; None: experts are even."""
    from ..tools.bubbles import stage_imbalance, stretch

    given = {"before": arguments.imbalance, "after": arguments.after}
    if arguments.load is not None:
        load_TLE = read_windows(arguments.load, arguments)
        of_load = stage_imbalance(load_TLE, arguments.ep_ranks, arguments.slots_per_rank, stages)
        given = dict(zip(given, of_load, strict=True))
    loads: dict[str, list[float] | None] = {"even": None}
    for name, imbalance_S in given.items():
        if imbalance_S is not None:
            if len(imbalance_S) != stages:
                raise InputError(f"{len(imbalance_S)} stages are given an imbalance, the schedule has {stages}")
            loads[name] = stretch(imbalance_S, arguments.moe_share)
    return loads


def _imbalance(text: str) -> float:
    found = positive_float(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: max / mean rank load is 1 or more")
    return found
