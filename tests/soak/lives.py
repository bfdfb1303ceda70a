"""One life of a job after another, each ended by a kill, and what all of them have shown."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from .life import HANG_SECONDS, RECOVERY_SECONDS, SETTINGS, Life, Soak

_COUNTS = ("steps", "committed", "aborted", "resumed")


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    minutes: float = 2.0,
    seed: int = 0,
    processes: int = 3,
    bouts: int = 20,
    settings: tuple[str, ...] = tuple(SETTINGS),
    logs: str | None = None,
) -> dict[str, Any]:
    """Start ranks on this machine, life after life.

    Args:
        minutes: in which bouts of faults begin.
        seed: of the faults.
        processes: ranks of the job.
        bouts: in a life; then a rank is killed.
        settings: names in `life.SETTINGS`, which lives take in turn.
        logs: a folder for each rank's log; None: nothing is kept.

    Returns:
        JSON-able: `added_up`.

    Raises:
        SystemExit: one of the settings is unknown.
    """
    if unknown := [name for name in settings if name not in SETTINGS]:
        raise SystemExit(f"--settings {unknown[0]} is unknown; choose of: {', '.join(SETTINGS)}")
    ended, began = time.monotonic() + 60 * minutes, time.monotonic()
    lives: list[dict[str, Any]] = []
    first = 37 * seed
    while not lives or time.monotonic() < ended:
        number = len(lives)
        life = Life(number, seed, settings[number % len(settings)], bouts, first, True, ended)
        with TemporaryDirectory() as folder:
            of_ranks, problem = _live(life, processes, Path(logs or folder))
        lives.append(of_life(life, of_ranks, problem))
        first += bouts
        if lives[-1]["error"]:
            say_on_stderr(f"life {number} ({life.settings}): {lives[-1]['error']}")
    return added_up(lives, processes, seed, (time.monotonic() - began) / 60)


def added_up(lives: Sequence[dict[str, Any]], ranks: int, seed: int, minutes: float) -> dict[str, Any]:
    """JSON-able: ``passed`` (nothing ``failed``: no ranks parted, no bit differed, no job ended but by a kill, nothing
    hung or grew, and rebalances committed again after each fault); counts; ``longest_step_seconds``; the most that a
    rank held; ``faults``: a row for each point and fault with how often it was ``drawn``, ``reached`` and ``held``."""
    drawn, reached, held = Counter[Any](), Counter[Any](), Counter[Any]()
    for life in lives:
        for one in life["drawn"]:
            key = one["point"], one["fault"]
            drawn[key] += 1
            reached[key] += one["reached"]
            held[key] += one["held"]
    failed = [
        {"life": life["number"], "settings": life["settings"], "error": life["error"], "faults": life["drawn"][-2:]}
        for life in lives
        if life["error"]
    ]
    most = [max((life["held"][at] for life in lives), default=0) for at in range(3)]
    return {
        "passed": not failed,
        "failed": failed,
        "seed": seed,
        "ranks": ranks,
        "minutes": round(minutes, 2),
        "lives": len(lives),
        "kills": sum(life["killed"] for life in lives),
        **{name: sum(life[name] for life in lives) for name in _COUNTS},
        "longest_step_seconds": max((life["longest_step_seconds"] for life in lives), default=0.0),
        "threads": most[0],
        "descriptors": most[1],
        "resident_mib": round(most[2], 1),
        "faults": [
            {"point": key[0], "fault": key[1], "drawn": count, "reached": reached[key], "held": held[key]}
            for key, count in sorted(drawn.items())
        ],
    }


def of_life(life: Life, of_ranks: Sequence[dict[str, Any]], problem: str) -> dict[str, Any]:
    """What the ranks that lived to say so have said of a life."""
    errors = [problem] * bool(problem) + [one["error"] for one in of_ranks if one["error"]]
    errors += [grew for one in of_ranks for grew in one["grew"]]
    if len({one["digest"] for one in of_ranks if one.get("digest")}) > 1:
        errors.append("who outlived a kill has another placement than the others")
    first: dict[str, Any] = of_ranks[0] if of_ranks else {"drawn": []}
    return {
        "number": life.number,
        "settings": life.settings,
        "error": "; ".join(dict.fromkeys(errors)),
        "killed": any(one["killed"] for one in of_ranks),
        "drawn": first["drawn"],
        **{name: first.get(name, 0) for name in _COUNTS},
        "longest_step_seconds": max((one["longest_step_seconds"] for one in of_ranks), default=0.0),
        "held": [max((one["held"][at] for one in of_ranks), default=0) for at in range(3)],
    }


def _live(life: Life, ranks: int, folder: Path) -> tuple[list[dict[str, Any]], str]:
    """What each rank says of its life, of those that could; and what was wrong with how they ended."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # it outlives whoever is killed
    folder.mkdir(parents=True, exist_ok=True)
    places = [folder / f"life-{life.number}-rank-{rank}.json" for rank in range(ranks)]
    ranks_of_it = [
        context.Process(target=_rank, args=(life, rank, ranks, store.port, places[rank]), daemon=True)
        for rank in range(ranks)
    ]
    for process in ranks_of_it:
        process.start()
    longest = max(0.0, life.ends - time.monotonic()) + RECOVERY_SECONDS + 2 * HANG_SECONDS
    problem = _wait(ranks_of_it, places, time.monotonic() + longest)
    said = []
    for place in places:
        with suppress(FileNotFoundError):
            said.append(json.loads(place.read_text()))
    return said, problem


def _wait(processes: Sequence[BaseProcess], places: Sequence[Path], deadline: float) -> str:
    """Until all have ended; what was wrong with it."""
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
        process.join()
    silent = [rank for rank, place in enumerate(places) if not place.exists() and rank not in hung]
    if hung:
        return f"rank {', '.join(map(str, hung))} never ended"
    codes = {rank: processes[rank].exitcode for rank in silent}
    if len(silent) > 1 or any(code != -9 for code in codes.values()):
        return f"ranks died without a word (exit status by rank: {codes})"
    return ""


def _rank(life: Life, rank: int, ranks: int, port: int, place: Path) -> None:
    """The main function of a rank."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    logging.basicConfig(
        filename=place.with_suffix(".log"),
        level=logging.WARNING,
        format="%(asctime)s %(threadName)s %(levelname)s %(message)s",
    )
    logging.getLogger("eplb_runtime").setLevel(logging.DEBUG)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    result = Soak(life).run()
    written = place.with_suffix(".partial")
    written.write_text(json.dumps(result))
    written.rename(place)
    if not result["error"] and not result["killed"]:
        dist.barrier()
    os._exit(0)  # what was killed, or hangs, is not waited for
