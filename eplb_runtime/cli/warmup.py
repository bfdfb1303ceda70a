"""``eplb-runtime warmup``: compile the planner ahead of the first job of a machine or an image."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .arguments import add_command
from .printing import note, print_json, spinner

POLICIES = ("incremental", "incremental under a budget", "")
"""Of rank 0, with `max_moves` or `max_pause_seconds` too, and of the other ranks, which plan nothing."""


def add(commands: Any) -> None:
    add_command(
        commands,
        "warmup",
        _run,
        "compile what decisions and migrations need, once on a machine: about a minute of one core",
        """
  eplb-runtime warmup            # for example in a Dockerfile, after `pip install`
""",
    )


def _run(arguments: argparse.Namespace) -> int:
    from ..balancer.compile_ahead import compile_apart, functions_on_disk, is_compiled
    from ..utils.jit import cache_folder
    from ..utils.tables import counted

    began = time.perf_counter()
    before = all(is_compiled(policy) for policy in POLICIES)
    with spinner() as shown:
        for policy in POLICIES:
            if is_compiled(policy):
                continue
            what, started = _named(policy), time.perf_counter()
            note(f"compiling {what}: {counted(functions_on_disk(), 'function')} on the disk before")

            def show_progress(what: str = what) -> None:
                shown.update(f"compiling {what}: {counted(functions_on_disk(), 'function')} so far")

            compile_apart(policy, on_wait=show_progress)
            if is_compiled(policy):
                taken = time.perf_counter() - started
                note(f"compiled {what}: {counted(functions_on_disk(), 'function')}, {taken:.0f} s")
    done = all(is_compiled(policy) for policy in POLICIES)
    seconds = time.perf_counter() - began
    folder = str(cache_folder())
    if arguments.json:
        print_json({"compiled": done, "compiled_before": before, "seconds": seconds, "folder": folder})
    elif not done:
        print("nothing was compiled: see `eplb-runtime -v warmup`; jobs compile for themselves")
    else:
        print(
            f"the planner was compiled before, in {folder}" if before else f"compiled in {seconds:.0f} s, in {folder}"
        )
    return 0 if done else 1


def _named(policy: str) -> str:
    return f"policy {policy}" if policy else "for ranks that plan nothing"
