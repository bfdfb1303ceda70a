"""Carries out a migration between two steps, round by round, while training waits."""

from __future__ import annotations

import time

import numpy as np

from ..distributed.consensus import Ballot, Phase
from ..placement import Placement
from .engine import GetReady, MigrationEngine, layers_that_differ
from .progress import MigrationProgress


def migrate_between_steps(
    engine: MigrationEngine, current: Placement, target: Placement, key: str, get_ready: GetReady
) -> MigrationProgress:
    """Take the experts from ``current`` to ``target``, and return how far they came. Collective.

    Args:
        key: names this migration's decisions.
        get_ready: called for each round before its vote.

    Raises:
        MigrationBroken: this rank failed after an agreement.
    """
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
        engine.executor.restart()
        posted = engine.post(migration, round_)
        engine.arrive(posted, get_ready)
        ballot = Ballot(f"{key}/{round_.number}")
        with engine.all_or_nothing(ballot):
            verdict = engine.vote(posted, ballot)
            if not verdict.commit:
                break
            for layer in round_.layers:
                engine.commit(posted, layer)
            engine.finish(posted)
            assert posted.after is not None
            migration.current = posted.after
    engine.wait_for_device()
    done = migration.schedule.rounds[: migration.committed]
    return MigrationProgress(
        migration.current,
        verdict,
        None if verdict.commit else Phase.STAGED,
        rounds=len(done),
        committed_layers=tuple(sorted({layer for round_ in done for layer in round_.layers})),
        left_layers=tuple(np.flatnonzero(migration.schedule.last_round >= migration.committed).tolist()),
        moved_experts=engine.moved_experts(done),
        received_bytes=migration.received_bytes,
        transfers=np.concatenate([round_.transfers for round_ in done]) if done else None,
        record_bytes=migration.records.nbytes,
        pause_seconds=time.perf_counter() - started,
        seconds=engine.seconds,
    )
