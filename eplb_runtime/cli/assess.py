"""Say whether balancing would pay for a job whose load was recorded.

examples:
  eplb-runtime assess runs/first                        # the folder of eplb.record or of BalancerConfig(run=...)
  eplb-runtime assess runs/first --ranks 64 --ranks-per-node 8
  eplb-runtime assess sample --ranks 8 --step-seconds 2.5 --moe-share 0.5
  eplb-runtime assess router_traces/ --ranks 8          # of Megatron's --moe-routing-trace-path
  eplb-runtime assess rollouts/ --ranks 8               # of slime's --save-debug-rollout-data rollouts/{rollout_id}.pt
"""

import argparse
import textwrap

from . import arguments as kinds
from .arguments import DENSE_LAYERS, LOAD, MORE_EXPERTS, option, read_job
from .printing import COLUMNS, print_json, spinner

SLOTS = "of a rank, in the second plan; 0: move homes alone (default: 1; of Megatron's trace, 0)"
SHARE = "share of a step in expert work, dispatch to combine (default: as recorded, or .4, and .2 to .6)"
FAST = "of a rank, inside its node (default: as measured, or 400; 1 on CPUs)"
SLOW = "of a rank, to other nodes (default: as measured, or 50; 1 on CPUs)"
OPTIONS = [
    option("record", "RUN|TRACE", str, "a recorded series of windows; " + LOAD),
    option("--ranks", "R", kinds.positive, "ranks of the EP group (default: as recorded, or 8, 4 or 2)"),
    option("--ranks-per-node", "G", kinds.positive, "ranks that share a node (default: as recorded, or up to 8)"),
    option("--every", "N", kinds.positive, "training steps between plans (default: as recorded, or 10 or more)"),
    option("--replica-slots", "K", kinds.not_negative, SLOTS),
    DENSE_LAYERS,
    MORE_EXPERTS,
    option("--moe-share", "X", kinds.share, SHARE),
    option("--step-seconds", "S", kinds.positive_float, "seconds of a training step (default: as recorded, or 1)"),
    option("--steps-per-window", "N", kinds.positive, "of training (default: as recorded, or by its tokens)"),
    option("--expert-parameters", "N", kinds.positive, "of one expert (default: as recorded, or DeepSeek-V3's)"),
    option("--intra-node-bandwidth", "GB/S", kinds.positive_float, FAST),
    option("--inter-node-bandwidth", "GB/S", kinds.positive_float, SLOW),
]


def run(arguments: argparse.Namespace) -> None:
    from ..tools.assess import assess

    record = read_job(arguments.record, arguments)
    with spinner():
        assessment = assess(record, vars(arguments))
    if arguments.json:
        return print_json(assessment.fields())
    print(textwrap.fill(assessment.paragraph(), COLUMNS, break_on_hyphens=False))
    if assessment.pays is not None:
        print("\nWhat neither the record nor an option says is assumed: see assess --help.")
