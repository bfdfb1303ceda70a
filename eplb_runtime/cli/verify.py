"""``eplb-runtime verify``: does a job train the same wherever its experts are?"""

from __future__ import annotations

import argparse
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .arguments import InputError, add_command, add_options, choice, not_negative, option, positive
from .inputs import require_extra
from .printing import print_json, progress

EXAMPLES = """
  eplb-runtime verify -- torchrun --nproc-per-node 4 train.py --lr 1e-3
  eplb-runtime verify --steps 20 --json -- accelerate launch train.py
  torchrun --nproc-per-node 4 -m eplb_runtime.cli verify         # a small model of ours, on your cluster

exit status: 0 right, 1 wrong, 3 unknown, 2 bad input (torchrun itself makes 1 of all but 0)
"""
STATUS = {"right": 0, "wrong": 1, "unknown": 3}


def add(commands: Any) -> None:
    family = "a small model of it (default: olmoe)"
    options = [
        option("job", "COMMAND", str, "what you type to train, after --; none: our model", nargs="*"),
        option("--keep", "FOLDER", Path, "of a COMMAND: keep records and output there"),
        choice("--device", ("cpu", "cuda"), "default: cpu", "cpu"),
        choice("--dtype", ("float32", "float64", "bfloat16"), "default: float32", "float32"),
        option("--steps", "N", positive, "optimizer steps of each run (default: 12)", 12),
        option("--replica-slots", "K", not_negative, "of our model: replica slots a rank; compared to rounding", 0),
        option("--batch", "N", positive, "of our model: sequences per rank and step (default: 4)", 4),
        option("--length", "N", positive, "of our model: tokens of a sequence (default: 32)", 32),
    ]
    models = [
        choice("--family", ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"), family, "olmoe"),
        option("--model-config", "PATH", str, "a folder with config.json, or that file; random weights"),
    ]
    summary = "run your job for a few steps with experts fixed, moved, and all on each rank, and compare every tensor"
    command = add_command(commands, "verify", _run, summary, EXAMPLES, options)
    add_options(command.add_mutually_exclusive_group(), models)


def _run(arguments: argparse.Namespace) -> int:
    from ..tools.launch import is_first

    report = _of_command(arguments) if arguments.job else _of_our_model(arguments)
    if arguments.job or is_first():
        print_json(report.to_dict()) if arguments.json else print(report)
    return STATUS[report.verdict]


def _of_command(arguments: argparse.Namespace) -> Any:
    from ..tools.verification import verify_command

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the job ends, and its folder goes
    if arguments.keep is not None and arguments.keep.exists() and any(arguments.keep.iterdir()):
        raise InputError(f"--keep {arguments.keep}: the folder is not empty; name a new one")
    return verify_command(arguments.job, arguments.steps, arguments.keep)


def _of_our_model(arguments: argparse.Namespace) -> Any:
    require_extra("transformers", "verify")
    from ..tools.launch import is_first, launched
    from ..tools.verification.job import run

    if arguments.keep is not None:
        raise InputError(
            "--keep is for a command of your own: eplb-runtime verify --keep FOLDER -- torchrun ... train.py"
        )
    if not launched() and arguments.replica_slots:
        raise InputError(
            "verify --replica-slots needs ranks: torchrun --nproc-per-node 2 -m eplb_runtime.cli verify ..."
        )
    runs = 5 if arguments.replica_slots else 4
    with progress("steps", runs * arguments.steps) if is_first() else nullcontext(lambda: None) as advance:
        names = ("family", "model_config", "device", "dtype", "steps", "replica_slots", "batch", "length")
        return run(*(getattr(arguments, name) for name in names), on_step=advance)
