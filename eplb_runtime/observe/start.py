"""What rank 0 of a job shows, put together from what the config asks for."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from .. import __version__
from ..config import BalancerConfig
from ..events import EventLog
from ..placement import Placement
from ..topology import Topology
from .event_log import EventWriter
from .observer import Observer
from .records import job_record


def observe(
    config: BalancerConfig, topology: Topology, placement: Placement, world_size: int, events: EventLog
) -> Callable[[], None]:
    """Listen to a job's events from now on, on its rank 0.

    Args:
        topology: of one EP group.
        placement: where the experts stand.
        world_size: ranks of the job.

    Returns:
        How to end it; what was heard is shown and written then.

    Raises:
        OSError: the folder of the run cannot be written to.
    """
    observer = Observer(placement, config.speed_R)
    job = job_record(config, topology, placement, world_size=world_size, now=time.time(), version=__version__)
    if config.run is not None:
        writer = EventWriter(Path(config.run), job)
        observer.add("the event log", writer.write, writer.close)
    events.subscribe(observer.hear)
    return observer.close
