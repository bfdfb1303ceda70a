"""Carries out a migration between two steps, round by round, while training waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from ..distributed.ballot import Ballot, Verdict
from ..distributed.points import Phase
from ..placement import Placement
from .engine import GetReady, MigrationEngine, PreparedMigration, layers_that_differ
from .progress import MigrationProgress
from .schedule import Round


class BetweenSteps:
    """The driver of migrations for which training waits. ``get_ready`` is called for each round before its vote;
    ``wait_for_replicas`` returns when replicas, read from homes that will be written, have arrived."""

    def __init__(
        self, engine: MigrationEngine, get_ready: GetReady, wait_for_replicas: Callable[[], None] = lambda: None
    ) -> None:
        self._engine = engine
        self._get_ready = get_ready
        self._wait_for_replicas = wait_for_replicas
        self.in_flight = False

    def begin(self, current: Placement, target: Placement, key: str) -> None:
        """Begin to take the experts from ``current`` to ``target``; ``key`` names this migration's decisions."""
        self._current, self._target, self._key = current, target, key
        self.in_flight = True

    def advance(self, *, hold_back: bool = False) -> MigrationProgress:
        """Carry out the whole migration that was begun; MigrationBroken: this rank failed after an agreement."""
        self.in_flight = False
        engine, current, target, key = self._engine, self._current, self._target, self._key
        self._wait_for_replicas()  # on every rank, before anything can fail on one
        engine.wait_for_device()  # work that is queued already is no part of the pause
        started = time.perf_counter()
        engine.begin_timing(current.epoch)
        migration, verdict = engine.prepare(current, target, key)
        if migration is None:
            return MigrationProgress(
                current,
                verdict,
                None if verdict.commit else Phase.PREPARED,
                left_layers=tuple(layers_that_differ(current, target)),
                pause_seconds=time.perf_counter() - started,
                seconds=engine.seconds,
            )
        for round_ in migration.schedule.rounds:
            verdict = self._execute(migration, round_, Ballot(f"{key}/{round_.number}"))
            if not verdict.commit:
                break
        engine.wait_for_device()
        return self._progress(migration, verdict, started)

    def current_placement(self) -> Placement:
        """The placement after the rounds committed so far."""
        return self._current

    def drain(self) -> MigrationProgress:
        """Drop a migration that was begun."""
        self.in_flight = False
        return MigrationProgress(self._current)

    def _execute(self, migration: PreparedMigration, round_: Round, ballot: Ballot) -> Verdict:
        engine = self._engine
        engine.restart()
        posted = engine.post(migration, round_)
        engine.arrive(posted, self._get_ready)
        with engine.all_or_nothing(ballot):
            verdict = engine.vote(posted, ballot)
            if verdict.commit:
                for layer in round_.layers:
                    engine.commit(posted, layer)
                engine.finish(posted)
                assert posted.after is not None
                migration.current = self._current = posted.after
        return verdict

    def _progress(self, migration: PreparedMigration, verdict: Verdict, started: float) -> MigrationProgress:
        done: Sequence[Round] = migration.schedule.rounds[: migration.committed]
        return MigrationProgress(
            self._current,
            verdict,
            None if verdict.commit else Phase.STAGED,
            rounds=len(done),
            committed_layers=tuple(sorted({layer for round_ in done for layer in round_.layers})),
            left_layers=tuple(np.flatnonzero(migration.schedule.last_round >= migration.committed).tolist()),
            moved_experts=self._engine.moved_experts(done),
            received_bytes=migration.received_bytes,
            transfers=np.concatenate([round_.transfers for round_ in done]) if done else None,
            record_bytes=migration.records.nbytes,
            pause_seconds=time.perf_counter() - started,
            seconds=self._engine.seconds,
        )
