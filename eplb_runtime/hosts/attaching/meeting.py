"""`barrier` of all ranks ahead of a collective call of users, with this room's error."""

from __future__ import annotations

from collections.abc import Sequence

from ...distributed.consensus import barrier
from .description import AttachError


def meet(
    everyone: Sequence[int],
    what: str,
    timeout_seconds: float,
    problem: BaseException | None = None,
    *,
    patient: bool = False,
) -> None:
    """Wait for these ranks (`eplb_runtime.distributed.consensus.barrier`).

    Raises:
        AttachError: another rank cannot go on. This rank's own problem is raised as it is.
        RuntimeError: a rank did not come within the timeout, or the store does not answer.
    """
    others_problem = barrier(everyone, what, timeout_seconds, problem, patient=patient)
    if others_problem:
        raise AttachError(others_problem)
