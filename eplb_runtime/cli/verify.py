"""Run your job for a few steps with experts fixed, moved, and all on each rank; compare every tensor.

examples:
  eplb-runtime verify -- torchrun --nproc-per-node 4 train.py --lr 1e-3
  eplb-runtime verify --steps 20 --json -- accelerate launch train.py

exit status: 0 right, 1 wrong, 3 unknown, 2 bad input
"""

import argparse

from .arguments import InputError, option, positive
from .printing import print_json

OPTIONS = [
    option("job", "COMMAND", str, "what you type to train, after --", nargs="*"),
    option("--steps", "N", positive, "optimizer steps of each run (default: 12)", 12),
]
STATUS = {"right": 0, "wrong": 1, "unknown": 3}


def run(arguments: argparse.Namespace) -> int:
    from ..tools.launch import end_on_signals
    from ..tools.verification import verify_command

    if not arguments.job:
        raise InputError("verify needs the command that trains: eplb-runtime verify -- torchrun ... train.py")
    end_on_signals()  # the job ends, and its folder goes
    report = verify_command(arguments.job, arguments.steps)
    print_json(report.to_dict()) if arguments.json else print(report)
    return STATUS[report.verdict]
