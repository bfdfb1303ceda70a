"""``eplb-runtime verify``: training with and without migrations on this very cluster."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

from .arguments import InputError, add_command, adder, not_negative, positive
from .inputs import require_extra
from .printing import print_json, progress


def add(commands: Any) -> None:
    command = add_command(
        commands,
        "verify",
        _run,
        "train with and without migrations on this very cluster and say whether it makes any difference",
        """
  torchrun --nproc-per-node 4 -m eplb_runtime.cli verify
  torchrun --nproc-per-node 8 -m eplb_runtime.cli verify --device cuda --model-config ./my-model --dtype bfloat16
  torchrun --nproc-per-node 4 -m eplb_runtime.cli verify --replica-slots 1 --dtype float64 --json

exit status: 0 passed, 1 a difference or nothing proved, 2 bad input (torchrun itself makes 1 of both)
""",
    )
    model = command.add_mutually_exclusive_group()
    families = ("olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
    model.add_argument("--family", choices=families, default="olmoe", help="a small model of it (default: olmoe)")
    model.add_argument("--model-config", metavar="PATH", help="a folder with config.json, or that file; random weights")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    command.add_argument(
        "--dtype", choices=("float32", "float64", "bfloat16"), default="float32", help="default: float32"
    )
    add = adder(command)
    add("--steps", "N", positive, "of each run (default: 12)", default=12)
    add("--replica-slots", "K", not_negative, "a further run with K copies a rank, held against a bound", default=0)
    add("--batch", "N", positive, "sequences per rank and step (default: 4)", default=4)
    add("--length", "N", positive, "tokens of a sequence (default: 32)", default=32)


def _run(arguments: argparse.Namespace) -> int:
    require_extra("transformers", "verify")
    from ..tools.launch import is_first, launched
    from ..tools.verification.job import run

    if not launched() and arguments.replica_slots:
        raise InputError(
            "verify --replica-slots needs ranks: torchrun --nproc-per-node 2 -m eplb_runtime.cli verify ..."
        )
    runs = 3 if arguments.replica_slots else 2
    with progress("steps", runs * arguments.steps) if is_first() else nullcontext(lambda: None) as advance:
        report = run(
            family=arguments.family,
            model_config=arguments.model_config,
            device=arguments.device,
            dtype=arguments.dtype,
            steps=arguments.steps,
            replica_slots=arguments.replica_slots,
            batch=arguments.batch,
            length=arguments.length,
            on_step=advance,
        )
    if is_first():
        if arguments.json:
            print_json(report.to_dict())
        else:
            print(report)
    return 0 if report.passed else 1
