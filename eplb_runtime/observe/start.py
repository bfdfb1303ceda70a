"""What rank 0 of a job shows, put together from what the config asks for."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path

from .. import __version__
from ..config import BalancerConfig
from ..events import EventLog
from ..load.clock import Progress
from ..placement import Placement
from ..topology import Topology
from ..utils.files import write_file
from .event_log import EventWriter
from .metrics import Metric, balance_of, metrics_of, scalars_of
from .observer import Observer
from .prometheus import NOT_INSTALLED, exposition
from .records import Record, job_record
from .report import SCRIPTS
from .server import Answer, PageServer, Route, asset
from .state import RunState
from .summary import summary_of, summary_text
from .trackers import Tracker
from .view import as_json, progress_view, view_of

logger = logging.getLogger("eplb_runtime")

SUMMARY = "summary.json"
"""In the folder of a run, written when the job ends."""
PAGE: Mapping[str, Route] = {
    "/": asset("index.html", "text/html; charset=utf-8"),
    **{f"/{name}": asset(name, "text/javascript; charset=utf-8") for name in SCRIPTS},
    "/page.css": asset("page.css", "text/css; charset=utf-8"),
}


class Shown:
    """What shows a job, on its rank 0: its state, kept up by the observer, and a server where one is asked for.

    Args:
        topology: of one EP group.
        placement: where the experts stand.
        world_size: ranks of the job.
        layers_of_stage: as for `job_record`.
        progress: how far training is; called on other threads.

    Attributes:
        state: what the job has come to.
        server: None: nobody has asked for one, or its address could not be had.

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
        self._config = config
        self._progress = progress
        self._observer = Observer(placement, config.speed_R)
        self._cached: tuple[int, bytes] = (-1, b"")
        job = job_record(
            config,
            topology,
            placement,
            world_size=world_size,
            now=time.time(),
            version=__version__,
            layers_of_stage=layers_of_stage,
        )
        self.state = RunState()
        self.state.apply(job)
        self._observer.add("the state of the run", self.state.apply)
        if config.run is not None:
            writer = EventWriter(Path(config.run), job)
            self._observer.add("the event log", writer.write, writer.close)
        self.server = self._serve()

    def follow(self, events: EventLog) -> None:
        """Listen from now on."""
        events.subscribe(self._observer.hear)

    def track(self, tracker: Tracker) -> None:
        """Give it the numbers of each decision, on the observer's thread."""

        def sink(record: Record) -> None:
            if record["event"] == "RebalancePlanned":
                tracker(record["step"], scalars_of(self.state, self._progress()))

        self._observer.add(f"the tracker {len(self._observer)}", sink)

    def close(self) -> None:
        """What was heard is written; the page is gone. Says what the run has come to."""
        self._observer.close()
        if self.server is not None:
            self.server.close()
        summary = summary_of(self.state, self._progress())
        logger.info("%s", summary_text(summary))
        if self._config.run is not None:
            try:
                write_file(Path(self._config.run) / SUMMARY, json.dumps(summary, indent=2) + "\n")
            except OSError as error:
                logger.warning("the summary of the run is not written: %s", error)

    @property
    def left_out(self) -> int:
        """Events that could not be taken."""
        return self._observer.left_out

    def balance(self) -> dict[str, float]:
        """How even the newest measured load was, by the field's names; empty before anything was measured."""
        with self.state.locked():
            return balance_of(self.state)

    def metrics(self) -> list[Metric]:
        return metrics_of(self.state, self._progress(), time.time(), self._observer.left_out)

    def _serve(self) -> PageServer | None:
        if self._config.listen is None:
            return None
        host, port = self._config.listen_address
        routes: dict[str, Route] = {**PAGE, "/state": self._state, "/metrics": partial(_metrics, self.metrics)}
        try:
            server = PageServer(host, port, self._config.listen_token, routes)
        except OSError as error:
            logger.warning("nothing listens on %s port %d: %s; training goes on", host, port, error.strerror or error)
            return None
        logger.info("the live page: %s (metrics at /metrics)", server.url)
        return server

    def _state(self, query: Mapping[str, str]) -> Answer:
        """How far training is, and the whole state if it is another than the one that was seen (``after``)."""
        version = self.state.version
        view = b"null"
        if query.get("after") != str(version):
            if self._cached[0] != version:
                self._cached = (version, as_json(view_of(self.state)))
            view = self._cached[1]
        progress = as_json(progress_view(self._progress()))
        return Answer(b'{"progress":' + progress + b',"view":' + view + b"}", "application/json")


def _metrics(read: Callable[[], list[Metric]], query: Mapping[str, str]) -> Answer:
    try:
        return Answer(*exposition(read, query["Accept"]))
    except ImportError:
        return Answer(f"{NOT_INSTALLED}\n".encode(), "text/plain", HTTPStatus.NOT_IMPLEMENTED)
