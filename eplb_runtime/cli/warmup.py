"""``eplb-runtime warmup``: compile the planner ahead of the first job of a machine or an image."""

from __future__ import annotations

import argparse
import time
from typing import Any

from .arguments import add_command
from .printing import print_json, spinner

POLICIES = ("incremental", "")  # of rank 0, and of the other ranks, which plan nothing


def add(commands: Any) -> None:
    summary = "compile what decisions and migrations need, once on a machine: half a minute of one core"
    examples = """
  eplb-runtime warmup            # for example in a Dockerfile, after `pip install`
"""
    add_command(commands, "warmup", _run, summary, examples)


def _run(arguments: argparse.Namespace) -> int:
    from ..balancer.compile_ahead import compile_apart, is_compiled
    from ..utils.jit import cache_folder

    began = time.perf_counter()
    before = all(map(is_compiled, POLICIES))
    with spinner():
        for policy in (one for one in POLICIES if not is_compiled(one)):
            compile_apart(policy)
    done, seconds, folder = all(map(is_compiled, POLICIES)), time.perf_counter() - began, str(cache_folder())
    if arguments.json:
        print_json({"compiled": done, "compiled_before": before, "seconds": seconds, "folder": folder})
    elif not done:
        print("nothing was compiled: see `eplb-runtime warmup -vv`; jobs compile for themselves")
    else:
        print("the planner was compiled before" if before else f"compiled in {seconds:.0f} s", f"in {folder}", sep=", ")
    return 0 if done else 1
