"""Start a script or a command on several ranks with what torchrun sets, forked from the server that `run_ranks` uses.

torchrun imports torch once and each of its ranks imports all that the script needs: ten seconds of a core for each of
them. One test of each kind starts them by torchrun itself.
"""

import os
import runpy
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from time import monotonic

import torch
from support.ranks import compile_once, server_for, start

ROOT = Path(__file__).resolve().parents[2]


def run_script(
    script: str | Path, *arguments: str | Path, ranks: int, seconds: float = 200, server: str = "", **environment: str
) -> CompletedProcess[str]:
    """What all ranks printed, and the highest exit status.

    Args:
        script: a file, or the name of a module.
        server: the test module that `ranks.PRELOAD_OF` names what ranks import for.
        environment: variables of the ranks alone.
    """
    words = [str(script), *map(str, arguments)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryDirectory() as folder:
        logs = [(Path(folder) / f"{rank}.out", Path(folder) / f"{rank}.err") for rank in range(ranks)]
        there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment}
        processes = start_script(words, logs, there, server=server)
        end = monotonic() + seconds
        try:
            while left := [process for process in processes if process.is_alive()]:
                connection.wait([process.sentinel for process in left], max(0, end - monotonic()))
                if monotonic() > end or any(process.exitcode for process in processes):
                    break
        finally:  # also where the test's own time is over
            for process in processes:
                process.kill()
                process.join()
        said = ("".join(log[to].read_text() for log in logs) for to in (0, 1))
        return CompletedProcess(words, max(abs(process.exitcode or 0) for process in processes), *said)


def start_script(
    words: Sequence[str],
    logs: Sequence[tuple[Path, Path]],
    environment: Mapping[str, str],
    *,
    ranks_per_host: int | None = None,
    server: str = "",
    before: Callable[[int], None] | None = None,
) -> list[BaseProcess]:
    """A process for each rank.

    Args:
        words: a file, or the name of a module, and its arguments.
        logs: of each rank, what it prints and what it says of errors.
        before: called in each rank with the number of its host, before anything else.
    """
    compile_once()
    each = ranks_per_host or len(logs)
    places = [
        {
            "RANK": rank,
            "LOCAL_RANK": rank % each,
            "GROUP_RANK": rank // each,
            "WORLD_SIZE": len(logs),
            "LOCAL_WORLD_SIZE": each,
        }
        for rank in range(len(logs))
    ]
    of_ranks = [{name: str(value) for name, value in place.items()} | {**environment} for place in places]
    arguments = [([*words], of_rank, log, before) for of_rank, log in zip(of_ranks, logs, strict=True)]
    return start(_main, arguments, server_for(server, {}), daemon=False)


def _main(
    words: list[str], environment: dict[str, str], logs: tuple[Path, Path], before: Callable[[int], None] | None
) -> None:
    if before is not None:
        before(int(environment["GROUP_RANK"]))
    for log, stream in zip(logs, (1, 2), strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.update(OMP_NUM_THREADS="1", **environment)
    torch.set_num_threads(1)  # threads of the server are not here
    sys.argv = words
    run: Callable[..., object] = runpy.run_path if words[0].endswith(".py") else runpy.run_module
    if run is runpy.run_path:
        sys.path.insert(0, str(Path(words[0]).parent))
    run(words[0], run_name="__main__")
