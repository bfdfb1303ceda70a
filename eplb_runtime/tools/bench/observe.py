"""Measure what showing a job costs its training thread: event log, state, metrics and page, while somebody looks.

One process does fixed work for a step, again and again, and at the start of each block emits what a large job's rank 0
emits with a decision. Blocks that are shown, with a reader of the page beside them, take turns with blocks that are
not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ...config import BalancerConfig
from ...events import Event, EventLog, LoadMeasured, RebalanceCommitted, RebalancePlanned
from ...load.clock import Progress
from ...observe.start import Shown
from ...placement import Placement
from ...topology import Topology

LOOK_SECONDS = 2.0
"""As often as the page asks. The metrics are scraped as often, which is far more than anybody does."""
_READER = """
import sys, time, urllib.request
while True:
    for path in ("state", "metrics"):
        try:
            urllib.request.urlopen(sys.argv[1] + path, timeout=30).read()
        except OSError:
            pass
    time.sleep(float(sys.argv[2]))
"""


def run(
    repeats: int = 8,
    *,
    layers: int = 61,
    experts: int = 256,
    ranks: int = 32,
    interval: int = 50,
    step_seconds: float = 0.02,
) -> dict[str, Any]:
    """Time ``repeats`` blocks of ``interval`` steps, shown and not shown in turn.

    Args:
        step_seconds: of a step's work on this thread, half of it in the interpreter, where other threads are felt most.

    Returns:
        JSON-able: ``layers experts ranks interval repeats``; ``emit_ms``, what the training thread spends on handing
        events over; ``threads_ms``, the CPU time of all threads that show the job, the most that they can keep from a
        training thread that needs the interpreter all the time; ``added_ms``, how much longer a step is while the job
        is shown, which is mostly noise where other processes run: all a step, averaged over an interval, medians over
        blocks; ``step_ms`` of a step that is not shown; ``left_out``, events not taken.
    """
    topology = Topology(ranks, min(8, ranks))
    placement = Placement.initial(layers, experts, ranks, replica_slots=1)
    decision = _decision(placement, min(interval, 32))
    shown_seconds: list[float] = []
    quiet_seconds: list[float] = []
    emit_seconds: list[float] = []
    shown_threads: list[float] = []
    quiet_threads: list[float] = []
    work = _work(step_seconds)
    with TemporaryDirectory() as folder:
        config = BalancerConfig(interval=interval, replica_slots=1, run=Path(folder), listen=0)
        shown, events = Shown(config, topology, placement, ranks, lambda: Progress(1, step_seconds, 0.0)), EventLog()
        shown.follow(events)
        assert shown.server is not None
        with _reader(shown.server.url) as reader:
            for block in range(2 * repeats + 2):
                is_shown = block % 2 == 0
                reader.send_signal(signal.SIGCONT if is_shown else signal.SIGSTOP)
                began, threads = time.perf_counter(), _seconds_of_other_threads()
                spent = _emit(events, decision) if is_shown else 0.0
                for _ in range(interval):
                    work()
                seconds = (time.perf_counter() - began) / interval
                threads = (_seconds_of_other_threads() - threads) / interval
                if block > 1:  # the first two warm up
                    (shown_seconds if is_shown else quiet_seconds).append(seconds)
                    (shown_threads if is_shown else quiet_threads).append(threads)
                    emit_seconds += [spent / interval] if is_shown else []
        left_out = shown.left_out
        shown.close()
    added = median(a - b for a, b in zip(shown_seconds, quiet_seconds, strict=True))
    return {
        "layers": layers,
        "experts": experts,
        "ranks": ranks,
        "interval": interval,
        "repeats": repeats,
        "emit_ms": median(emit_seconds) * 1e3,
        "threads_ms": (median(shown_threads) - median(quiet_threads)) * 1e3,
        "added_ms": added * 1e3,
        "step_ms": median(quiet_seconds) * 1e3,
        "left_out": left_out,
    }


def _seconds_of_other_threads() -> float:
    """CPU time of this process so far without that of this thread."""
    return time.process_time() - time.thread_time()


def _emit(events: EventLog, decision: list[Event]) -> float:
    """Seconds that the thread spends on it."""
    began = time.perf_counter()
    for event in decision:
        events.emit(event)
    return time.perf_counter() - began


def _decision(placement: Placement, rows: int) -> list[Event]:
    """What rank 0 emits when experts move."""
    generator = np.random.default_rng(0)
    layers, experts = placement.num_layers, placement.num_experts
    load_TLE = generator.poisson(1000, (rows, layers, experts)).astype(np.int64)
    by_layer = np.full((3, layers), 1.2)
    after = placement.with_epoch(1)
    transfers = np.stack(
        [generator.integers(0, most, 500) for most in (layers, experts, *[placement.num_slots] * 2)], 1
    )
    imbalance = tuple(tuple(row) for row in generator.uniform(1, 2, (rows, layers)).tolist())
    return [
        LoadMeasured(1, rows, imbalance, 1.0, load=load_TLE, placements=((rows, placement),)),
        RebalancePlanned(1, 1, 500, "rebalance", "saves 9 s for 1 s", 1.4, 1.1, 0.1, by_layer=by_layer),
        RebalanceCommitted(
            1,
            epoch=1,
            digest=after.digest(),
            moved_experts=500,
            received_bytes=0,
            pause_seconds=0.5,
            placement=after,
            transfers=transfers,
            expert_bytes=(1 << 20,) * layers,
        ),
    ]


def _work(seconds: float) -> Callable[[], None]:
    """A step: half of it in the interpreter, half of it outside."""
    matrix = np.random.default_rng(0).standard_normal((128, 128))

    def spin(count: int) -> None:
        total = 0
        for number in range(count):
            total += number

    def multiply(count: int) -> None:
        for _ in range(count):
            matrix @ matrix

    spins, products = _calibrated(spin, seconds / 2), _calibrated(multiply, seconds / 2)

    def step() -> None:
        spin(spins)
        multiply(products)

    return step


def _calibrated(work: Callable[[int], None], seconds: float) -> int:
    """How often it is done in so many seconds, where nothing gets in between."""
    count = 8
    while (took := min(_seconds(work, count) for _ in range(3))) <= seconds / 4:
        count *= 2
    return max(1, int(count * seconds / took))


def _seconds(work: Callable[[int], None], count: int) -> float:
    began = time.perf_counter()
    work(count)
    return time.perf_counter() - began


@contextmanager
def _reader(url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads page and metrics; it can be stopped and set going again."""
    process = subprocess.Popen([sys.executable, "-c", _READER, url, str(LOOK_SECONDS)])
    try:
        yield process
    finally:
        process.kill()
        process.wait()
