"""Overlaps a migration with training: experts travel during a step, and each layer is committed before its forward.

At the end of a step rounds of single layers are posted, and a thread transfers them while the next step computes: as
many bytes as were in time before and some more, half of them after some were late. Layers whose forwards come last go
first; what was late by itself is waited for. Nothing should write these experts between an optimizer's step and
the next forward; a write is noticed before the ranks vote. A layer is committed where its forward begins, before any
token is routed, if all ranks have voted for it by then. A rank that can wait no longer writes "late" into the
decision's record, whose first word holds for all ranks. So no rank goes by its own view alone, and the layer is sent
again after the next step.

Over NCCL messages are kernels that wait for their peers, as the collectives of training are, and launches in different
orders on two ranks can keep both waiting. There the thread that trains posts all rounds of a step at its end, between
the collectives of two steps on every rank; the other thread only receives them.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..config import BalancerConfig
from ..distributed.consensus import Ballot, Phase, Verdict
from ..distributed.control_channel import A_LITTLE_SECONDS, ControlChannel
from ..distributed.transports.base import TransportError
from ..moe.experts.registry import ExpertTensors
from ..placement import Placement
from ..replicas.sync import Maps
from ..utils.text import one_line
from .engine import Formats, MigrationEngine, MigrationProgress, PostedRound, PreparedMigration, layers_that_differ
from .exchange import formats_of
from .schedule import Round

logger = logging.getLogger("eplb_runtime")

LATE, WRITTEN = "late", "written"
"""Kinds of verdicts. LATE: the round is sent again. WRITTEN: somebody writes or replaces its experts between steps."""
_SAMPLE_ELEMENTS = 64
_PATIENCE_SECONDS = 3e-3
"""A layer's forward waits this long before its experts count as late."""
_TRIES = 5
"""A layer that is late by itself this often stays where it is."""
_AHEAD = 2
"""Rounds that are posted before an earlier one has arrived."""


@dataclass(eq=False)
class InFlightRound:
    """A round in flight, as training knows it.

    Args:
        ballot: this rank's part in the decision; the thread that transfers the round votes.
        here: whether this rank holds the layer.
        patience: seconds that the layer's forward waits for the round.
        posted: the engine's part, once it is sent.
        verdict: of all ranks, once training has asked.
        committed, followed: whether this rank has committed it, if it is here, and the current placement includes it.
    """

    round_: Round
    ballot: Ballot
    here: bool
    patience: float
    posted: PostedRound | None = None
    verdict: Verdict | None = None
    committed: bool = False
    followed: bool = False

    @property
    def layer(self) -> int:
        return self.round_.layers[0]


class Overlapped:
    """The driver of migrations that overlap with training; one at a time, on one rank.

    Args:
        engine: of this rank; this driver is its only user during a migration.
        control: its thread transfers experts, and all else that uses the control group takes its turn there.

    Attributes:
        in_flight: whether a migration was begun and has not ended.
        late_rounds, late_bytes: late rounds so far over all ranks, and the bytes of them that this rank received.
        gate_seconds: how long arrived rounds wait for a forward; half a timeout where other stages wait in the vote.
    """

    def __init__(
        self,
        engine: MigrationEngine,
        control: ControlChannel,
        registry: ExpertTensors,
        maps: Maps,
        config: BalancerConfig,
    ) -> None:
        self.late_rounds = self.late_bytes = 0
        self._engine, self._control, self._registry, self._maps = engine, control, registry, maps
        self._timeout, self._max_pause = config.timeout_seconds, config.migration.max_pause_seconds
        self.gate_seconds = self._timeout if len(registry.layers) == len(maps.table.changes_L) else self._timeout / 2
        self._lock = threading.RLock()  # a signal's handler may close the balancer while its thread waits in here
        self._budget = engine.bytes_per_step // 4
        self._stream: Any = None
        self._forget()

    def _forget(self) -> None:
        """Set the state of a driver without a migration."""
        self.in_flight = False
        self._migration: PreparedMigration | None = None
        # It would keep optimizer state alive that the job has replaced since.
        self._prepared: Future[tuple[PreparedMigration | None, Verdict]] | None = None
        self._transferring: Future[None] | None = None
        self._open: dict[int, list[Round]] = {}
        self._late: dict[int, int] = {}
        self._flights: list[InFlightRound] = []
        self._as_sent: list[tuple[str, Tensor, int, Tensor | None]] = []
        self._gate, self._begun = threading.Event(), False
        self._batches, self._pause = 0, 0.0

    def begin(self, current: Placement, target: Placement, key: str) -> None:
        """Set ``in_flight``, read the record formats, and prepare the migration on the control thread. On every rank,
        at the end of a step. ``key`` names its decisions."""
        self._forget()
        self.in_flight = True
        self._key, self._current, self._target = key, current, target
        formats = formats_of(self._registry, layers_that_differ(current, target))
        self._prepared = self._control.worker.submit(lambda: self._prepare(current, target, formats))

    def advance(self, *, hold_back: bool = False) -> MigrationProgress:
        """End the rounds of the step that is over (`settle`), post those of the next (``hold_back``: none), and
        return what was committed. If that ends the migration, wait for the thread. On every rank, at the end of each
        step after that of `begin`."""
        with self._training_waits():
            self.settle()
            progress = self._close_rounds() if self._flights else self._open_rounds()
            has_ended = not progress.verdict.commit or not self._open
            if not has_ended and not hold_back:
                self._post_next()
        return self._report(progress, has_ended)

    def drain(self) -> MigrationProgress:
        """End the migration: `settle` its rounds, wait for the thread, and return the commits since last asked."""
        self.settle()
        return self._report(self._committed(), True)

    def _report(self, progress: MigrationProgress, has_ended: bool) -> MigrationProgress:
        pause, self._pause = self._pause, 0.0
        if has_ended:
            self.abandon()
            on_the_thread: Future[Any] | None = self._transferring or self._prepared
            if on_the_thread is not None:
                wait([on_the_thread], self._timeout + A_LITTLE_SECONDS)
            self._forget()
        return replace(progress, pause_seconds=pause)

    def abandon(self) -> None:
        """Let the control thread vote at once: it no longer waits for a forward of the model."""
        self._gate.set()

    def forward_begins(self) -> None:
        """Let ranks vote as a forward of the model begins, but refuse rounds whose experts have been written."""
        if self._flights and not self._begun:
            with self._training_waits():
                self._open_gate()

    def before_layer(self, layer: int) -> None:
        """Commit a layer's rounds for which all ranks have voted, as its forward begins. Waits up to each round's
        ``patience``, then refuses it as late. On every rank that holds the layer."""
        if self._flights:
            with self._training_waits():  # two batches may run at once
                self._open_gate()
                self._resolve_here("its experts were not there when its forward began", (layer,), waits=True)

    def forward_ends(self, layers: Collection[int]) -> None:
        """Commit these layers' rounds for which all ranks have voted, and refuse the others as late: from here on
        anybody may write experts. On every rank that holds the layers."""
        if self._flights and self._gate.is_set():
            with self._training_waits():
                self._resolve_here("a forward ended without it", layers)

    def settle(self) -> None:
        """Commit this step's rounds for which all ranks have voted, and refuse the others as late: experts are about to
        be written, or to stay. On every rank, at the same place."""
        if self._flights:
            with self._training_waits():
                self._resolve_here("no forward of it came before the end of the step")
                self._begun = True
                self._gate.set()

    def current_placement(self) -> Placement:
        """Return the placement after all commits so far, each an epoch. Once a forward has begun, waits for the verdict
        on layers that other ranks hold, and refuses a round without one in time. On every rank, at the same place."""
        for flight in self._flights if self._begun else ():  # before it those ranks do not vote, and nothing commits
            if not flight.here:  # the ranks that hold the layer ask for it; here nothing moves
                patience = self._timeout + A_LITTLE_SECONDS
                self._resolve(flight, patience, "", "a rank waited for the others, and they did not come in time")
            if flight.verdict is not None and flight.verdict.commit and not flight.followed:
                self._resolve(flight, 0.0, LATE, "")  # if a forward broke off just there
                migration = self._migration
                assert migration is not None
                flight.followed = True
                # A later round of the layer starts from here.
                migration.current = self._current = migration.schedule.after(self._current, flight.round_)
        return self._current

    @contextmanager
    def _training_waits(self) -> Iterator[None]:
        """Enclose what one thread does at a time while training waits; the time is counted, once."""
        with self._lock:
            began, before = time.perf_counter(), self._pause
            try:
                yield
            finally:
                self._pause = before + time.perf_counter() - began

    def _open_gate(self) -> None:
        """Let ranks vote. Rounds whose experts were written or replaced since they were sent are refused before."""
        if self._begun:
            return
        name = self._written()
        written = name and f"{name} was written between the optimizer's step and the forward"
        for flight in self._flights:
            if flight.here and (problem := written or self._changed([flight.layer])):
                self._refuse(flight, Verdict(False, problem, kind=WRITTEN))
        self._begun = True
        self._gate.set()

    def _written(self) -> str:
        """Name of the first tensor in flight that was written since it was sent; empty: none."""
        for name, tensor, version, sample in self._as_sent:
            if tensor._version != version or (sample is not None and not torch.equal(sampled(tensor), sample)):
                return name
        return ""

    def _changed(self, layers: Sequence[int]) -> str:
        """Reason for which the records of these layers are not those that the ranks agreed on; empty: they are."""
        assert self._migration is not None
        now, problem = formats_of(self._registry, layers)
        for layer, found in now.items():
            agreed = self._migration.records.formats[layer]
            places = [
                [(one.name, [t.data_ptr() for t in one.memory], one.row_bytes) for one in record.tensors]
                for record in (found, agreed)
            ]
            if places[0] != places[1]:
                problem = problem or f"what moves with the experts of layer {layer} has changed meanwhile"
        return problem

    def _resolve_here(self, cause: str, layers: Collection[int] | None = None, *, waits: bool = False) -> None:
        """`_resolve` the rounds of these layers, or of all, that are here; those without an outcome are late."""
        for flight in self._flights:
            if flight.here and (layers is None or flight.layer in layers):
                if waits:
                    self._engine.probe(Phase.AWAITED, flight.layer)
                self._resolve(flight, flight.patience if waits else 0.0, LATE, cause)

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
            with self._engine.unfailing(f"replicas of MoE layer {flight.layer} still have their old weights"):
                replicas.refresh([flight.layer])

    def _open_rounds(self) -> MigrationProgress:
        """Open the rounds of the migration once it is prepared."""
        if self._migration is not None:
            return MigrationProgress(self._current)
        assert self._prepared is not None
        if wait([self._prepared], self._timeout + A_LITTLE_SECONDS).done:
            migration, verdict = self._prepared.result()
        else:
            lost = Verdict(False, "a rank waited for the others to prepare it, and they did not in time", True)
            migration, verdict = None, self._control.agreement.record(f"{self._key}/prepared", lost)
        if migration is None:
            if verdict.commit:
                verdict = Verdict(False, "this rank was not ready in time, and the others were", True)
            left = tuple(layers_that_differ(self._current, self._target))
            return MigrationProgress(self._current, verdict, Phase.PREPARED, left_layers=left)
        self._migration, self._nbytes = migration, migration.schedule.load.max(axis=1, initial=1).tolist()
        for round_ in migration.schedule.rounds:
            self._open.setdefault(round_.layers[0], []).append(round_)
        return MigrationProgress(self._current)

    def _post_next(self) -> None:
        """Post the rounds that overlap with the next step."""
        migration = self._migration
        assert migration is not None
        most = min(self._budget, self._engine.in_flight_bytes(migration.schedule))
        rounds, waits = next_rounds(self._open, self._nbytes, self._late, most)
        patience = self._max_pause
        if patience is None:
            patience = self._timeout + A_LITTLE_SECONDS if waits else _PATIENCE_SECONDS
        self._batches += 1
        gate, held, flights = threading.Event(), set(self._registry.layers), list[InFlightRound]()
        for round_ in rounds:
            ballot = Ballot(f"{self._key}/{self._batches}/{round_.number}")
            flights.append(InFlightRound(round_, ballot, round_.layers[0] in held, patience))
        self._gate, self._flights, self._begun = gate, flights, False
        here = [flight for flight in flights if flight.here]
        if problem := self._changed([flight.layer for flight in here]):
            for flight in here:
                self._refuse(flight, Verdict(False, problem, kind=WRITTEN))
        self._as_sent = [
            (of_home.name, tensor, tensor._version, sampled(tensor) if tensor.device.type == "cpu" else None)
            for flight in here
            for of_home in self._registry.of_home(flight.layer)
            for tensor in of_home.memory
        ]
        if not here:
            gate.set()
        if in_order := self._engine.executor.transport.in_order:
            self._post_here(migration)
        begin, posts = self._after_what_is_queued(), None if in_order else migration
        self._transferring = self._control.worker.submit(lambda: self._transfer_rounds(flights, gate, begin, posts))

    def _post_here(self, migration: PreparedMigration) -> None:
        """Post all rounds of a step, in their order, on the thread that trains; none if earlier ones do not end."""
        late = [] if self._transferring is None else [self._transferring]
        if late and not wait(late, self._timeout + A_LITTLE_SECONDS).done:
            return  # late rounds still arrive in the memory that is used again
        self._engine.executor.restart()
        for flight in self._flights:
            flight.posted = self._engine.post(migration, flight.round_)

    def _close_rounds(self) -> MigrationProgress:
        """Close the rounds of the last step, and report what became of them."""
        progress, failed, has_late = self._committed(), Verdict(True), False
        alone, posted = len(self._flights) == 1, sum(self._nbytes[flight.round_.number] for flight in self._flights)
        for flight in self._flights:
            verdict, layer = flight.verdict, flight.layer
            assert verdict is not None
            if verdict.commit:
                self._open[layer].remove(flight.round_)
                if not self._open[layer]:
                    del self._open[layer]
            elif verdict.kind == LATE and not verdict.connections_broken:
                has_late, self._late[layer] = True, self._late.get(layer, 0) + alone
                self.late_rounds += 1
                self.late_bytes += 0 if flight.posted is None else flight.posted.exchange.received_bytes
                logger.info("%s; it is sent again", verdict.cause)
                if self._late[layer] >= _TRIES and failed.commit:
                    cause = f"{verdict.cause} {_TRIES} times: allow a longer max_pause_seconds, or overlap=False"
                    failed = Verdict(False, cause)
            elif failed.commit or verdict.connections_broken:
                failed = verdict
        more = max(posted // 4, *self._nbytes)  # one more round at least
        self._budget = posted // 2 if has_late else max(self._budget, posted + more)
        self._flights, self._as_sent = [], []
        return replace(
            progress,
            verdict=failed,
            failed_phase=None if failed.commit else Phase.STAGED,
            only_between_steps=failed.kind == WRITTEN,
        )

    def _committed(self) -> MigrationProgress:
        """Return the progress that the commits of this step make."""
        placement = self.current_placement()
        done = [flight.posted for flight in self._flights if flight.verdict is not None and flight.verdict.commit]
        progress = self._engine.progress(placement, self._migration, [posted for posted in done if posted is not None])
        return replace(progress, left_layers=tuple(layers_that_differ(placement, self._target)))

    def _prepare(
        self, current: Placement, target: Placement, formats: Formats
    ) -> tuple[PreparedMigration | None, Verdict]:
        try:
            migration, verdict = self._engine.prepare(current, target, formats)
            if migration is not None:  # the first rank's, so that all take the same rounds
                self._budget = int(self._control.agreement.gather(torch.tensor([self._budget]))[0])
        except Exception as error:
            logger.debug("an overlapped migration could not be prepared", exc_info=True)
            migration, verdict = None, Verdict(False, one_line(error), True)
        verdict = self._control.agreement.record(f"{self._key}/prepared", verdict)
        return (migration if verdict.commit else None), verdict

    def _transfer_rounds(
        self,
        flights: Sequence[InFlightRound],
        gate: threading.Event,
        begin: Callable[[], None],
        posts: PreparedMigration | None,
    ) -> None:
        """Receive rounds in order, those of ``posts`` posted a few ahead, and vote as soon as training allows it."""
        arrived: list[InFlightRound] = []

        def vote() -> None:
            while arrived and (gate.is_set() or not arrived[0].here):
                flight = arrived.pop(0)
                assert flight.posted is not None
                self._engine.vote(flight.posted, flight.ballot)

        try:
            begin()
            if posts is not None:
                self._engine.executor.restart()
            for number, flight in enumerate(flights):
                if posts is not None:
                    self._post_ahead(flights[number : number + 1 + _AHEAD], posts)
                if flight.posted is None:
                    raise TransportError("the rounds of the step before did not end in time")
                self._engine.arrive(flight.posted, self._maps.prepare, vote)
                arrived.append(flight)
                vote()
            if not gate.wait(self.gate_seconds):
                late = Verdict(False, f"no forward for {self.gate_seconds:g} s (see timeout_seconds)", kind=LATE)
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

    def _post_ahead(self, flights: Sequence[InFlightRound], migration: PreparedMigration) -> None:
        """Post the first of them, and others that are not posted yet until it has arrived, if it comes here."""
        # Not all at once: the first would wait until the last is packed. The order is the same on all ranks, so
        # what this one waits for, the others have posted or can post.
        first = flights[0]
        for flight in flights:
            if first.here and first.posted is not None and self._engine.has_arrived(first.posted):
                break  # its vote comes first: to post another may take as long as the bytes of that one do
            if flight.posted is None:
                flight.posted = self._engine.post(migration, flight.round_)

    def _after_what_is_queued(self) -> Callable[[], None]:
        """Return a function that orders the thread's work on a device after everything queued so far."""
        if self._engine.device.type != "cuda":
            return lambda: None
        event = torch.cuda.current_stream(self._engine.device).record_event()

        def begin() -> None:
            if self._stream is None:  # one for good: torch has few, and the others that it gives out are the model's
                self._stream = torch.cuda.Stream(self._engine.device)  # type: ignore[no-untyped-call]
            self._stream.wait_event(event)
            torch.cuda.set_stream(self._stream)

        return begin


def next_rounds(
    open_: Mapping[int, Sequence[Round]], nbytes: Sequence[int], late: Mapping[int, int], most: int
) -> tuple[list[Round], bool]:
    """Return the rounds that overlap with the next step, in the order in which they travel, and whether training waits
    for them; the same on every rank. Takes the first of each layer's ``open_`` rounds, from the last layer on, as later
    forwards leave more time. Layers that were ``late`` alone are left out; if only such are left, the last one's round
    is taken and waited for. ``nbytes``: of each round, at least 1; ``most`` may travel, but one round in any case."""
    taken: list[Round] = []
    for layer in sorted(open_, reverse=True):
        round_ = open_[layer][0]
        if not late.get(layer) and (not taken or nbytes[round_.number] <= most):
            taken.append(round_)
            most -= nbytes[round_.number]
    return (taken[::-1], False) if taken else ([open_[max(open_)][0]], True)


def sampled(tensor: Tensor) -> Tensor:
    """Return a copy of about 64 elements of a tensor, as uint8. It shows writes that ``_version`` does not count."""
    flat = (tensor if tensor.is_contiguous() else tensor[:1]).detach().reshape(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE_ELEMENTS)].clone().view(torch.uint8)
