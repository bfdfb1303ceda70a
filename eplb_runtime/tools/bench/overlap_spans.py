"""What `overlap.py` measures with: a slow link, where each thread of a rank spends its time, and a trace of it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

TOKENS, PIPELINE, BLOCK = "waits for tokens", "waits for the pipeline", "block"


class SlowLink:
    """A rank's way to the others: an exchange is over when so many bytes a second have carried it.

    Args:
        watched: entered while the rank waits for one.

    Attributes:
        bytes_per_second: None: as fast as it really is.
        shared: whether exchanges that are under way at once wait for each other; else each has this speed by itself.
    """

    def __init__(self, watched: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._watched = watched
        self.shared = False
        self.bytes_per_second: float | None = None
        self.carried = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def slowed(self, exchange: Callable[..., dist.Work | None]) -> Callable[..., dist.Work | _Slowed | None]:
        """``AllToAll._exchange``, over this link."""

        def over_link(out: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> dist.Work | _Slowed | None:
            work = exchange(out, rows, received, sent)
            size = max(out.nbytes, rows.nbytes)
            with self._lock:
                self.carried += size
                if work is None:
                    return None
                if self.bytes_per_second is None:
                    return _Slowed(work, 0.0, self._watched)
                begins = max(self._free, time.perf_counter()) if self.shared else time.perf_counter()
                self._free = begins + size / self.bytes_per_second
                return _Slowed(work, self._free, self._watched)

        return over_link


@dataclass(frozen=True)
class _Slowed:
    work: dist.Work
    due: float
    watched: Callable[[], AbstractContextManager[None]]

    def wait(self) -> None:
        """Until the message is here, and the link had the time to carry it."""
        with self.watched():
            self.work.wait()
            time.sleep(max(0.0, self.due - time.perf_counter()))


@dataclass(frozen=True)
class Span:
    """Seconds of a clock that all processes of a machine share. ``thread``: 0 the training thread, 1 the one beside."""

    name: str
    thread: int
    begin: float
    end: float


class OverlapSpans:
    """Where the threads of this rank spend their time."""

    def __init__(self) -> None:
        self.taken: list[Span] = []
        self._first = threading.get_ident()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            thread = int(threading.get_ident() != self._first)
            self.taken.append(Span(name, thread, began, time.perf_counter()))

    def pipeline(self, arrived: Callable[..., None]) -> Callable[..., None]:
        """``OverlappedForwardBackward.arrived``."""

        def noted(works: Sequence[dist.Work]) -> None:
            with self.span(PIPELINE):
                arrived(works)

        return noted

    def part(self, name: str, work: Callable[..., None]) -> Callable[..., None]:
        """A half of a block."""

        def noted(action: Any, context: Any) -> None:
            with self.span(f"{name} of stage {action.stage_index}, micro-batch {action.microbatch_index}"):
                work(action, context)

        return noted

    def take(self) -> list[Span]:
        taken, self.taken = self.taken, []
        return taken


@dataclass(frozen=True)
class SpanBlocks:
    """Seconds inside a step's blocks on one rank.

    Args:
        total: of the blocks.
        waiting: of all threads, for tokens.
        exposed: in which no thread computes and one at least waits for tokens.
    """

    total: float
    waiting: float
    exposed: float

    @classmethod
    def of(cls, spans: Sequence[Span]) -> SpanBlocks:
        """What a step's spans say, by a walk over all their ends."""
        blocks = [(span.begin, span.end) for span in spans if span.name == BLOCK]
        total = waiting = exposed = 0.0
        for begin, end in blocks:
            inside = [span for span in spans if span.name != BLOCK and begin <= span.begin and span.end <= end]
            edges = sorted({begin, end, *(edge for span in inside for edge in (span.begin, span.end))})
            total += end - begin
            for one, next_ in pairwise(edges):
                running = [span for span in inside if span.begin <= one and next_ <= span.end]
                working, for_tokens, for_others = (
                    {span.thread for span in running if kind(span.name)}
                    for kind in (
                        lambda name: name not in (TOKENS, PIPELINE),
                        lambda name: name == TOKENS,
                        lambda name: name == PIPELINE,
                    )
                )
                waiting += len(for_tokens) * (next_ - one)
                if for_tokens and not working - for_tokens - for_others:
                    exposed += next_ - one
        return cls(total, waiting, exposed)


def write_trace(folder: Path, rank: int, steps: Sequence[tuple[str, Sequence[Span]]]) -> None:
    """One Chrome trace a rank, for Perfetto: a row for each thread; steps one after the other, each named."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}},
        {"ph": "M", "pid": rank, "tid": 0, "name": "thread_name", "args": {"name": "training thread"}},
        {"ph": "M", "pid": rank, "tid": 1, "name": "thread_name", "args": {"name": "second thread"}},
    ]
    for name, spans in steps:
        for span in spans:
            shown = f"{name}: {span.name}" if span.name == BLOCK else span.name
            microseconds = {"ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6}
            events.append({"ph": "X", "pid": rank, "tid": span.thread, "name": shown, "cat": name, **microseconds})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"overlap-{rank}.json").write_text(json.dumps({"traceEvents": events}))
