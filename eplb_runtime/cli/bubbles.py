"""Play pipeline schedules and say how long ranks are idle, and what uneven experts make of it.

examples:
  eplb-runtime bubbles --ranks 2,4,8 --microbatches 32 --overlapped 3
  eplb-runtime bubbles --schedule dualpipev --ranks 4 --microbatches 16 --forward 10 --input 11 --weight 9
  eplb-runtime bubbles --schedule 1f1b --ranks 4 --imbalance 1.8,1.4,1.3,1.2
"""

import argparse
from itertools import product
from typing import Any

from .arguments import at_least_one, option, positive, positive_float, several, share
from .printing import print_json, print_table

OPTIONS = [
    option("--schedule", "NAME,...", several(str), "1f1b, zb1p, zbv, interleaved, dualpipev (default: all)"),
    option("--ranks", "P,...", several(positive), "ranks of the pipeline (default: 4)", [4]),
    option("--microbatches", "M", positive, "of a step (default: 32)", 32),
    option("--forward", "T", positive_float, "time of a stage's forward (default: 1)", 1.0),
    option("--input", "T", positive_float, "of its gradient of inputs (default: 1)", 1.0),
    option("--weight", "T", positive_float, "of its gradient of weights (default: 1)", 1.0),
    option("--overlapped", "T", positive_float, "of a forward and a backward together (default: their sum)"),
    option("--imbalance", "X,...", several(at_least_one), "max / mean rank load of each stage's MoE layers"),
    option("--moe-share", "X", share, "of a stage's time that goes with its busiest rank's load (default: 0.6)", 0.6),
]


def run(arguments: argparse.Namespace) -> None:
    from ..tools.bubbles import SCHEDULES, Times, play, table_of

    times = Times(arguments.forward, arguments.input, arguments.weight, arguments.overlapped)
    schedules = [name.lower() for name in arguments.schedule or SCHEDULES]  # also as others name them: DualPipeV
    rows: list[dict[str, Any]] = []
    for name, ranks in product(schedules, arguments.ranks):
        table, formula = table_of(name, ranks, arguments.microbatches), SCHEDULES[name].formula
        stretch_S = [1 + arguments.moe_share * (imbalance - 1) for imbalance in arguments.imbalance or ()] or None
        row = {"schedule": name, "ranks": ranks, "microbatches": arguments.microbatches}
        row |= play(table, times, stretch_S).summary()
        rows.append({**row, "formula": None if formula is None or stretch_S is not None else formula(ranks, times)})
    if arguments.json:
        print_json({"rows": rows})
    else:
        print_table("a step of each schedule; bubble: idle time of a rank, mean over ranks", rows)
