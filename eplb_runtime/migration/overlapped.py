"""Overlaps a migration with training: experts travel during a step, and each layer is committed before its forward.

At the end of a step rounds of single layers are posted, as many as will arrive in time (`migration.pacing`), and a
thread transfers them while the next step computes. Nothing should write these experts between an optimizer's step and
the next forward; a write is noticed before the ranks vote. A layer is committed where its forward begins, before any
token is routed, if all ranks have voted for it by then. A rank that can wait no longer writes "late" into the
decision's record, whose first word holds for all ranks. So no rank goes by its own view alone, and the layer is sent
again after the next step.

Over NCCL messages are kernels that wait for their peers, as the collectives of training are, and launches in different
orders on two ranks can keep both waiting. There the thread that trains posts all rounds of a step at its end, between
the collectives of two steps on every rank; the other thread only receives them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..distributed.consensus import Agreement, Ballot, Phase, Verdict
from ..distributed.transports.base import TransportError
from ..moe.experts.registry import ExpertTensors
from ..placement import Placement
from ..replicas.sync import Maps
from ..utils.errors import one_line
from ..utils.worker import Worker
from .engine import Formats, MigrationEngine, PostedRound, PreparedMigration, layers_that_differ
from .pacing import Pace, StartTimes, next_batch
from .progress import MigrationProgress
from .schedule import Round

logger = logging.getLogger("eplb_runtime")

LATE, WRITTEN, REPLACED = "late", "written", "replaced"
"""Kinds of verdicts. LATE: the round is sent again. WRITTEN: somebody writes its experts between steps. REPLACED: its
tensors are not those with which the migration began."""
_REPLACED_TIMES = 2
"""Migrations in a row that found replaced tensors: once is a state that was loaded, twice is an optimizer that makes
its state in each step."""
_SAMPLE_ELEMENTS = 64
_A_LITTLE_SECONDS = 1.0
_PATIENCE_SECONDS = 2e-3
"""A layer's forward waits this long, plus 10 % of the transfer time, before its experts count as late."""
_TRIES = 5
"""A layer that is late this often stays where it is."""
_AHEAD = 2
"""Rounds that are posted before an earlier one has arrived."""
_UNMEASURED_FACTOR = 4
"""Assumed transfer time as a multiple of the link's, until it is measured: experts are also hashed, packed and
unpacked, and the step uses the processor too."""
_MARGIN = 1.5
"""Safety factor of transfer times: a late round is sent twice, and one that is not sent goes with the next step."""
_WEIGHT = 0.3
"""Weight of a new measurement of the transfer time."""


@dataclass(eq=False)
class InFlightRound:
    """A round in flight, as training knows it.

    Args:
        ballot: this rank's part in the decision; the thread that transfers the round votes.
        here: whether this rank holds the layer.
        patience: seconds that the layer's forward waits for the round.
        problem: reason for which this rank votes against it; empty: there is none.
        posted: the engine's part, once it is sent.
        verdict: of all ranks, once training has asked.
        committed: whether this rank has committed it, if the layer is here.
        followed: whether the current placement includes it.
    """

    round_: Round
    ballot: Ballot
    here: bool
    patience: float
    problem: str
    posted: PostedRound | None = None
    verdict: Verdict | None = None
    committed: bool = False
    followed: bool = False

    @property
    def layer(self) -> int:
        return self.round_.layers[0]

    @property
    def received_bytes(self) -> int:
        return self.posted.exchange.received_bytes if self.posted is not None else 0


class Overlapped:
    """The driver of migrations that overlap with training; one at a time, on one rank.

    Args:
        engine: of this rank; this driver is its only user during a migration.
        agreement: of the ranks on their current connections.
        worker: transfers the experts; all else that uses the control group takes its turn on it.
        registry: the tensors that move.
        maps: everything that follows the placement.
        timeout_seconds: for the transfers of one step, and for each decision.
        link_seconds_per_byte: of the links, used until a migration has shown how fast experts travel.
        max_pause_seconds: longest wait of a step for late experts; None: as long as it pays.

    Attributes:
        in_flight: whether a migration was begun and has not ended.
        agreement: as above; replaced when ranks have connected again.
        late_rounds, late_bytes: late rounds so far over all ranks, and the bytes of them that this rank received.
    """

    def __init__(
        self,
        engine: MigrationEngine,
        agreement: Agreement,
        worker: Worker,
        *,
        registry: ExpertTensors,
        maps: Maps,
        timeout_seconds: float,
        link_seconds_per_byte: float,
        max_pause_seconds: float | None,
    ) -> None:
        self.agreement = agreement
        self.in_flight = False
        self.late_rounds = self.late_bytes = 0
        self._engine = engine
        self._worker = worker
        self._registry = registry
        self._held = frozenset(registry.layers)
        self._maps = maps
        self._timeout = timeout_seconds
        self._link_seconds_per_byte = link_seconds_per_byte
        self._max_pause = max_pause_seconds
        self._device = next((parameter.device for parameter in registry.parameters()), torch.device("cpu"))
        self._lock = threading.RLock()  # a signal's handler may close the balancer while its thread waits in here
        self._boundary = time.perf_counter()
        self._started: set[int] = set()
        self._starts = StartTimes(registry.num_layers)
        self._seconds_per_byte = 0.0
        self._times_replaced = 0
        self._stream: Any = None
        self._forget()

    def _forget(self) -> None:
        """Set the state of a driver without a migration."""
        self.in_flight = False
        self._migration: PreparedMigration | None = None
        # It would keep optimizer state alive that the job has replaced since.
        self._prepared: Future[tuple[PreparedMigration | None, Pace | None, Verdict]] | None = None
        self._transferring: Future[None] | None = None
        self._open: dict[int, list[Round]] = {}
        self._late: dict[int, int] = {}
        self._flights: list[InFlightRound] = []
        self._as_sent: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._gate = threading.Event()
        self._batches = 0
        self._pause = 0.0

    # -- what training calls -------------------------------------------------------------------------------------------

    def begin(self, current: Placement, target: Placement, key: str) -> None:
        """Prepare a migration while training goes on; at the end of a step, on every rank. ``key`` names its
        decisions."""
        self._forget()
        self._is_new = self.in_flight = True
        self._key, self._current, self._target = key, current, target
        formats = self._engine.formats(layers_that_differ(current, target))
        pace = self._pace_so_far().encode()
        self._prepared = self._worker.submit(lambda: self._prepare(current, target, formats, pace))

    def advance(self, *, hold_back: bool = False) -> MigrationProgress:
        """Return what the step that is over has committed, and post what overlaps with the next one. On every rank."""
        if self._is_new:  # its preparation overlaps with the next step
            self._is_new = False
            return MigrationProgress(self._current)
        pause, began = self._pause, time.perf_counter()
        self.withdraw()
        progress = self._close_rounds() if self._flights else self._open_rounds()
        has_ended = not progress.verdict.commit or not self._open
        if not has_ended and not hold_back:
            self._post_next()
        pause, self._pause = pause + time.perf_counter() - began, 0.0
        if has_ended:
            self._finish()
        return replace(progress, pause_seconds=pause)

    def step_begins(self) -> None:
        """Start the clock of a step."""
        self._started.clear()
        self._boundary = time.perf_counter()

    def forward_begins(self) -> None:
        """Let ranks vote, since a forward of the model begins: nothing writes experts from here on."""
        if self._flights and not self._gate.is_set():
            with self._lock, self._paused():
                self._open_gate()

    def forward_ends(self, layers: Collection[int]) -> None:
        """Count as late what is not committed when a forward has ended, or failed: from here on anybody may write
        experts. On every rank that holds these layers."""
        if self._flights and self._gate.is_set():
            with self._lock, self._paused():
                for flight in self._flights:
                    if flight.here and flight.layer in layers:
                        self._resolve(flight, 0.0, LATE, "a forward ended without it")

    def before_layer(self, layer: int) -> None:
        """Commit the rounds of a layer that have arrived, since its forward begins. On every rank that holds the
        layer."""
        if layer not in self._started:
            self._started.add(layer)
            self._starts.observe(layer, time.perf_counter() - self._boundary)
        if self._flights:
            with self._lock, self._paused():  # two batches may run at once
                self._open_gate()
                for flight in self._flights:
                    if flight.here and flight.layer == layer:
                        self._engine.probe(Phase.AWAITED, layer)
                        patience = self._timeout + _A_LITTLE_SECONDS if flight.patience < 0 else flight.patience
                        self._resolve(flight, patience, LATE, "its experts were not there when its forward began")

    def withdraw(self) -> None:
        """Commit nothing more in this step: experts are about to be written, or to stay. On every rank, at the same
        place."""
        if self._flights:
            with self._lock, self._paused():
                for flight in self._flights:
                    if flight.here:
                        self._resolve(flight, 0.0, LATE, "no forward of it came before the end of the step")
                self._gate.set()

    def current_placement(self) -> Placement:
        """The placement with all commits so far, each round an epoch. On every rank, at the same place."""
        for flight in self._flights:
            if not flight.here:  # the ranks that hold the layer ask for it; here nothing moves
                patience = self._timeout + _A_LITTLE_SECONDS
                self._resolve(flight, patience, "", "a rank waited for the others, and they did not come in time")
            if flight.verdict is not None and flight.verdict.commit and not flight.followed:
                self._resolve(flight, 0.0, LATE, "")  # if a forward broke off just there
                migration = self._migration
                assert migration is not None
                flight.followed = True
                # A later round of the layer starts from here.
                migration.current = self._current = migration.schedule.after(self._current, flight.round_)
        return self._current

    def drain(self) -> MigrationProgress:
        """Drop the rest on every rank, and return what was committed since the last call. The thread is done with it
        then."""
        self.withdraw()
        current = self.current_placement()
        committed = [flight for flight in self._flights if flight.verdict is not None and flight.verdict.commit]
        progress = self._committed(current, committed)
        pause, self._pause = self._pause, 0.0
        self._finish()
        return replace(progress, pause_seconds=pause)

    def _finish(self) -> None:
        self.leave()
        on_the_thread: Future[Any] | None = self._transferring or self._prepared
        if on_the_thread is not None:
            wait([on_the_thread], self._timeout + _A_LITTLE_SECONDS)
        self._forget()

    def leave(self) -> None:
        """Stop the thread's wait for training."""
        self._gate.set()

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _open_gate(self) -> None:
        """Let ranks vote, after a check that the experts in flight were not written or replaced. The forward that
        begins writes no experts."""
        if self._gate.is_set():
            return
        name = self._written()
        for flight in self._flights:
            if name and flight.here:
                cause = f"{name} was written between the optimizer's step and the forward"
                self._refuse(flight, Verdict(False, cause, kind=WRITTEN))
            elif flight.here and (problem := self._changed([flight.layer])):
                self._refuse(flight, Verdict(False, problem, kind=REPLACED))
        self._gate.set()

    def _written(self) -> str:
        """Name of the first tensor in flight that was written since it was sent; empty: none."""
        for name, tensor, version, sample in self._as_sent:
            if tensor._version != version or (sample is not None and not torch.equal(sampled(tensor), sample)):
                return name
        return ""

    def _resolve(self, flight: InFlightRound, patience: float, kind: str, cause: str) -> None:
        """Get the verdict of all ranks on a round, and act on it. Without one in time, this rank refuses the round if
        it still may. After an interruption (Ctrl-C) in here the next call completes it."""
        if flight.verdict is None:
            if patience:
                flight.ballot.wait(patience)
            self._refuse(flight, Verdict(False, f"layer {flight.layer}: {cause}", not kind, kind))
        if flight.here and not flight.committed and flight.verdict is not None and flight.verdict.commit:
            self._commit(flight)

    def _refuse(self, flight: InFlightRound, verdict: Verdict) -> None:
        """Vote against a round, unless its verdict is known or this rank has said yes."""
        flight.verdict = flight.ballot.verdict or self._engine.refuse(flight.ballot, verdict)

    def _commit(self, flight: InFlightRound) -> None:
        replicas = self._maps.replicas
        assert flight.posted is not None
        if replicas is not None:
            replicas.wait(flight.layer)  # replicas are read from homes that are written now
        with self._engine.unfailing():
            self._engine.commit(flight.posted, flight.layer)
            self._engine.finish(flight.posted)
            flight.committed = True
        if replicas is not None:
            with self._engine.unfailing(f"copies of layer {flight.layer} are of experts as they were"):
                replicas.refresh([flight.layer])

    # -- from step to step ---------------------------------------------------------------------------------------------

    def _open_rounds(self) -> MigrationProgress:
        """Open the rounds of the migration once it is prepared."""
        if self._migration is not None:
            return MigrationProgress(self._current)
        assert self._prepared is not None
        if wait([self._prepared], self._timeout + _A_LITTLE_SECONDS).done:
            migration, pace, verdict = self._prepared.result()
        else:
            lost = Verdict(False, "a rank waited for the others to prepare it, and they did not in time", True)
            migration, pace, verdict = None, None, self.agreement.record(f"{self._key}/prepared", lost)
        if migration is None or pace is None:
            if verdict.commit:
                verdict = Verdict(False, "this rank was not ready in time, and the others were", True)
            left = tuple(layers_that_differ(self._current, self._target))
            return MigrationProgress(self._current, verdict, Phase.STAGED, left_layers=left)
        self._migration, self._pace = migration, pace
        self._nbytes = dict(enumerate(migration.schedule.load.max(axis=1, initial=0).tolist()))
        for round_ in migration.schedule.rounds:
            self._open.setdefault(round_.layers[0], []).append(round_)
        return MigrationProgress(self._current)

    def _post_next(self) -> None:
        """Post the rounds that overlap with the next step."""
        migration = self._migration
        assert migration is not None
        in_flight_bytes = self._engine.in_flight_bytes(migration.schedule)
        batch = next_batch(self._open, self._nbytes, self._late, self._pace, in_flight_bytes)
        self._batches += 1
        problem = self._changed([round_.layers[0] for round_ in batch.rounds])
        self._flights = []
        for round_ in batch.rounds:
            ballot, here = Ballot(f"{self._key}/{self._batches}/{round_.number}"), round_.layers[0] in self._held
            patience = self._patience(round_, batch.waited_for)
            self._flights.append(InFlightRound(round_, ballot, here, patience, problem))
        flights = self._flights
        self._as_sent = [
            (of_home.name, tensor, tensor._version, sampled(tensor) if self._device.type == "cpu" else None)
            for flight in flights
            if flight.here
            for of_home in self._registry.of_home(flight.layer)
            for tensor in of_home.memory
        ]
        gate = self._gate = threading.Event()
        if not self._as_sent:
            gate.set()
        post: Callable[[Round], PostedRound] | None = partial(self._engine.post, migration)
        if self._engine.executor.in_order:
            self._post_here(migration)
            post = None
        follow = self._after_what_is_queued()
        self._transferring = self._worker.submit(lambda: self._transfer_rounds(flights, gate, follow, post))

    def _post_here(self, migration: PreparedMigration) -> None:
        """Post all rounds of a step, in their order, on the thread that trains; none if earlier ones do not end."""
        late = [] if self._transferring is None else [self._transferring]
        if late and not wait(late, self._timeout + _A_LITTLE_SECONDS).done:
            return  # late rounds still arrive in the memory that is used again
        self._engine.executor.restart()
        for flight in self._flights:
            flight.posted = self._engine.post(migration, flight.round_)

    def _patience(self, round_: Round, waited_for: bool) -> float:
        """Seconds that a forward waits for a round; negative: as long as anything is waited for."""
        if self._max_pause is not None:
            return self._max_pause
        return -1.0 if waited_for else _PATIENCE_SECONDS + 1e-7 * self._pace.microseconds(self._nbytes[round_.number])

    def _changed(self, layers: Sequence[int]) -> str:
        """Reason for which the records of these layers are not those that the ranks agreed on; empty: they are."""
        assert self._migration is not None
        now, problem = self._engine.formats(layers)
        for layer, found in now.items():
            agreed = self._migration.records.formats[layer]
            places = [
                [(one.name, [t.data_ptr() for t in one.memory], one.row_bytes) for one in record.tensors]
                for record in (found, agreed)
            ]
            if places[0] != places[1]:
                problem = problem or f"what moves with the experts of layer {layer} has changed meanwhile"
        return problem

    def _close_rounds(self) -> MigrationProgress:
        """Close the rounds of the last step, and report what became of them."""
        placement, migration = self.current_placement(), self._migration
        assert migration is not None
        verdicts = [(flight, flight.verdict) for flight in self._flights if flight.verdict is not None]
        done = [flight for flight, verdict in verdicts if verdict.commit]
        failed: Verdict | None = None
        for flight, verdict in verdicts:
            if verdict.commit:
                self._open[flight.layer].remove(flight.round_)
                if not self._open[flight.layer]:
                    del self._open[flight.layer]
            elif verdict.kind == LATE:
                self._late[flight.layer] = self._late.get(flight.layer, 0) + 1
                self.late_rounds += 1
                self.late_bytes += flight.received_bytes
                logger.info("%s; it is sent again", verdict.cause)
                if self._late[flight.layer] >= _TRIES and failed is None:
                    cause = f"{verdict.cause} {_TRIES} times: allow a longer max_pause_seconds, or overlap=False"
                    failed = Verdict(False, cause)
            elif failed is None or verdict.connections_broken:
                failed = verdict
        if any(verdict.kind == LATE for _, verdict in verdicts):
            self._pace = self._pace.slower()
        self._flights, self._as_sent = [], []
        self._times_replaced = 0 if done else self._times_replaced
        self._times_replaced += failed is not None and failed.kind == REPLACED
        return replace(
            self._committed(placement, done),
            verdict=failed or Verdict(True),
            failed_phase=None if failed is None else Phase.STAGED,
            left_layers=tuple(sorted(self._open)),
            only_between_steps=failed is not None and self._is_written_each_step(failed),
        )

    def _committed(self, placement: Placement, done: Sequence[InFlightRound]) -> MigrationProgress:
        """Progress by these rounds, after which experts are where ``placement`` says."""
        if not done:
            return MigrationProgress(placement)
        assert self._migration is not None
        home_rows = placement.home_rows()
        return MigrationProgress(
            placement,
            committed_layers=tuple(sorted(flight.layer for flight in done)),
            moved_experts=sum(flight.round_.moved(home_rows) for flight in done),
            received_bytes=sum(flight.received_bytes for flight in done),
            transfers=np.concatenate([flight.round_.transfers for flight in done]),
            record_bytes=self._migration.records.nbytes,
        )

    def _is_written_each_step(self, failed: Verdict) -> bool:
        return failed.kind == WRITTEN or (failed.kind == REPLACED and self._times_replaced >= _REPLACED_TIMES)

    def _pace_so_far(self) -> Pace:
        """This rank's measurements of its layers' forwards and of the speed of transfers."""
        seconds_per_byte = self._seconds_per_byte or _UNMEASURED_FACTOR * self._link_seconds_per_byte
        us_per_mib = int(1e6 * _MARGIN * seconds_per_byte * 2**20)
        return Pace(self._starts.microseconds(), max(1, us_per_mib))

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _prepare(
        self, current: Placement, target: Placement, formats: Formats, words: Tensor
    ) -> tuple[PreparedMigration | None, Pace | None, Verdict]:
        try:
            migration, verdict = self._engine.prepare(current, target, self._key, formats)
            if migration is not None:
                words = self.agreement.gather(words)[0]  # the first rank's, which plans
        except Exception as error:
            logger.debug("an overlapped migration could not be prepared", exc_info=True)
            migration, verdict = None, Verdict(False, one_line(error), True)
        verdict = self.agreement.record(f"{self._key}/prepared", verdict)
        return (migration, Pace.decode(words), verdict) if migration and verdict.commit else (None, None, verdict)

    def _transfer_rounds(
        self,
        flights: Sequence[InFlightRound],
        gate: threading.Event,
        follow: Callable[[], None],
        post: Callable[[Round], PostedRound] | None,
    ) -> None:
        """Post a few rounds ahead, receive them in order, and vote as soon as training allows it."""
        arrived: list[InFlightRound] = []

        def vote() -> None:
            while arrived and (gate.is_set() or not arrived[0].here):
                flight = arrived.pop(0)
                assert flight.posted is not None
                flight.posted.problem = flight.posted.problem or flight.problem
                self._engine.vote(flight.posted, flight.ballot)

        try:
            follow()
            began = time.perf_counter()
            if post is not None:
                self._engine.executor.restart()
            for number, flight in enumerate(flights):
                if post is not None:
                    self._post_ahead(flights[number : number + 1 + _AHEAD], post)
                if flight.posted is None:
                    raise TransportError("the rounds of the step before did not end in time")
                self._engine.arrive(flight.posted, self._maps.prepare, vote)
                arrived.append(flight)
                vote()
            self._measure_speed(time.perf_counter() - began, sum(flight.received_bytes for flight in flights))
            if not gate.wait(self._timeout):
                late = Verdict(False, "training did not go on", kind=LATE)
                for flight in arrived:
                    self._engine.refuse(flight.ballot, late)
                gate.set()
            vote()
        except Exception as error:
            logger.debug("the rounds in flight are given up", exc_info=True)
            lost = Verdict(False, one_line(error), True)
            for flight in flights:
                if flight.ballot.verdict is None:
                    self._engine.refuse(flight.ballot, lost, votes=False)

    def _post_ahead(self, flights: Sequence[InFlightRound], post: Callable[[Round], PostedRound]) -> None:
        """Post the first of them, and others that are not posted yet until it has arrived."""
        # Not all at once: the first would wait until the last is packed. The order is the same on all ranks, so
        # what this one waits for, the others have posted or can post.
        first = flights[0]
        for flight in flights:
            if first.posted is not None and self._engine.has_arrived(first.posted):
                break  # its vote comes first: to post another may take as long as the bytes of that one do
            if flight.posted is None:
                flight.posted = post(flight.round_)

    def _measure_speed(self, seconds: float, nbytes: int) -> None:
        if nbytes:
            weight = _WEIGHT if self._seconds_per_byte else 1.0
            self._seconds_per_byte += weight * (seconds / nbytes - self._seconds_per_byte)

    def _after_what_is_queued(self) -> Callable[[], None]:
        """Return a function that orders the thread's work on a device after everything queued so far."""
        if self._device.type != "cuda":
            return lambda: None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))

        def follow() -> None:
            if self._stream is None:  # one for good: torch has few, and the others that it gives out are the model's
                self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._stream.wait_event(event)
            torch.cuda.set_stream(self._stream)

        return follow

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Count the time inside as a pause of training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._pause += time.perf_counter() - began


def sampled(tensor: Tensor) -> Tensor:
    """Some elements of a tensor as bytes: they show a write through ``.data``, which leaves no version."""
    flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)].clone().view(torch.uint8)
