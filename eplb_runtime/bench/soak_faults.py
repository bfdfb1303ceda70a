"""Ways to break a rebalance on one rank: small damages to parts of a live balancer, each mended before the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..balancer import Balancer
from ..migration.transports.base import TransportError
from ..planner.shuffle import plan_shuffle
from ..points import Phase, unobserved
from ..worker import Worker


class Faults:
    """Makes one fault at a time; every rank calls it alike, only the victim does anything.

    Args:
        balancer: of this rank.
        timeout_seconds: of the balancer.
    """

    def __init__(self, balancer: Balancer, timeout_seconds: float) -> None:
        self.rebalancer = balancer._rebalancer
        self.groups = balancer._groups
        self.stall_seconds = 1.2 * timeout_seconds
        self._stalled_until = 0.0

    def make(self, name: str, victim: int) -> None:
        """Mend what was broken and break the next thing."""
        decisions, engine = self.rebalancer.decisions, self.rebalancer._engine
        decisions.planner = plan_shuffle
        engine.probe = unobserved
        if name != "none" and dist.get_rank() == victim:
            FAULTS[name](self)

    def stall(self, worker: Worker) -> None:
        """Keep a thread busy longer than the timeout; and then let it be for as long, however fast steps are."""
        if time.monotonic() > self._stalled_until + self.stall_seconds:
            self._stalled_until = time.monotonic() + self.stall_seconds
            worker.submit(lambda: time.sleep(self.stall_seconds))

    def at(self, phase: Phase, action: Callable[[Any], None]) -> None:
        """Act when a migration comes to this phase for the first time."""
        acted: list[bool] = []

        def probe(now: Phase, subject: Any) -> None:
            if now is phase and subject and not acted:
                acted.append(True)
                action(subject)

        self.rebalancer._engine.probe = probe


def _raise(kind: type[Exception], text: str) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise kind(text)

    return fail


def _planner_raises(faults: Faults) -> None:
    faults.rebalancer.decisions.planner = _raise(ZeroDivisionError, "a planner's bug")


def _planner_stalls(faults: Faults) -> None:
    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(faults.stall_seconds)
        return plan_shuffle(*arguments, **options)

    faults.rebalancer.decisions.planner = slow


def _plan_is_garbled(faults: Faults) -> None:
    def garble(message: bytearray) -> None:
        message[-20:] = b"#" * 20

    faults.at(Phase.PLANNED, garble)


def _plan_cannot_be_taken(faults: Faults) -> None:
    faults.at(Phase.PLANNED, _raise(KeyError, "one rank's own trouble"))


def _decision_is_late(faults: Faults) -> None:
    faults.stall(faults.rebalancer._worker)


def _no_memory(faults: Faults) -> None:
    faults.at(Phase.PREPARED, _raise(MemoryError, "no memory for staging"))


def _migration_stalls(faults: Faults) -> None:
    faults.at(Phase.PREPARED, lambda schedule: time.sleep(faults.stall_seconds))


def _a_bit_flips(faults: Faults) -> None:
    def flip(staged: Any) -> None:
        staged[0].record[3] ^= 1

    faults.at(Phase.STAGED, flip)


def _transport_fails(faults: Faults) -> None:
    faults.at(Phase.STAGED, _raise(TransportError, "the device went away"))


def _verification_fails(faults: Faults) -> None:
    faults.at(Phase.VERIFIED, _raise(OSError, "the device went away"))


def _connections_are_cut(faults: Faults) -> None:
    faults.groups.hang_up(faults.groups.standing)


def _connections_are_cut_in_a_migration(faults: Faults) -> None:
    faults.at(Phase.VERIFIED, lambda staged: faults.groups.hang_up(faults.groups.standing))


def _store_is_silent(faults: Faults) -> None:
    faults.stall(faults.groups.store._worker)


FAULTS: dict[str, Callable[[Faults], None]] = {
    "a bit flips": _a_bit_flips,
    "connections are cut": _connections_are_cut,
    "connections are cut in a migration": _connections_are_cut_in_a_migration,
    "decision is late": _decision_is_late,
    "migration stalls": _migration_stalls,
    "no memory": _no_memory,
    "plan cannot be taken": _plan_cannot_be_taken,
    "plan is garbled": _plan_is_garbled,
    "planner raises": _planner_raises,
    "planner stalls": _planner_stalls,
    "store is silent": _store_is_silent,
    "transport fails": _transport_fails,
    "verification fails": _verification_fails,
}
"""By the names in the result. Planners' faults are rank 0's; on another victim such a decision goes undisturbed."""
