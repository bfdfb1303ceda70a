"""Measure on this machine: planning, dispatch, migration, training.

examples:
  eplb-runtime bench planner load.npz --json
  eplb-runtime bench train                                             # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench train --json   # on these
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .arguments import LOAD, InputError, Option, choice, option, positive, two_or_more
from .printing import print_json, print_table, shown, spinner


def _repeats(default: int, of: str = "timings taken, the median counts") -> Option:
    return option("--repeats", "N", positive, f"{of} (default: {default})", default)


def _ranks(kind: Callable[[str], int] = positive, **more: Any) -> Option:
    return option("--ranks", "R", kind, "ranks to start when not under torchrun (default: 2)", 2, **more)


LOADS = option("loads", "LOAD", str, f"{LOAD} (default: sample)", nargs="*")
DEVICE = choice("--device", ("cpu", "cuda"), "of the ranks (default: cpu)", "cpu")
WAYS = choice("--transport", ("auto", "torch", "cuda_ipc", "nixl"), "of experts (default: auto)", "auto")
MOVES, BLOCKS = _repeats(10), _repeats(8, "timed blocks of each variant, of ten steps")
ACTIONS = {
    "planner": ("Balance and time of the policies.", [LOADS, _repeats(5)]),
    "dispatch": ("Carrying tokens between ranks, against plain all-to-alls.", [_ranks(), _repeats(20), DEVICE]),
    "migrate": ("Moving experts between ranks, against plain messages.", [_ranks(two_or_more), MOVES, DEVICE, WAYS]),
    "train": ("Steps, experts fixed, moved, replicated, or even; takes minutes.", [_ranks(choices=(1, 2, 4)), BLOCKS]),
}


def run(arguments: argparse.Namespace) -> int:
    """Run a benchmark, print its result on the first rank, and return the exit status. ``planner`` runs in this
    process; the others run on the ranks of a launcher, or else start ``--ranks`` processes with the same command."""
    what = arguments.action
    names = [name.lstrip("-") for (name,), _ in ACTIONS[what][1]]
    options = {name: getattr(arguments, name) for name in names if name != "ranks"}
    if what == "train" and find_spec("transformers") is None:
        raise InputError("bench train needs transformers: pip install 'eplb-runtime[transformers]'")
    from ..tools.launch import gpu_of, is_first, launched, process_group, start_ranks

    run = import_module(f"..tools.bench.{what}", __package__).run
    if what == "planner":
        with spinner():
            return _print(run(**options), arguments.json)
    if not launched():
        if options.get("device") == "cuda":
            gpu_of(arguments.ranks - 1)
        return start_ranks(arguments.given, arguments.ranks)
    with process_group(options.pop("device", "cpu")) as here, spinner() if is_first() else nullcontext():
        result = run(here, **options)
    return _print(result, arguments.json) if is_first() else 0


def _print(result: dict[str, Any], as_json: bool) -> int:
    if as_json:
        print_json(result)
        return 0
    for name, value in result.items():
        print_table(name, value) if isinstance(value, list) else print(f"{name}: {shown(value)}")
    return 0
