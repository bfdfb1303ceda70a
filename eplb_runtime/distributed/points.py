"""The named points of the protocol: where a rank can stand still, die or fail, in the order in which it comes to them.

The code calls a probe at each of them; tests and `tests/soak` put faults there. What is reached without a name here, or
named and never reached, is found by `tests/unit/distributed/test_ballot.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any


class Phase(Enum):
    """What a rank has just done, or is about to do. The comment says with what the probe is called."""

    STEPPED = "stepped"
    """An optimizer step is over, on the training thread. The number of the step."""
    DECIDING = "deciding"
    """A decision begins, on the worker's thread. Its key."""
    PLANNED = "planned"
    """A plan has come from rank 0. Its bytes, a bytearray that is read afterwards."""
    PREPARED = "prepared"
    """This rank has its schedule and its memory. The schedule."""
    POSTED = "posted"
    """A round has been posted. The round."""
    STAGED = "staged"
    """Experts have come. What is staged, perhaps nothing."""
    VERIFIED = "verified"
    """What came is what left. What is staged."""
    VOTED = "voted"
    """This rank has said yes or no to a round or a plan, and nothing is recorded yet. The verdict of the vote."""
    DECIDED = "decided"
    """The verdict on a round is recorded. The verdict."""
    AWAITED = "awaited"
    """With overlap: a forward has come to a layer whose experts are on their way. The layer."""
    COMMITTING = "committing"
    """A layer of a round is about to be written. The layer."""
    COMMITTED = "committed"
    """A round is committed. The round."""
    CONNECTED = "connected"
    """New connections are made, and nothing is recorded yet. The attempt."""


Probe = Callable[[Phase, Any], None]
"""Called at each point with what the rank works on. One that raises makes the rank fail there."""


def unobserved(phase: Phase, subject: Any) -> None:
    """Looks at nothing."""
