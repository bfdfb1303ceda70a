"""Run a function on several ranks, each a process, and hand back what each returned.

The test process hosts the store, as torchrun's agent does. Ranks are forked from a server that has imported the heavy
modules once, so a test costs a second and not ten.
"""

import faulthandler
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache, partial
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.moe_models import FAMILIES
from torch.distributed import distributed_c10d

from eplb_runtime.balancer import decision
from eplb_runtime.balancer.planner_process import PlannerProcess
from eplb_runtime.distributed import transports
from eplb_runtime.planner import plan

PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "transformers.models.auto.modeling_auto",
    *(f"transformers.models.{family}.modeling_{family}" for family in FAMILIES),
    *(f"eplb_runtime.hosts.transformers.{part}" for part in ("describe", "folders")),
    "eplb_runtime.tools.verification",
    "logging.handlers",
    "pytest",
    "support.moe_models",
    "support.ranks",
]
"""What ranks would import otherwise, each for itself: seconds of every test."""
PRELOAD_OF = {
    "megatron_jobs": ["support.megatron_ranks"],
    "test_megatron": ["support.megatron_ranks"],
    "test_walks": ["support.megatron_ranks"],
    "newer_megatron": ["support.newer_megatron_ranks"],
}
"""What ranks import besides, by the name of the module of what they do: the longest that it begins with."""
FINISH_SECONDS = float(os.environ.get("EPLB_TEST_FINISH_SECONDS", "240"))
FINISH_AFTER_FAILURE_SECONDS = 60.0
"""Where one rank has failed, the others may wait for it without end: they still have so long to say what they saw."""
STACKS_BEFORE_SECONDS = 5.0
"""Ranks that are about to be ended print where each of their threads stands so long before."""
BANDWIDTH_BYTES = 1 << 20
"""An attach learns the speed of links from one short message: longer ones took a quarter of its CPU time."""


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    expect_exit: tuple[int, ...] = (),
    backend: str = "gloo",
    start_method: str = "forkserver",
    **environment: str,
) -> list[Any]:
    """``[function(rank, *args) for every rank]``, run at once with a process group between them.

    Args:
        expect_exit: ranks that are meant to end without returning (killed); their result is None.
        backend: of the process group.
        start_method: ``"spawn"`` for ranks that use a GPU: a driver that somebody has touched before does not survive
            a fork.
        environment: variables that must be there before anything is imported.

    Raises:
        AssertionError: a rank raised, died or did not finish; the message holds its traceback.
    """
    compile_once()
    server = server_for(_module_of(function), environment) if start_method == "forkserver" else None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with TemporaryDirectory() as folder:
        of_all = (world_size, store.port, folder, backend, function, args, FINISH_SECONDS)
        with patch.dict(os.environ, environment):  # those that are spawned take it from here
            processes = start(_rank_main, [(rank, *of_all) for rank in range(world_size)], server)
        try:
            stuck = join(processes, Path(folder), expect_exit)
        finally:  # also where the test's own time is over: they would go on using what the next test needs
            for process in processes:
                process.kill()
        results, errors = [], []
        for rank in range(world_size):
            path = Path(folder) / f"{rank}.pt"
            if path.exists():
                error, value = torch.load(path, weights_only=False)
            elif rank in expect_exit:
                error, value = None, None
            else:
                error, value = ("did not finish" if rank in stuck else "died"), None
            results.append(value)
            if error is not None:
                errors.append(f"rank {rank}:\n{error}")
        assert not errors, "\n".join(errors)
    return results


def start(
    main: Callable[..., None],
    arguments: Sequence[tuple[Any, ...]],
    server: forkserver.ForkServer | None,
    daemon: bool = True,
) -> list[BaseProcess]:
    """A process for each rank's arguments, forked from a server, or a fresh one.

    Args:
        daemon: they end with this process, and may not have processes of their own.
    """
    context = multiprocessing.get_context("forkserver" if server else "spawn")
    processes: list[BaseProcess] = [context.Process(target=main, args=of_rank, daemon=daemon) for of_rank in arguments]
    with patch.object(forkserver, "connect_to_new_process", server and server.connect_to_new_process):
        for process in processes:
            process.start()
    return processes


def join(processes: Sequence[BaseProcess], folder: Path, expect_exit: Collection[int] = ()) -> list[int]:
    """Wait for ranks to end; those that have not.

    Args:
        folder: of what they leave.
        expect_exit: ranks that end without leaving anything, and have not failed.
    """
    end, failed = time.monotonic() + FINISH_SECONDS, False
    while True:
        stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
        ended = {*range(len(processes))} - {*stuck, *expect_exit}
        if not failed and any(not (folder / f"{rank}.pt").exists() or _failed(folder, rank) for rank in ended):
            failed, end = True, min(end, time.monotonic() + FINISH_AFTER_FAILURE_SECONDS)
        left = end - time.monotonic()
        if not stuck or left <= 0:
            return stuck
        connection.wait([processes[rank].sentinel for rank in stuck], left)


def rows_of(table: Collection[Any], *short: Any) -> list[Any]:
    """Rows of a table as parameters of a test: those that are named here run always, the others are long."""
    return [pytest.param(row, marks=() if row in short else pytest.mark.long) for row in table]


def _failed(folder: Path, rank: int) -> bool:
    return (folder / f"{rank}.failed").exists()


def server_for(module: str, environment: Mapping[str, str]) -> forkserver.ForkServer:
    """What ranks are forked from whose function is of this module."""
    begins = max((name for name in PRELOAD_OF if module.startswith(name)), key=len, default=None)
    return _server((*PRELOAD_OF.get(begins or "", ()), *PRELOAD, "support.frozen"), tuple(environment.items()))


@cache
def _server(preload: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> forkserver.ForkServer:
    """One that has imported these. It finds modules by the environment alone, and passes over what it does not find."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(list(preload))
    folders = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    # A pool of compilers is processes and a thread, which would not survive a fork.
    alone = {"PYTHONPATH": os.pathsep.join(folders), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    with patch.dict(os.environ, {**alone, **dict(environment)}):
        server.ensure_running()
    return server


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return function.__module__.rpartition(".")[2]


@cache
def compile_once() -> None:
    """What ranks read from the disk then."""
    process = PlannerProcess(FINISH_SECONDS)
    process.is_ready(FINISH_SECONDS)
    process.close()


class PlansHere:
    """In place of a `PlannerProcess`, whose start takes a second of each test: plans in the rank."""

    plan, is_ready, close = staticmethod(plan), staticmethod(lambda seconds: True), staticmethod(lambda: None)

    def __init__(self, seconds: float) -> None: ...


def share_gloo_device() -> None:
    """All groups of this rank that are made by `torch.distributed` hear by one thread.

    Each has a thread of its own otherwise, which wakes 100 times a second: with the 60 groups of Megatron, 4 ranks take
    a fifth of two cores for that. The balancer's own groups are left as they are.
    """
    plain, device = distributed_c10d.ProcessGroupGloo, distributed_c10d.ProcessGroupGloo.create_device("127.0.0.1")

    class OnSharedDevice(plain):  # type: ignore[valid-type, misc]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options = plain._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = OnSharedDevice


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    backend: str,
    function: Callable[..., Any],
    args: Any,
    seconds: float,
) -> None:
    faulthandler.dump_traceback_later(max(1.0, seconds - STACKS_BEFORE_SECONDS), file=2)
    torch.set_num_threads(1)
    decision.PlannerProcess = PlansHere  # type: ignore[misc]
    transports.FIRST_BYTES, transports.LEAST_SECONDS = BANDWIDTH_BYTES, 0.0
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    if mutant := os.environ.get("EPLB_TEST_MUTANT"):
        from support import mutants

        mutants.apply(mutant)
    share_gloo_device()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        outcome = (None, function(rank, *args))
    except BaseException:
        outcome = (traceback.format_exc(), None)
    if outcome[0] is not None:
        (Path(folder) / f"{rank}.failed").touch()
    partial = Path(folder) / f"{rank}.partial"
    torch.save(outcome, partial)
    partial.rename(Path(folder) / f"{rank}.pt")
    if outcome[0] is None:
        with suppress(RuntimeError):  # one was killed
            dist.barrier()
    os._exit(0)
