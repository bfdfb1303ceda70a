"""``eplb-runtime warmup``: compile the planner ahead of the first job of a machine or an image."""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from .arguments import add_command
from .printing import print_json, spinner

POLICIES = {"incremental": "policy incremental", "": "for ranks that plan nothing"}
"""Of rank 0, and of the other ranks."""


def add(commands: Any) -> None:
    summary = "compile what decisions and migrations need, once on a machine: about a minute of one core"
    examples = """
  eplb-runtime warmup            # for example in a Dockerfile, after `pip install`
"""
    add_command(commands, "warmup", _run, summary, examples)


def _run(arguments: argparse.Namespace) -> int:
    from ..balancer.compile_ahead import compile_apart, functions_on_disk, is_compiled
    from ..utils.jit import cache_folder

    began = time.perf_counter()
    before = all(map(is_compiled, POLICIES))
    with spinner() as shown:

        def say(what: str) -> None:
            shown.update(f"compiling {what}: {functions_on_disk()} functions so far")

        for policy, what in POLICIES.items():
            if not is_compiled(policy):
                compile_apart(policy, on_wait=partial(say, what))
    done, seconds, folder = all(map(is_compiled, POLICIES)), time.perf_counter() - began, str(cache_folder())
    if arguments.json:
        print_json({"compiled": done, "compiled_before": before, "seconds": seconds, "folder": folder})
    elif not done:
        print("nothing was compiled: see `eplb-runtime warmup -vv`; jobs compile for themselves")
    else:
        print("the planner was compiled before" if before else f"compiled in {seconds:.0f} s", f"in {folder}", sep=", ")
    return 0 if done else 1
