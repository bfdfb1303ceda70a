"""What the loop of an attached model is in the middle of, and which calls are wrong there: one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum


class Wrong(Enum):
    """Why a call is refused; ``{what}`` is the call."""

    CLOSED = "{what} after close(): experts stay where they are"
    SUSPENDED = (
        "{what} while the balancer is suspended: load weights, gradients and optimizer state, then call "
        "balancer.resume() on every rank"
    )
    IN_SCHEDULE = (
        "{what} inside {schedule}: micro-batches are between their forward and their backward, for which experts must "
        "stay where they are; call it after optimizer.step() and before the next step"
    )
    IN_STEP = (
        "{what} between a backward pass and the optimizer's step, where experts have gradients: call it after "
        "optimizer.step() and before the next forward, or clear the gradients (zero_grad) first"
    )
    IN_LOGICAL_ORDER = "{what} inside logical_order(): experts stay in logical order until its end"


_MOVES = (Wrong.CLOSED, Wrong.IN_SCHEDULE, Wrong.IN_STEP, Wrong.IN_LOGICAL_ORDER)
STEP_ENDS = "the end of a training step (optimizer.step())"
CALLS: Mapping[str, tuple[Wrong, ...]] = {
    "a forward in training": (Wrong.SUSPENDED,),
    "optimizer.step()": (Wrong.SUSPENDED,),
    STEP_ENDS: (Wrong.IN_SCHEDULE, Wrong.SUSPENDED),
    "rebalance()": (Wrong.SUSPENDED, *_MOVES),
    "plan_ahead()": (Wrong.CLOSED, Wrong.IN_SCHEDULE, Wrong.IN_LOGICAL_ORDER),
    "load_state_dict()": (Wrong.SUSPENDED, *_MOVES),
    "logical_order()": (Wrong.SUSPENDED, *_MOVES),
    "suspend()": _MOVES,
    "resume()": (Wrong.CLOSED,),
    "adopt()": (Wrong.CLOSED, Wrong.IN_SCHEDULE, Wrong.IN_STEP),
    "at_once()": (Wrong.CLOSED,),
    "gather_experts()": (Wrong.IN_SCHEDULE,),
}
"""By the call, what it is refused in; the first is said. Others are exports and walks over the weights."""
_EXPORTS = (Wrong.CLOSED, Wrong.IN_SCHEDULE)


class LoopState:
    """The state of one loop, the same on every rank at the same place; an attribute for each kind of `Wrong`.

    Args:
        have_gradients: whether experts have gradients that no optimizer has used.

    Attributes:
        closed, suspended, in_logical_order: as the balancer is.
        in_schedule: the schedule of pipeline stages that runs now; empty: none.
        has_begun: whether a forward in training has begun a step.
    """

    def __init__(self, have_gradients: Callable[[], bool]) -> None:
        self._have_gradients = have_gradients
        self.closed = self.suspended = self.in_logical_order = self.has_begun = False
        self.in_schedule = ""

    @property
    def in_step(self) -> bool:
        return self.has_begun and self._have_gradients()

    def require(self, what: str) -> None:
        """Raise RuntimeError where a call is wrong now."""
        for wrong in CALLS.get(what, _EXPORTS):
            if getattr(self, wrong.name.lower()):
                raise RuntimeError(wrong.value.format(what=what, schedule=self.in_schedule))
