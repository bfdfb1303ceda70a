"""Start a script or a command on several ranks with what torchrun sets, forked from the server that `run_ranks` uses.

torchrun imports torch once and each of its ranks imports all that the script needs: ten seconds of a core for each of
them. One test of each kind starts them by torchrun itself.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from time import monotonic
from unittest.mock import patch

import torch
from ranks import compile_once, server_for

ROOT = Path(__file__).resolve().parents[1]


def run_script(
    script: str | Path, *arguments: str | Path, ranks: int, seconds: float = 200, server: str = "", **environment: str
) -> CompletedProcess[str]:
    """What all ranks printed, and the highest exit status.

    Args:
        script: a file, or the name of a module.
        server: the test module that `ranks.PRELOAD_OF` names what ranks import for.
        environment: variables of the ranks alone.
    """
    compile_once()
    context = multiprocessing.get_context("forkserver")
    words = [str(script), *map(str, arguments)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_main, args=(rank, ranks, port, folder, words, environment)) for rank in range(ranks)
        ]
        with patch.object(forkserver, "connect_to_new_process", server_for(server, {}).connect_to_new_process):
            for process in processes:
                process.start()
        end = monotonic() + seconds
        while left := [process for process in processes if process.is_alive()]:
            connection.wait([process.sentinel for process in left], max(0, end - monotonic()))
            if monotonic() > end or any(process.exitcode for process in processes):
                for process in processes:
                    process.kill()
        said = ("".join((Path(folder) / f"{rank}.{to}").read_text() for rank in range(ranks)) for to in ("out", "err"))
        return CompletedProcess(words, max(abs(process.exitcode or 0) for process in processes), *said)


def _main(rank: int, ranks: int, port: int, folder: str, words: list[str], environment: dict[str, str]) -> None:
    for to, stream in (("out", 1), ("err", 2)):
        os.dup2(os.open(f"{folder}/{rank}.{to}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    size = str(ranks)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, OMP_NUM_THREADS="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), **environment)
    torch.set_num_threads(1)  # threads of the server are not here
    sys.argv = words
    run: Callable[..., object] = runpy.run_path if words[0].endswith(".py") else runpy.run_module
    if run is runpy.run_path:
        sys.path.insert(0, str(Path(words[0]).parent))
    run(words[0], run_name="__main__")
