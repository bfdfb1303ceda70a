"""What rank 0 of a job shows, as its config asks for: event log, state, page, metrics, summary."""

import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from http import HTTPStatus
from pathlib import Path
from textwrap import shorten

from ..config import BalancerConfig
from ..events import Event, EventLog, RebalanceCommitted, RebalancePlanned
from ..load.clock import Progress
from ..placement import Placement
from ..topology import Topology
from ..utils.files import write_file
from .events_file import NAME, LineFile, Record, job_record, record_of
from .metrics import NOT_INSTALLED, Metric, balance_of, exposition, metrics_of, scalars_of, summary_of, summary_text
from .page import Answer, PageServer, Route, finite, page, view_of
from .run_state import RunState

logger = logging.getLogger("eplb_runtime")

SUMMARY = "summary.json"
"""In the folder of a run, written when the job ends."""

Sink = Callable[[Record], None]


class DecisionLine:
    """Listener that logs a line for each decision and rebalance; of decisions that stay for one reason the first."""

    def __init__(self) -> None:
        self._planned: RebalancePlanned | None = None
        self._reason = ""

    def __call__(self, event: Event) -> None:
        if isinstance(event, RebalancePlanned):
            self._planned, before = event, self._reason
            self._reason = "" if event.moves else _NUMBERS.sub("", event.reason)
            if not self._reason or self._reason != before:
                _log(event, "")
        elif isinstance(event, RebalanceCommitted):
            planned, self._planned, predicted = self._planned, None, ""
            if planned is not None and planned.moves and None not in (planned.seconds_saved, planned.seconds_spent):
                predicted = f", to save {planned.seconds_saved:.3g} s for {planned.seconds_spent:.3g} s"
            _log(event, predicted)


_NUMBERS, _WIDTH = re.compile(r"[\d.]+"), 120


def _log(event: Event, more: str) -> None:
    """Log an event in a line; where it is too long its last fields are left out, whole ones."""
    line = f"step {event.step}: {event.brief()}{more}"
    while len(line) > _WIDTH and (fields := re.split(r"[;,] (?!.*[;,] )", line))[1:]:
        line = fields[0]
    logger.info("%s", shorten(line, _WIDTH, placeholder=" ..."))


class Observers:
    """Observers of a job, on its rank 0: a listener that makes a record of each event and hands it to sinks, in order:
    the job's state, its log, trackers. A sink that fails is named once in the log, and tried again with the next
    record.

    Args:
        topology: of one EP group.
        placement: where the experts are, and would be without a balancer.
        world_size: ranks of the job.
        progress: how far training is; called on other threads.
        layers_of_stage: as for `job_record`.

    Attributes:
        state: what the job has come to.
        sinks: by name.
        server: None: none was asked for, or its address could not be had.

    Raises:
        OSError: the folder of the run cannot be written to.
    """

    def __init__(
        self,
        config: BalancerConfig,
        topology: Topology,
        placement: Placement,
        world_size: int,
        progress: Callable[[], Progress],
        layers_of_stage: Sequence[int] = (),
    ) -> None:
        self._config, self._progress, self.state, self._events = config, progress, RunState(), EventLog()
        self._record_of = partial(record_of, start=placement, speed_R=config.speed_R)
        self._failing = set[str]()
        job = job_record(config, topology, placement, world_size, time.time(), layers_of_stage)
        self.state.apply(job)
        self.sinks: dict[str, Sink] = {"the state of the run": self.state.apply}
        self._log: LineFile | None = None
        if config.run is not None:
            self._log = LineFile(Path(config.run) / NAME, job)
            self.sinks["the event log"] = self._log.write
        self.server = self._serve()

    def listen_to(self, events: EventLog) -> None:
        """Subscribe to a job's events: each is heard, and decisions are logged, from now on."""
        self._events = events
        events.called_at_once.append(DecisionLine())
        events.subscribe(self.hear)

    def hear(self, event: Event) -> None:
        try:
            record = self._record_of(event, now=time.time())
        except Exception:
            logger.exception("the event %s cannot be shown; the job goes on", event.name)
            return
        for name, sink in list(self.sinks.items()):
            try:
                sink(record)
            except Exception as error:
                if name not in self._failing:
                    logger.warning("%s: %s: %s; the job goes on", name, type(error).__name__, error)
                self._failing.add(name)
            else:
                self._failing.discard(name)

    def track(self, tracker: Callable[[int, Mapping[str, float]], object]) -> None:
        """Call ``tracker`` with the step and `scalars_of` after each decision from now on, on the thread that hears
        events. Adds a sink to ``sinks``."""

        def sink(record: Record) -> None:
            if record["event"] == "RebalancePlanned":
                tracker(record["step"], scalars_of(self.state, self._progress()))

        self.sinks[f"the tracker {len(self.sinks)}"] = sink

    def close(self) -> None:
        """Close the event log and the page. Log the summary, unless the job failed; write it to ``summary.json`` in the
        folder of the run, if there is one. An error in writing it is logged. No events may come any more."""
        if self._log is not None:
            self._log.close()
        if self.server is not None:
            self.server.close()
        summary = summary_of(self.state, self._progress())
        if not hasattr(sys, "last_value") or hasattr(sys, "ps1"):  # else the job failed, which is the last word
            logger.info("%s", summary_text(summary, self._config.run))
        if self._config.run is not None:
            try:
                write_file(Path(self._config.run) / SUMMARY, json.dumps(summary, indent=2) + "\n")
            except OSError as error:
                logger.warning("the summary of the run is not written: %s", error)

    def balance(self) -> dict[str, float]:
        """Return `balance_of` the state: how even the newest measured load was, by name; empty before a measurement."""
        with self.state.lock:
            return balance_of(self.state)

    def metrics(self) -> list[Metric]:
        return metrics_of(self.state, self._progress(), time.time(), self._events.left_out)

    def _serve(self) -> PageServer | None:
        if self._config.listen is None:
            return None
        host, port = self._config.listen_address
        html = Answer(page().encode(), "text/html; charset=utf-8")
        routes: dict[str, Route] = {"/": lambda query: html, "/state": self._state, "/metrics": self._metrics}
        try:
            server = PageServer(host, port, self._config.listen_token, routes)
        except OSError as error:
            logger.warning("nothing listens on %s port %d: %s; training goes on", host, port, error.strerror or error)
            return None
        logger.info("the live page: %s (metrics at /metrics)", server.url)
        return server

    def _state(self, query: Mapping[str, str]) -> Answer:
        """Return how far training is, and the whole state if it is another than the one that was seen (``after``)."""
        view = None if query.get("after") == str(self.state.version) else view_of(self.state)
        told = {"progress": finite(asdict(self._progress())), "view": view}
        return Answer(json.dumps(told, allow_nan=False, separators=(",", ":")).encode(), "application/json")

    def _metrics(self, query: Mapping[str, str]) -> Answer:
        try:
            return Answer(*exposition(self.metrics()))
        except ImportError:
            return Answer(f"{NOT_INSTALLED}\n".encode(), status=HTTPStatus.NOT_IMPLEMENTED)
