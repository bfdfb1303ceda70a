"""``eplb-runtime bench``: one command for each file of ``tools/bench/``."""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .arguments import LOAD, InputError, Option, add_command, choice, option, positive
from .printing import print_json, print_table, shown, spinner

EXAMPLES = """
  eplb-runtime bench planner load.npz --json
  eplb-runtime bench train                                             # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench train --json   # on these
"""


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure on this machine: planning, dispatch, migration, training")
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    device = choice("--device", ("cpu", "cuda"), "of the ranks (default: cpu)", "cpu")
    ways = choice("--transport", ("auto", "torch", "cuda_ipc", "nixl"), "of experts (default: auto)", "auto")
    blocks = option("--repeats", "N", positive, "timed blocks of each variant, of ten steps (default: 8)", 8)
    loads = option("loads", "LOAD", str, f"{LOAD} (default: sample)", nargs="*")
    each: dict[str, tuple[str, list[Option]]] = {
        "planner": ("balance and time of the policies", [loads, _repeats(5)]),
        "dispatch": ("carrying tokens between ranks, against plain all-to-alls", [_repeats(20), device]),
        "migrate": ("moving experts between ranks, against plain messages", [_repeats(10), device, ways]),
        "train": ("training steps, static, balanced and ideal; takes minutes", [blocks]),
    }
    ranks = option("--ranks", "R", positive, "ranks to start when not under torchrun (default: 2)", 2)
    for what, (summary, options) in each.items():
        of_ranks = [] if what == "planner" else [ranks]
        command = add_command(benches, what, _run, summary, EXAMPLES, [*of_ranks, *options])
        command.set_defaults(what=what, own=[names[0].lstrip("-") for names, _ in options])


def _repeats(default: int) -> Option:
    return option("--repeats", "N", positive, f"timings taken, the median counts (default: {default})", default)


def _run(arguments: argparse.Namespace) -> int:
    """Measure on the ranks of a launcher, or start some that run this same command."""
    what, options = arguments.what, {name: getattr(arguments, name) for name in arguments.own}
    if what == "train" and find_spec("transformers") is None:
        raise InputError("bench train needs transformers: pip install 'eplb-runtime[transformers]'")
    from ..tools.launch import is_first, launched, process_group, start_ranks

    run = import_module(f"..tools.bench.{what}", __package__).run
    if what == "planner":
        with spinner():
            return _print(run(**options), arguments.json)
    if not launched():
        return start_ranks(arguments.given, arguments.ranks)
    with process_group(options.pop("device", "cpu")) as here, spinner() if is_first() else nullcontext():
        result = run(here, **options)
    return _print(result, arguments.json) if is_first() else 0


def _print(result: dict[str, Any], as_json: bool) -> int:
    """Print lists of rows as tables, single values as lines."""
    if as_json:
        print_json(result)
        return 0
    for name, value in result.items():
        print_table(name, value) if isinstance(value, list) else print(f"{name}: {shown(value)}")
    return 0
