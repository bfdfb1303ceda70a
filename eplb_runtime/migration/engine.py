"""The phases of a migration on one rank: stage, verify, vote, commit.

`prepare` comes first, then for each round `post`, `arrive`, `vote`, `commit` and `finish`. `MigrationEngine.migrate`
runs the phases in a row, between two steps; `overlapped.py` runs several rounds at once while training goes on. Until a
round is committed, live rows belong to training and are only read. What was posted is valid until the next optimizer
step. In ``commit`` live rows belong to the engine, at the same place of a step on every rank. Every wait has a
deadline. After an agreement nothing may fail; if something does, the engine is broken here, and every call says so.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from ..distributed.consensus import POLL_SECONDS, Agreement, Ballot, InDoubt, Phase, Probe, Verdict, unobserved
from ..distributed.transports.base import Transport, TransportError
from ..events import RebalanceCommitted
from ..moe.experts.registry import ExpertTensors, RecordFormat
from ..placement import EMPTY, HomeRows, Placement
from ..utils.spans import phase
from .exchange import Records, RoundExecutor, RoundState, agree_on_records, formats_of
from .schedule import Round, TransferSchedule, make_schedule

logger = logging.getLogger("eplb_runtime")

_MISPLACED = "this rank's experts may not match the placement that the other ranks use"

Formats = tuple[Mapping[int, RecordFormat], str]
"""Record formats by layer, and why there are none."""
GetReady = Callable[[Placement, Sequence[int]], Callable[[], None]]
"""Prepares, memory included, everything that follows a placement: called before a vote with the placement after it
and the layers that differ. The returned function is called after the commit and cannot fail."""


class MigrationBroken(RuntimeError):
    """This rank failed after all had agreed to commit: the place of its experts is unknown. Go back to a checkpoint."""


@dataclass
class PreparedMigration:
    """A migration for which all ranks have the same schedule; ``current`` is the placement after its commits so far."""

    schedule: TransferSchedule
    records: Records
    current: Placement


@dataclass
class PostedRound:
    """A round in flight: its deadline, why this rank cannot commit it and whether that broke connections, the placement
    after it (``after``), and the function that makes routing and replicas follow that placement (``take_over``)."""

    migration: PreparedMigration
    round_: Round
    deadline: float
    exchange: RoundState = field(default_factory=RoundState)
    problem: str = ""
    timed_out: bool = False
    after: Placement | None = None
    take_over: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class MigrationProgress:
    """Progress of a migration since it was last asked for; the same on every rank but for bytes and seconds.

    Args:
        placement: the current one, on every rank.
        verdict: no commit: the rest of the migration is dropped, having failed in ``failed_phase``.
        rounds: the committed ones.
        left_layers: layers that are not where the target has them; one of several rounds may have changed, too.
        moved_experts: number of experts that changed their rank, over all ranks.
        received_bytes: of experts, by this rank.
        record_bytes: of an expert with its state, per layer; 0 for layers that were not to change.
        pause_seconds: time for which training waited, without work that was queued on the device before.
        seconds: time that this rank spent in each part of a migration between steps: ``prepare post transfer verify
            maps vote commit``.
        only_between_steps: somebody writes or replaces these experts between steps: nothing can overlap with it.
    """

    placement: Placement
    verdict: Verdict = field(default_factory=lambda: Verdict(True))
    failed_phase: Phase | None = None
    rounds: tuple[Round, ...] = ()
    left_layers: tuple[int, ...] = ()
    moved_experts: int = 0
    received_bytes: int = 0
    record_bytes: tuple[int, ...] = ()
    pause_seconds: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    only_between_steps: bool = False

    @property
    def cause(self) -> str:
        """Why the rest of the migration is dropped; "": it is not."""
        return self.verdict.cause

    @property
    def committed_layers(self) -> tuple[int, ...]:
        """Layers that committed rounds have changed, ascending."""
        return tuple(sorted({layer for round_ in self.rounds for layer in round_.layers}))

    @property
    def stall_seconds(self) -> float | None:
        """Seconds of the pause that do not grow with the bytes; None: nothing committed, a failure, or overlap."""
        if not (self.rounds and self.seconds) or self.failed_phase is not None:
            return None
        return sum(self.seconds.get(part, 0.0) for part in ("prepare", "post", "maps", "vote"))

    def committed(self, step: int, pause_seconds: float, before: Placement) -> RebalanceCommitted:
        """Return the event of these commits at ``step``, after a pause of so many seconds. Replicas that were not in
        the placement ``before`` count as placed."""
        replicas_LRK = self.placement.replicas_LRK
        return RebalanceCommitted(
            step,
            epoch=self.placement.epoch,
            digest=self.placement.digest(),
            moved_experts=self.moved_experts,
            received_bytes=self.received_bytes,
            pause_seconds=pause_seconds,
            phase_seconds=dict(self.seconds),
            placement=self.placement,
            transfers=np.concatenate([round_.transfers for round_ in self.rounds]),
            expert_bytes=self.record_bytes,
            placed_replicas=int(((replicas_LRK != before.replicas_LRK) & (replicas_LRK != EMPTY)).sum()),
            left_layers=self.left_layers,
        )


class MigrationEngine:
    """Carries out the phases of migrations on one rank; all ranks of the job call it at the same step.

    Args:
        registry: the live tensors; with pipelines, of the layers of this rank.
        transport: moves the bytes among the ranks of the EP group.
        agreement: compares and votes over all ranks of the job.
        home_rows: maps each home to the rank and row that hold it.
        row_rank: this rank's number in the transport: among the ranks that hold rows, of which all that hold the same
            follow one another.
        staging_bytes: bytes of received experts staged at once; at least one expert.
        timeout_seconds: for the transfers of one round.

    Attributes:
        executor: has the transport and the staging memory.
        device: of the experts.
        broken: reason for which this rank cannot go on; empty: it can.
        bytes_per_step: bytes that a rank may receive during one overlapped step; at most ``staging_bytes``.
    """

    def __init__(
        self,
        registry: ExpertTensors,
        transport: Transport,
        agreement: Agreement,
        home_rows: HomeRows,
        row_rank: int,
        staging_bytes: int,
        timeout_seconds: float,
    ) -> None:
        self._registry, self._agreement, self._home_rows = registry, agreement, home_rows
        self._budget = self.bytes_per_step = staging_bytes
        self._timeout = timeout_seconds
        self.device = next((parameter.device for parameter in registry.parameters()), transport.device)
        by_layer = [sum(p.nbytes for p in registry.parameters(layer)) for layer in registry.layers]
        # At first for one layer's homes here, and two more tensors of their size (Adam's).
        nbytes = min(staging_bytes, 3 * max(by_layer, default=0))
        self.executor = RoundExecutor(transport, home_rows, row_rank, self.device, nbytes)
        self._seconds: dict[str, float] = defaultdict(float)
        self._epoch, self.broken = 0, ""
        self.probe: Probe = unobserved

    def reconnect(self, transport: Transport, agreement: Agreement) -> None:
        """Use a new transport and agreement from here on. Closes the old transport, and frees its staging memory."""
        self.executor.reconnect(transport)
        self._agreement = agreement

    def rehearse(self, placement: Placement) -> float:
        """Return the seconds of a migration that moves nothing, after another one to warm up: ranks compare records and
        placements, and vote. Collective."""
        seconds = 0.0
        for number in range(2):  # the first one warms up
            began = time.perf_counter()
            agree_on_records(self._registry.num_layers, ({}, ""), self._agreement, self.executor.device)
            self._agreement.check_equal(bytes.fromhex(placement.digest()), "placement")
            self._agreement.vote_and_record(Ballot(f"rehearsal {number}"), "", False)
            seconds = time.perf_counter() - began
        return seconds

    def refuse_if_broken(self) -> None:
        """Raise `MigrationBroken` if ``broken`` is set: this rank has failed after an agreement."""
        if self.broken:
            raise MigrationBroken(self.broken)

    def migrate(self, current: Placement, target: Placement, key: str, get_ready: GetReady) -> MigrationProgress:
        """Move experts from ``current`` to ``target``, round by round, while training waits. Returns the progress: a
        round that some rank refuses ends the migration. MigrationBroken: this rank failed after an agreement.
        Collective, between two steps.

        Args:
            key: names this migration's decisions.
            get_ready: called for each round before its vote.
        """
        self.wait_for_device()  # work that is queued already is no part of the pause
        started, self._epoch = time.perf_counter(), current.epoch
        self._seconds.clear()
        migration, verdict = self.prepare(current, target)
        failed = Phase.PREPARED if migration is None else Phase.STAGED
        placement, done = current, list[PostedRound]()
        for round_ in () if migration is None else migration.schedule.rounds:
            assert migration is not None
            self.executor.restart()
            posted = self.post(migration, round_)
            self.arrive(posted, get_ready)
            ballot = Ballot(f"{key}/{round_.number}")
            with self.all_or_nothing(ballot):
                verdict = self.vote(posted, ballot)
                if not verdict.commit:
                    break
                for layer in round_.layers:
                    self.commit(posted, layer)
                self.finish(posted)
                assert posted.after is not None
                placement = migration.current = posted.after
                done.append(posted)
        self.wait_for_device()
        return replace(
            self.progress(placement, migration, done),
            verdict=verdict,
            failed_phase=None if verdict.commit else failed,
            left_layers=tuple(layers_that_differ(placement, target)),
            pause_seconds=time.perf_counter() - started,
            seconds=dict(self._seconds),
        )

    def progress(
        self, placement: Placement, migration: PreparedMigration | None, done: Sequence[PostedRound]
    ) -> MigrationProgress:
        """Return the progress of the committed rounds ``done``, after which ``placement`` holds. Changes nothing."""
        return MigrationProgress(
            placement,
            rounds=tuple(posted.round_ for posted in done),
            moved_experts=sum(posted.round_.moved(self._home_rows) for posted in done),
            received_bytes=sum(posted.exchange.received_bytes for posted in done),
            record_bytes=() if migration is None else migration.records.nbytes,
        )

    def prepare(
        self, current: Placement, target: Placement, formats: Formats | None = None
    ) -> tuple[PreparedMigration | None, Verdict]:
        """Agree with all ranks on a migration's rounds, and reserve memory for them. Returns the migration and the
        verdict; None and why, if records or schedules differ or a rank fails (with a warning in its log). Collective.
        ``formats``: of `formats_of`, for overlap: each round has one layer then; None: they are read here."""
        self.refuse_if_broken()
        with self._timed("prepare"), self._on_device():
            layers, overlapped = layers_that_differ(current, target), formats is not None
            found = formats if formats is not None else formats_of(self._registry, layers)
            num_layers, device = self._registry.num_layers, self.executor.device
            records, verdict = agree_on_records(num_layers, found, self._agreement, device)
            if records is None:
                return None, verdict
            schedule, problem = None, ""
            try:
                budget = self.bytes_per_step if overlapped else self._budget
                schedule = make_schedule(
                    current, target, records.nbytes, budget, records.holders, overlapped, self._home_rows.parts
                )
                self.executor.reserve(schedule, records, self.in_flight_bytes(schedule) if overlapped else None)
                self.probe(Phase.PREPARED, schedule)
            except Exception as error:
                logger.warning("this rank cannot prepare the migration", exc_info=True)
                problem = f"{type(error).__name__}: {error}"
            digest = schedule.digest() if schedule is not None else bytes(16)
            verdict = self._agreement.check_equal(digest, "transfer schedule", problem)
        if schedule is None or not verdict.commit:
            return None, verdict
        return PreparedMigration(schedule, records, current), verdict

    def in_flight_bytes(self, schedule: TransferSchedule) -> int:
        """Return the most bytes that a rank receives in rounds in flight together; the same on every rank."""
        return max(self.bytes_per_step, int(schedule.load.max(initial=0)))

    def post(self, migration: PreparedMigration, round_: Round) -> PostedRound:
        """Begin to exchange the experts of a round, and return the round in flight. Live rows are read until it has
        arrived. A failure is noted in ``problem``, and makes this rank vote no."""
        self.refuse_if_broken()
        posted = PostedRound(migration, round_, time.monotonic() + self._timeout)
        with self._timed("post"), _noting_problems(posted):
            self.executor.post(round_, migration.records, posted.exchange)
            self.probe(Phase.POSTED, round_)
        return posted

    def has_arrived(self, posted: PostedRound) -> bool:
        """Return whether `arrive` would not wait for bytes; a failure is noted in ``posted``, not raised: True."""
        with _noting_problems(posted):
            return posted.exchange.pending is None or bool(posted.problem) or posted.exchange.pending.poll()
        return True

    def arrive(self, posted: PostedRound, get_ready: GetReady, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for a round until its deadline, compare checksums, and set ``posted.after`` (the placement after it) and
        ``take_over``; a failure is noted for the vote instead. ``meanwhile`` is called during the wait. On any
        thread."""
        self.refuse_if_broken()
        migration, exchange = posted.migration, posted.exchange
        with self._on_device():
            if not posted.problem:
                assert exchange.pending is not None
                with _noting_problems(posted):
                    with self._timed("transfer"):
                        while not exchange.pending.poll() and time.monotonic() < posted.deadline:
                            meanwhile()
                            time.sleep(POLL_SECONDS)
                        exchange.pending.wait(posted.deadline)
                    self.probe(Phase.STAGED, exchange.staged)
                    with self._timed("verify"):
                        posted.problem = self.executor.difference(exchange)
                    self.probe(Phase.VERIFIED, exchange.staged)
                    with self._timed("maps"):
                        posted.after = migration.schedule.after(migration.current, posted.round_)
                        posted.take_over = get_ready(posted.after, posted.round_.layers)
            if posted.problem and not posted.timed_out and exchange.pending is not None:
                with _noting_problems(posted):
                    exchange.pending.wait(posted.deadline)  # its memory will be used again

    def vote(self, posted: PostedRound, ballot: Ballot) -> Verdict:
        """Vote on a round that has arrived, and return the verdict of all ranks. Collective, on any thread.
        MigrationBroken: this rank said yes, and cannot learn the verdict."""
        self.refuse_if_broken()
        with self._timed("vote"), self._on_device(), self._broken_by_doubt():
            verdict = self._agreement.vote_and_record(ballot, posted.problem, posted.timed_out)
        with self.unfailing() if verdict.commit else contextlib.nullcontext():
            self.probe(Phase.DECIDED, verdict)
        return verdict

    def refuse(self, ballot: Ballot, verdict: Verdict, *, votes: bool = True) -> Verdict:
        """Vote no on a round, unless this rank has said yes; return the verdict of all. On any thread. ``votes`` False:
        take no part in the vote, and close the control group's connections. MigrationBroken: as in `vote`."""
        with self._broken_by_doubt():
            return self._agreement.refuse(ballot, verdict, votes=votes)

    def commit(self, posted: PostedRound, layer: int) -> None:
        """Copy a layer's staged experts into its live slots, and mark its gradients stale. After all ranks agreed."""
        with self.unfailing(), self._timed("commit", layer):
            self.probe(Phase.COMMITTING, layer)
            record_format = posted.migration.records.formats.get(layer)
            if record_format is not None:
                self.executor.commit(posted.exchange, layer, record_format)
                self._registry.mark_gradients_stale(layer)

    def finish(self, posted: PostedRound) -> None:
        """Switch routing and replicas to a round's placement, after `commit` of its layers. Clears autocast's cache."""
        with self.unfailing():
            with self._timed("maps"):
                posted.take_over()
            torch.clear_autocast_cache()  # inside of a block, casts of what was in these rows
            self.probe(Phase.COMMITTED, posted.round_)

    @contextlib.contextmanager
    def unfailing(self, what: str = _MISPLACED) -> Iterator[None]:
        """Enclose work after an agreement of all ranks. An error inside sets ``broken``, is logged, and becomes
        MigrationBroken. ``what``: the start of that message."""
        self.refuse_if_broken()
        try:
            yield
        except BaseException as error:
            if self.broken:
                raise  # from further inside
            self.broken = (
                f"{what}: a migration failed here after all ranks had voted for it ({type(error).__name__}: {error}); "
                "go back to a checkpoint"
            )
            logger.critical("%s", self.broken)
            if not isinstance(error, Exception):
                raise
            raise MigrationBroken(self.broken) from error

    @contextlib.contextmanager
    def all_or_nothing(self, ballot: Ballot) -> Iterator[None]:
        """Enclose a vote and the commit. An error or Ctrl-C inside, once this rank has said yes, sets ``broken``:
        whether the others have committed is unknown."""
        try:
            yield
        except BaseException:
            if not ballot.bound:
                raise
            with self.unfailing():
                raise

    @contextlib.contextmanager
    def _broken_by_doubt(self) -> Iterator[None]:
        try:
            yield
        except InDoubt:
            with self.unfailing():
                raise

    @contextlib.contextmanager
    def _timed(self, part: str, layer: int | None = None) -> Iterator[None]:
        began = time.perf_counter()
        with phase(f"migration: {part}", "", layer, self._epoch):
            yield
        self._seconds[part] += time.perf_counter() - began

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Select the device: a thread of its own would use GPU 0."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def wait_for_device(self) -> None:
        """Wait until the GPU has done all queued work; nothing on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _noting_problems(posted: PostedRound) -> Iterator[None]:
    """Turn errors inside into this rank's vote against the round."""
    try:
        yield
    except TransportError as error:
        posted.problem, posted.timed_out = posted.problem or str(error), True
    except Exception as error:
        posted.problem = posted.problem or f"{type(error).__name__}: {error}"


def layers_that_differ(current: Placement, target: Placement) -> list[int]:
    """Return the layers whose slots hold different experts in two placements, ascending."""
    layers: list[int] = np.flatnonzero((current.physical_to_logical != target.physical_to_logical).any(axis=1)).tolist()
    return layers
