"""Training under faults at each point of the protocol, beside an undisturbed twin: ``python -m tests.soak``.

One life of a job after another, each ended by a kill. Exit status 1: a bit differs, ranks part, a job ends but by a
kill, or a thing hangs or grows.
"""

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1])]

from support import ranks  # noqa: E402

from tests.benchmarks.harness import command  # noqa: E402

from .life import HANG_SECONDS, SETTINGS, Life, live, victim_of  # noqa: E402


def run(
    minutes: float = 2.0,
    seed: int = 0,
    processes: int = 3,
    bouts: int = 20,
    settings: tuple[str, ...] = tuple(SETTINGS),
) -> dict[str, Any]:
    """Start ranks on this machine, life after life, for so many minutes in which bouts of faults begin; after ``bouts``
    of a life a rank is killed. Lives take ``settings``, names in `life.SETTINGS`, in turn.

    JSON-able: ``passed`` (nothing ``failed``: no ranks parted, no bit differed, no job ended but by a kill, nothing
    hung or grew, and rebalances committed again after each fault); counts; ``faults``: a row for each point and fault
    with how often it was ``drawn`` and ``reached``."""
    ends, number = time.monotonic() + 60 * minutes, 0
    drawn, reached, counts = Counter[Any](), Counter[Any](), Counter[str]()
    failed: list[dict[str, Any]] = []
    while not number or time.monotonic() < ends:
        life = Life(number, seed, settings[number % len(settings)], bouts, ends)
        ranks.FINISH_SECONDS = max(0.0, ends - time.monotonic()) + 3 * HANG_SECONDS
        error, said = "", []
        try:
            killed = victim_of(life, processes)
            said = [one for one in ranks.run_ranks(processes, live, life, expect_exit=(killed,)) if one is not None]
        except AssertionError as problem:
            error = str(problem)
        if len({one["digest"] for one in said} - {""}) > 1:
            error = "who outlived a kill has another placement than the others"
        if error:
            print(f"life {number} ({life.settings}): {error}", file=sys.stderr, flush=True)
            failed.append({"life": number, "settings": life.settings, "error": error[-2000:]})
        for one in said[:1]:
            counts.update(one["counts"])
            drawn.update(fault[:2] for fault in one["drawn"])
            reached.update(fault[:2] for fault in one["drawn"] if fault[2])
        number += 1
    rows = [{"point": p, "fault": f, "drawn": n, "reached": reached[p, f]} for (p, f), n in sorted(drawn.items())]
    return {"passed": not failed, "failed": failed, "lives": number, **counts, "faults": rows}


if __name__ == "__main__":
    command(run)
