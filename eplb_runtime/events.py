"""What the balancer tells the world: small frozen records, and the log that hands them to listeners.

Rooms emit events and wait for no listener: each is called on a thread of its own, with a bounded queue. Arrays come
along with an event, but only as far as the listeners: the log would keep them for too long.
"""

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .placement import Placement
from .utils.text import counted, text_table
from .utils.worker import Worker

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Event:
    """Base of all events. ``step`` counts optimizer steps since attach. Fields that are not compared are for listeners;
    in the log they are None."""

    step: int

    @property
    def label(self) -> str:
        """Kind of event, for tables: the last word of the class name, in lower case."""
        return str(re.findall("[A-Z][a-z]+", self.name)[-1]).lower()

    @property
    def name(self) -> str:
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"event": class name}`` with all fields added, except those for listeners alone, such as arrays."""
        kept = {own.name: getattr(self, own.name) for own in fields(self) if own.compare}
        return {"event": self.name, **kept}

    def brief(self) -> str:
        """Return a line that says what happened: here the fields but ``step``, strings without their names."""
        told = [(own.name.replace("_", " "), getattr(self, own.name)) for own in fields(self)[1:]]
        return ", ".join(value if isinstance(value, str) else f"{name} {value}" for name, value in told if value != ())

    def without_arrays(self) -> "Event":
        """Return a copy for the log, in which the fields for listeners, such as arrays, are None."""
        arrays: dict[str, Any] = {own.name: None for own in fields(self) if not own.compare}
        return replace(self, **arrays) if arrays else self


@dataclass(frozen=True)
class LoadMeasured(Event):
    """The load that the last decision was made on, summed over all ranks and reported when it is acted on.

    ``steps``: training steps that it covers. ``imbalance``: per row (a step, or a few of them) and layer, max/mean rank
    load under the placement that stood then, ``[T][L]``; in the log one row, the mean of them.
    ``step_seconds``: of a training step, measured and smoothed. ``moe_share``: share of a step in expert work;
    ``moe_share_source`` says whether it was ``"measured"``, ``"given"`` or ``"assumed"``; None and empty: unknown. For
    listeners: ``load``, int64 ``[T, L, E]``, tokens by logical expert; ``placements``, the placements that rows stood
    under, each with the row that it ends before; ``home_bytes``, of the largest expert with its state.
    """

    steps: int
    imbalance: tuple[tuple[float, ...], ...]
    step_seconds: float = 0.0
    moe_share: float | None = None
    moe_share_source: str = ""
    home_bytes: int = field(default=0, compare=False, repr=False)
    load: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    placements: tuple[tuple[int, Placement], ...] | None = field(default=None, compare=False, repr=False)

    def brief(self) -> str:
        by_layer = self.without_arrays().imbalance[0] if self.imbalance else (1.0,)
        mean, worst = sum(by_layer) / len(by_layer), max(by_layer)
        return f"imbalance {mean:.3f}, worst layer {worst:.3f}, in {counted(self.steps, 'step')}"

    def without_arrays(self) -> "LoadMeasured":
        rows = len(self.imbalance)
        mean = (tuple(sum(values) / rows for values in zip(*self.imbalance, strict=True)),) if rows else ()
        return replace(self, imbalance=mean, load=None, placements=None)


@dataclass(frozen=True)
class RebalancePlanned(Event):
    """Rank 0's decision reached this rank. ``moves`` is 0 when the plan is to stay; ``code``: what kind of reason.

    ``imbalance_before``, ``imbalance_after``, ``imbalance_bound``: predicted, means over layers; no placement gets
    below the bound. ``seconds_saved``, ``seconds_spent``: predicted, over ``horizon_steps``; None where unknown.
    ``judged_plans``, ``judged_decisions``: earlier plans whose predictions could be judged, and by how many loads;
    ``predicted_seconds``, ``true_seconds``: gains that they predicted, and that came true. For listeners: ``by_layer``,
    float64 ``[3, L]``, before, after and bound of each layer.
    """

    epoch: int
    moves: int
    decision: str
    reason: str
    imbalance_before: float
    imbalance_after: float
    plan_seconds: float
    imbalance_bound: float = 1.0
    seconds_saved: float | None = None
    seconds_spent: float | None = None
    horizon_steps: int | None = None
    judged_plans: int = 0
    judged_decisions: int = 0
    predicted_seconds: float = 0.0
    true_seconds: float = 0.0
    code: str = ""
    by_layer: NDArray[np.float64] | None = field(default=None, compare=False, repr=False)

    def brief(self) -> str:
        to = f"{self.imbalance_before:.3f} -> {self.imbalance_after:.3f}"
        forecast = f", forecast imbalance {to}" if self.moves and to not in self.reason else ""
        return f"{self.decision}: {self.reason}{forecast}"


@dataclass(frozen=True)
class RebalanceCommitted(Event):
    """Experts moved; every rank holds the new placement. Bytes are those this rank received.

    ``placed_replicas``: replica slots, over all ranks, that hold another expert than before. ``phase_seconds``: what
    this rank spent in each part (``prepare post transfer verify maps vote commit``). ``left_layers``: those that later
    commits of the same rebalance are to change, as with overlap. For listeners: ``placement``, the current one;
    ``transfers``, int64 ``[M, 4]``, layer, expert, source and destination slot of each expert that was sent;
    ``expert_bytes``, of an expert with its state in each layer.
    """

    epoch: int
    digest: str
    moved_experts: int
    received_bytes: int
    pause_seconds: float
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    placement: Placement | None = field(default=None, compare=False, repr=False)
    transfers: NDArray[np.int64] | None = field(default=None, compare=False, repr=False)
    expert_bytes: tuple[int, ...] | None = field(default=None, compare=False, repr=False)
    placed_replicas: int = 0
    left_layers: tuple[int, ...] = ()

    def brief(self) -> str:
        moved = [f"{counted(self.moved_experts, 'expert')} moved"] if self.moved_experts else []
        moved += [f"{counted(self.placed_replicas, 'replica')} placed"] if self.placed_replicas else []
        return (
            f"epoch {self.epoch}: {', '.join(moved) or 'replicas changed, no expert moved'}, "
            f"{self.received_bytes / 2**20:.1f} MiB came here, {self.pause_seconds * 1e3:.1f} ms pause"
        )


@dataclass(frozen=True)
class RebalanceAborted(Event):
    """A rebalance was dropped before agreement: the placement that stood is whole. ``phase`` names where it broke.

    ``committed_layers``: the layers it had changed by then, round by round: partly committed, valid all the same.
    ``left_layers``: those that are not where the plan wanted them; a layer of several rounds may be among both.
    """

    epoch: int
    phase: str
    cause: str
    committed_layers: tuple[int, ...] = ()
    left_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class BalancingPaused(Event):
    """The ranks have lost each other: the placement stays until they have connected again. They try five times."""

    cause: str


@dataclass(frozen=True)
class BalancingResumed(Event):
    """All ranks balance again from this step on. ``tries``: how often they tried to connect since the pause."""

    tries: int


@dataclass(frozen=True)
class Suspended(Event):
    """A rollout begins: nothing is decided or moved until the balancer is resumed. ``freed_bytes``: on this rank."""

    freed_bytes: int


@dataclass(frozen=True)
class SuspensionEnded(Event):
    """A rollout is over, and the job trains. ``seconds``: how long the balancer was suspended."""

    label = "training"
    seconds: float


@dataclass(frozen=True)
class BalancingEnded(Event):
    """There will be no more rebalancing: the balancer was closed, or this rank is broken for good."""

    cause: str


@dataclass(frozen=True)
class GuardFinding(Event):
    """A check in the running job found a mistake that would spoil training; the same on every rank that looked."""

    finding: str


SHOWN = 30  # events of a table, the newest
MOST_WAITING = 256  # events for a listener; it misses more
CLOSING_SECONDS = 10.0


def _tell(listener: Callable[[Event], None], event: Event) -> None:
    try:
        listener(event)
    except Exception:
        logger.exception("an event listener failed on %s; the job goes on", event.name)


class EventLog:
    """Keeps the last ``capacity`` events and calls every listener with each new one.

    Example:
        >>> log, heard = EventLog(), []
        >>> log.subscribe(heard.append)
        >>> log.emit(BalancingPaused(7, "rank 2 has not answered for 30 s"))
        >>> log.close()
        >>> heard[0].name, heard[0].step
        ('BalancingPaused', 7)
    """

    def __init__(self, capacity: int = 10_000, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin  # of listeners' threads
        self._events: deque[Event] = deque(maxlen=capacity)
        self._emitted = self.left_out = 0  # of a listener that was too slow
        self._threads: list[Worker] = []
        self.called_at_once: list[Callable[[Event], None]] = []  # ours, which wait for nothing

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Call ``listener`` with each event from now on, on a thread of its own, and log what it raises. While
        `MOST_WAITING` events wait for it, new ones are dropped for it (`left_out` counts them), with one warning."""
        thread = Worker("eplb_runtime listener", self._begin)
        warn = cache(lambda: logger.warning("the event listener %r is too slow and misses events", listener))
        self._threads.append(thread)

        def hear(event: Event) -> None:
            if thread.waiting >= MOST_WAITING:
                self.left_out += 1
                warn()
            elif not thread.closed:
                thread.submit(partial(_tell, listener, event))

        self.called_at_once.append(hear)

    def emit(self, event: Event) -> None:
        self._events.append(event.without_arrays())
        self._emitted += 1
        for listener in self.called_at_once:
            _tell(listener, event)

    def close(self) -> None:
        """End the threads of listeners, each after the events that wait for it, or after ten seconds."""
        for thread in self._threads:
            thread.close(CLOSING_SECONDS)

    def of_type(self, kind: type[Event]) -> list[Event]:
        return [event for event in self._events if isinstance(event, kind)]

    def __str__(self) -> str:
        """Return the newest events as a table of 80 columns."""
        rows = [(str(event.step), event.label, event.brief()) for event in list(self._events)[-SHOWN:]]
        text, earlier = text_table(("step", "event", "what"), rows), self._emitted - len(rows)
        return f"{text}\n({earlier} earlier)" if earlier else text

    def __iter__(self) -> Iterator[Event]:
        return iter(tuple(self._events))

    def __len__(self) -> int:
        return len(self._events)
