"""Compiles the code of decisions and migrations without making anybody wait.

Compiled code is stored on disk (numba's cache). Missing code is compiled by a process of its own: a compiler in this
process would hold the interpreter, and with it the training thread, for seconds at a time.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
import numpy as np
import xxhash

from ..load.forecast import dealt_imbalance
from ..migration.schedule import warm_up as compile_schedules
from ..moe.routing.sources import split_for_rank
from ..moe.routing.tables import SplitTables
from ..placement import Placement
from ..planner.evaluate import predicted_imbalance
from ..planner.planning import plan
from ..planner.policies import LAYOUTS
from ..topology import Topology
from ..utils.jit import _PACKAGE as PACKAGE
from ..utils.jit import cache_folder, remove_older

logger = logging.getLogger("eplb_runtime")

MOST_SECONDS = 600.0
"""Timeout of the other process, which ends itself then; after it this one compiles for itself."""
_NO_POLICY = "no policy"
LOOK_SECONDS = 0.25
"""Period in which this process looks whether the other has ended."""


def compile_here(policy: str) -> None:
    """Compile in this process, or read compiled code from disk.

    Args:
        policy: of a rank that plans; empty: this rank does not.
    """
    compile_schedules()
    replicated = Placement(np.array([[0, 1, 1, 0]]), 2, 2, np.array([[0, 2]]))
    predicted_imbalance(np.ones((1, 2)), replicated)
    split_for_rank(np.ones((2, 2), dtype=np.int64), SplitTables.of(replicated), 0, 0, ranks_per_node=1)
    if policy:
        compile_planner(policy)


def compile_planner(policy: str = "incremental") -> None:
    """Plan and split a toy problem once, which compiles everything that ``policy`` (PlanError: unknown) and the
    splitter run."""
    load = np.arange(1.0, 17.0).reshape(2, 8)
    in_home = "home" in LAYOUTS.get(policy, ())[:1]
    current = Placement.initial(2, 8, 4, 1)
    dealt_imbalance(load, load, 4)
    plan(load, Topology(4, 2), slots_per_rank=3, policy=policy, current=current if in_home else None)
    split_for_rank(np.ones((4, 8), dtype=np.int64), SplitTables.of(current), 0, 0, ranks_per_node=2)


def compile_apart(policy: str, ended: threading.Event | None = None) -> None:
    """Compile in another process on this machine, which goes on for the next job where this one ends. Never raises.

    Args:
        policy: as for `compile_here`.
        ended: set when this job needs it no more.
    """
    if not compiles() or is_compiled(policy):
        return
    last = time.monotonic() + MOST_SECONDS
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:  # in a session of its own: what ends a job does not end it
        environment = {"NUMBA_OPT": "1", **os.environ}  # a quarter less time to compile
        command = [sys.executable, "-m", __name__, policy]
        process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
        while process.poll() is None and time.monotonic() < last and not (ended and ended.is_set()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        if process.returncode:
            logger.debug("the compiling process ended with %d", process.returncode)
    except (OSError, subprocess.SubprocessError) as error:
        logger.debug("no compiling process: %s", error)


def compiles() -> bool:
    """Whether numba compiles here at all."""
    return not numba.config.DISABLE_JIT  # type: ignore[attr-defined]


def is_compiled(policy: str) -> bool:
    """Return whether all code of decisions was compiled on this machine, for these very sources.

    Code of a rank that plans nothing is part of what each policy compiles.
    """
    if not compiles():
        return False
    mark = _mark(policy)
    of_any_policy = f"*{mark.name.removeprefix(_NO_POLICY)}"
    return mark.exists() or (not policy and any(mark.parent.glob(of_any_policy)))


def _mark(policy: str) -> Path:
    """File next to numba's own that marks all code as compiled for this policy, in a folder named by the sources.
    numba's files are of use at one place alone: a copy of this package has to be compiled again."""
    place = xxhash.xxh3_64_hexdigest(str(PACKAGE).encode())
    return cache_folder() / f"{policy or _NO_POLICY}.{place}.compiled"


def main(policy: str) -> None:
    """Run in the other process: one of them at a time compiles, the others find it done."""
    mark = _mark(policy)
    with open(mark.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_compiled(policy):
            compile_here(policy)
            mark.touch()
            remove_older()


if __name__ == "__main__":
    signal.alarm(round(MOST_SECONDS))
    main(sys.argv[1])
