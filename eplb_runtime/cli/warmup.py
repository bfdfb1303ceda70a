"""Compile what decisions and migrations need, once on a machine: half a minute of one core.

examples:
  eplb-runtime warmup            # for example in a Dockerfile, after `pip install`
"""

import argparse
import time

from .printing import print_json, spinner


def run(arguments: argparse.Namespace) -> int:
    from ..balancer.planner_process import PlannerProcess
    from ..utils.jit import cache_folder, compiles, is_compiled

    began, before = time.perf_counter(), is_compiled()
    if compiles() and not before:
        process = PlannerProcess(seconds=0.0)
        with spinner():
            process.is_ready(600.0)
        process.close()
    done, seconds, folder = is_compiled(), time.perf_counter() - began, str(cache_folder())
    if arguments.json:
        print_json({"compiled": done, "compiled_before": before, "seconds": seconds, "folder": folder})
    elif not done:
        print("nothing was compiled (NUMBA_DISABLE_JIT, a folder that cannot be written, or the compiler was killed)")
    else:
        print("the planner was compiled before" if before else f"compiled in {seconds:.0f} s", f"in {folder}", sep=", ")
    return 0 if done else 1
