"""The phases of a migration on one rank: stage, verify, vote, commit.

`prepare` comes first, then for each round `post`, `arrive`, `vote`, `commit` and `finish`. `between_steps.py` runs the
phases in a row; `overlapped.py` runs several rounds at once while training goes on. Until a round is committed, live
rows belong to training and are only read. What was posted is valid until the next optimizer step. In ``commit`` live
rows belong to the engine, at the same place of a step on every rank. Every wait has a deadline. After an agreement
nothing may fail; if something does, the engine is broken on this rank, and every call says so.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..distributed.consensus import Agreement, Ballot, InDoubt, State, Verdict
from ..distributed.points import Phase, Probe, unobserved
from ..distributed.transports.base import Transport, TransportError
from ..moe.experts.registry import ExpertTensors, RecordFormat
from ..placement import HomeRows, Placement
from ..utils.spans import phase
from .exchange import Exchange, RoundExecutor
from .records import Records, agree_on_records, formats_of
from .schedule import Round, TransferSchedule, make_schedule

logger = logging.getLogger("eplb_runtime")

_POLL_SECONDS = 0.0003

Formats = tuple[Mapping[int, RecordFormat], str]
"""Record formats by layer, and why there are none."""


GetReady = Callable[[Placement, Sequence[int]], Callable[[], None]]
"""Prepares, memory included, everything that follows a placement: called before a vote with the placement after it
and the layers that differ. The returned function is called after the commit and cannot fail."""


class MigrationBroken(RuntimeError):
    """This rank failed after all ranks had agreed to commit: the place of its experts is unknown. Go back to a
    checkpoint."""


@dataclass
class PreparedMigration:
    """A migration for which all ranks have the same schedule: what it has committed, and received, so far."""

    key: str
    schedule: TransferSchedule
    records: Records
    current: Placement
    committed: int = 0
    received_bytes: int = 0


@dataclass
class PostedRound:
    """A round in flight: its deadline, why this rank cannot commit it and whether that broke connections, the placement
    after it, and what makes everything follow that."""

    migration: PreparedMigration
    round_: Round
    deadline: float
    exchange: Exchange = field(default_factory=Exchange)
    problem: str = ""
    timed_out: bool = False
    after: Placement | None = None
    take_over: Callable[[], None] = lambda: None


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
        self._registry = registry
        self._agreement = agreement
        self._home_rows = home_rows
        self._budget = self.bytes_per_step = staging_bytes
        self._timeout = timeout_seconds
        self._device = next((parameter.device for parameter in registry.parameters()), transport.device)
        nbytes = min(staging_bytes, _largest_layer_bytes(registry))
        self.executor = RoundExecutor(transport, home_rows, row_rank, self._device, nbytes)
        self._seconds: dict[str, float] = defaultdict(float)
        self._epoch = 0
        self.broken = ""
        self.probe: Probe = unobserved

    def take_memory(self) -> None:
        """`RoundExecutor.take_memory`, on any thread."""
        with self._on_device():
            self.executor.take_memory()

    def reconnect(self, transport: Transport, agreement: Agreement) -> None:
        """Use new connections after a failure broke the old ones."""
        self.executor.reconnect(transport)
        self._agreement = agreement

    def rehearse(self, placement: Placement) -> float:
        """Measure the seconds of a migration in which nothing moves: ranks compare experts and schedules, and vote.
        Collective."""
        seconds = 0.0
        for _ in range(2):  # the first one warms up
            began = time.perf_counter()
            agree_on_records(self._registry.num_layers, ({}, ""), self._agreement, self.executor.device)
            self._agreement.check_equal(bytes.fromhex(placement.digest()), "placement")
            self._agreement.vote_and_record(Ballot("rehearsal"), "", False)
            seconds = time.perf_counter() - began
        return seconds

    def refuse_if_broken(self) -> None:
        """Raise `MigrationBroken` once this rank has failed after an agreement."""
        if self.broken:
            raise MigrationBroken(self.broken)

    def begin_timing(self, epoch: int) -> None:
        """Restart ``seconds`` for a migration that begins at this epoch."""
        self._epoch = epoch
        self._seconds.clear()

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds in each part since `begin_timing`."""
        return dict(self._seconds)

    def moved_experts(self, rounds: Sequence[Round]) -> int:
        """Number of experts that change their rank in these rounds."""
        return sum(round_.moved(self._home_rows) for round_ in rounds)

    # -- the phases, in order ------------------------------------------------------------------------------------

    def formats(self, layers: Sequence[int]) -> Formats:
        """Formats of the records of these layers now. Nothing may train meanwhile."""
        return formats_of(self._registry, layers)

    def prepare(
        self, current: Placement, target: Placement, key: str, formats: Formats | None = None
    ) -> tuple[PreparedMigration | None, Verdict]:
        """Agree on rounds with all ranks, and reserve their memory, so that a rank fails before any waits for its
        bytes. With ``formats``, for overlap, each round has one layer. Returns None and the verdict if there is no
        migration. Collective."""
        self.refuse_if_broken()
        with self._timed("prepare"), self._on_device():
            layers, overlapped = layers_that_differ(current, target), formats is not None
            found = formats if formats is not None else self.formats(layers)
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
        return PreparedMigration(key, schedule, records, current), verdict

    def in_flight_bytes(self, schedule: TransferSchedule) -> int:
        """Bytes that a rank may receive in rounds in flight together; the same on every rank."""
        return max(self.bytes_per_step, int(schedule.load.max(initial=0)))

    def post(self, migration: PreparedMigration, round_: Round) -> PostedRound:
        """Begin to exchange the experts of a round; live rows are read until it has arrived. A rank that fails says so
        in `vote`."""
        self.refuse_if_broken()
        posted = PostedRound(migration, round_, time.monotonic() + self._timeout)
        with self._timed("post"), _noting_problems(posted):
            self.executor.post(round_, migration.records, posted.exchange)
            self.probe(Phase.POSTED, round_)
        return posted

    def has_arrived(self, posted: PostedRound) -> bool:
        """Whether `arrive` would return without waiting for bytes. Never raises: a failure is noted for the vote."""
        with _noting_problems(posted):
            return bool(posted.problem) or posted.exchange.pending.poll()
        return True

    def arrive(self, posted: PostedRound, get_ready: GetReady, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait for a round, verify it, and prepare its placement. On any thread; ``meanwhile`` is called now and
        then."""
        self.refuse_if_broken()
        migration, exchange = posted.migration, posted.exchange
        with self._on_device():
            if not posted.problem:
                with _noting_problems(posted):
                    self._receive(posted, meanwhile)
                    with self._timed("verify"):
                        posted.problem = self.executor.difference(exchange)
                    self.probe(Phase.VERIFIED, exchange.staged)
                    with self._timed("maps"):
                        posted.after = migration.schedule.after(migration.current, posted.round_)
                        posted.take_over = get_ready(posted.after, posted.round_.layers)
            if posted.problem and not posted.timed_out:
                with _noting_problems(posted):
                    exchange.pending.wait(posted.deadline)  # its memory will be used again

    def vote(self, posted: PostedRound, ballot: Ballot) -> Verdict:
        """Vote on a round that has arrived. Collective, on any thread; MigrationBroken: the result of this rank's yes
        is lost."""
        self.refuse_if_broken()
        with self._timed("vote"), self._on_device(), self._broken_by_doubt():
            verdict = self._agreement.vote_and_record(ballot, posted.problem, posted.timed_out)
        with self.unfailing() if verdict.commit else contextlib.nullcontext():
            self.probe(Phase.DECIDED, verdict)
        return verdict

    def refuse(self, ballot: Ballot, verdict: Verdict, *, votes: bool = True) -> Verdict:
        """Refuse a round, if this rank still may, and return what all ranks do with it. On any thread; ``votes``:
        another thread of this rank takes part in the vote."""
        with self._broken_by_doubt():
            return self._agreement.refuse(ballot, verdict) if votes else self._agreement.stay_away(ballot, verdict)

    def commit(self, posted: PostedRound, layer: int) -> None:
        """Copy a layer's staged experts into its live slots, in place; only after all ranks agreed."""
        with self.unfailing(), self._timed("commit", layer):
            self.probe(Phase.COMMITTING, layer)
            record_format = posted.migration.records.formats.get(layer)
            if record_format is not None:
                self.executor.commit(posted.exchange, layer, record_format)
                self._registry.leave_gradients(layer)

    def finish(self, posted: PostedRound) -> None:
        """Make everything else follow the placement after a round; all its layers are committed."""
        migration = posted.migration
        with self.unfailing():
            with self._timed("maps"):
                posted.take_over()
            torch.clear_autocast_cache()  # inside of a block, casts of what was in these rows
            migration.committed += 1
            migration.received_bytes += posted.exchange.received_bytes
            self.probe(Phase.COMMITTED, posted.round_)

    @contextlib.contextmanager
    def unfailing(
        self, what: str = "experts on this rank are in other slots than the other ranks have for them"
    ) -> Iterator[None]:
        """Enclose work after an agreement of all ranks: a failure inside makes this rank differ from them for good."""
        self.refuse_if_broken()
        try:
            yield
        except BaseException as error:
            if self.broken:
                raise  # from further inside
            self.broken = (
                f"{what}: a migration failed here after all had agreed to it ({type(error).__name__}: {error}); "
                "go back to a checkpoint"
            )
            logger.critical("%s", self.broken)
            if not isinstance(error, Exception):
                raise
            raise MigrationBroken(self.broken) from error

    @contextlib.contextmanager
    def all_or_nothing(self, ballot: Ballot) -> Iterator[None]:
        """Enclose a vote and its consequences. After an interruption (Ctrl-C) past this rank's yes, no rank knows
        whether the others have committed: the engine is broken then."""
        try:
            yield
        except BaseException:
            if ballot.state in (State.OPEN, State.ABORTED):
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

    # -- small words ---------------------------------------------------------------------------------------------

    def _receive(self, posted: PostedRound, meanwhile: Callable[[], None] | None) -> None:
        """Receive a round, hashing experts as they arrive."""
        exchange, executor = posted.exchange, self.executor
        all_here = False
        while not all_here:
            with self._timed("transfer"):
                self._until(lambda: bool(executor.arrived(exchange)) or exchange.pending.poll(), posted, meanwhile)
                arrived = executor.arrived(exchange)
            self.probe(Phase.STAGED, arrived)
            with self._timed("verify"):
                all_here = executor.hash_arrived(exchange, arrived)
        with self._timed("transfer"):
            self._until(exchange.pending.poll, posted, meanwhile)
            exchange.pending.wait(posted.deadline)

    def _until(self, ready: Callable[[], bool], posted: PostedRound, meanwhile: Callable[[], None] | None) -> None:
        """Wait until ``ready``; TransportError: not before the deadline."""
        while not ready():
            if time.monotonic() > posted.deadline:
                posted.exchange.pending.wait(posted.deadline)
            if meanwhile is not None:
                meanwhile()
            time.sleep(_POLL_SECONDS)

    @contextlib.contextmanager
    def _timed(self, part: str, layer: int | None = None) -> Iterator[None]:
        began = time.perf_counter()
        with phase(f"migration: {part}", "", layer, self._epoch):
            yield
        self._seconds[part] += time.perf_counter() - began

    def _on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Select the device: a thread of its own would use GPU 0."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def wait_for_device(self) -> None:
        """Wait until the device has done all queued work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


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
    """Layers in which some slot has different experts."""
    layers: list[int] = np.flatnonzero((current.physical_to_logical != target.physical_to_logical).any(axis=1)).tolist()
    return layers


def _largest_layer_bytes(registry: ExpertTensors) -> int:
    """Bytes of the parameters of one layer's homes on this rank, three times: room for two more tensors of their size
    (Adam's)."""
    sizes = [sum(p.numel() * p.element_size() for p in registry.parameters(layer)) for layer in registry.layers]
    return 3 * max(sizes, default=0)
