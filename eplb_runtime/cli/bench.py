"""``eplb-runtime bench``: one command for each file of ``tools/bench/``."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

from .arguments import LOAD, InputError, add_command, adder, positive
from .inputs import require_extra
from .printing import note, print_json, print_table, spinner

ON_RANKS = {
    "dispatch": ("carrying tokens between ranks, beside plain all-to-alls", 20, "timings taken, the median counts"),
    "migrate": ("moving experts between ranks, beside plain messages", 10, "timings taken, the median counts"),
    "train": ("training steps, static, balanced and ideal; takes minutes", 8, "blocks of ten steps of each variant"),
}
"""Files of ``tools/bench/`` that need ranks: summary, repeats by default, and what is repeated."""
STEADY = 1.25
"""Blocks of equal work of which the slowest takes more than so many times as long as the fastest were disturbed."""


def add(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure on this machine: planning, dispatch, migration, training")
    benches = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    planner = add_command(
        benches,
        "planner",
        _planner,
        "balance and time of the policies",
        """
  eplb-runtime bench planner
  eplb-runtime bench planner load.npz --json
""",
    )
    planner.add_argument("loads", metavar="LOAD", nargs="*", help=f"{LOAD} (default: generated loads)")
    adder(planner)("--repeats", "N", positive, "timings taken, the median counts (default: 5)", default=5)
    for what in ON_RANKS:
        _add_on_ranks(benches, what)


def _add_on_ranks(benches: Any, what: str) -> None:
    summary, repeats, meaning = ON_RANKS[what]
    command = add_command(
        benches,
        what,
        _on_ranks,
        summary,
        f"""
  eplb-runtime bench {what}                                             # starts two ranks on this machine
  torchrun --nproc-per-node 4 -m eplb_runtime.cli bench {what} --json   # on these
""",
    )
    command.set_defaults(what=what, brief=False, profile=None, device="cpu")
    add = adder(command)
    add("--repeats", "N", positive, f"{meaning} (default: {repeats})", default=repeats)
    add("--ranks", "R", positive, "ranks to start when not under torchrun (default: 2)", default=2)
    if what == "train":
        wider = "of an expert's hidden layer: more of it, more of a step is computing (default: 1024)"
        add("--width", "W", positive, wider, default=1024)
        command.add_argument("--brief", action="store_true", help="only experts fixed and experts moved: a minute")
        add("--profile", "DIR", Path, "write a profiler trace of each variant and rank there, for `trace compare`")
    else:
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the ranks (default: cpu)")
    if what == "dispatch":
        add("--hidden", "D", positive, "numbers in a row (default: 512)", default=512)


def _planner(arguments: argparse.Namespace) -> None:
    from ..tools.bench.planner import run

    with spinner() as shown:
        result = run(arguments.loads, arguments.repeats, on_progress=shown.update)
    _print(result, arguments.json)


def _on_ranks(arguments: argparse.Namespace) -> int:
    """Measure on the ranks of a launcher, or start some that run this same command."""
    what, profile = arguments.what, arguments.profile
    if arguments.brief and profile:
        raise InputError("--profile goes without --brief")
    if profile and profile.exists() and not profile.is_dir():
        raise InputError(f"--profile {profile}: this is a file; give a folder")
    if what == "train":
        require_extra("transformers", "bench train")
    from ..tools.launch import is_first, launched, process_group, start_ranks

    options = {name: getattr(arguments, name) for name in ("width", "hidden") if name in arguments}
    if not launched():
        words = ["--repeats", str(arguments.repeats), *(["--json"] if arguments.json else [])]
        words += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        words += ["--brief"] if arguments.brief else ["--device", arguments.device] if what != "train" else []
        words += ["--profile", str(profile)] if profile else []
        return start_ranks(["bench", what, *words], arguments.ranks)
    if what == "train":
        options |= {"brief": arguments.brief, "profile": profile}
    with process_group(arguments.device) as device, spinner() if is_first() else nullcontext() as shown:
        if shown is not None and what == "train":
            options["on_progress"] = shown.update
        bench = import_module(f"..tools.bench.{what}", __package__)
        result = bench.run(device, arguments.repeats, **options)
    if is_first():
        _print(result, arguments.json)
        if arguments.brief and max(row["slowest_over_fastest"] for row in result["train"]) > STEADY:
            note("other processes use these cores: the times say little; try again on a quiet machine")
    return 0


def _print(result: Mapping[str, Any], as_json: bool) -> None:
    """Lists of rows as tables, single values as lines."""
    if as_json:
        print_json(result)
        return
    for name, value in result.items():
        if isinstance(value, list):
            print_table(name, value)
        else:
            print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
