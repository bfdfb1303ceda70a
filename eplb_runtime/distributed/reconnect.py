"""New control and migration groups after a failure broke the old ones, made by all ranks at the end of one step.

The ranks agree by words in the launcher's store under ``connections/N/``, N the attempt. The first word of a key
decides, the same for all ranks. A rank whose connections are whole asks the store nothing.

1. A rank that lost the others closes its old connections, so that the others fail in their next decision, and adds one
   to ``here``. Training goes on.
2. When all ranks are in ``here``, one writes into ``step`` the boundary at which they meet, a few ahead. Ranks that
   train together are at most one boundary apart, so all read it before they come there.
3. At that boundary all ranks meet in ``go``. Then they make the groups and the transport, and meet in ``hold``: all use
   the new groups, or none does.

After an attempt in vain the next one begins. After `MOST_TRIES` the balancer stays off with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch.distributed as dist

from ..utils.errors import one_line
from .consensus import arrive, outcome_of
from .points import Phase, Probe, unobserved
from .process_groups import ProcessGroups
from .store import StoreError
from .transports.base import Transport

logger = logging.getLogger("eplb_runtime")

MOST_TRIES = 5
LEAD_STEPS = 2
"""How many boundaries ahead ranks meet."""


Link = tuple[Transport, list[dist.ProcessGroup]]
"""A transport of experts on new groups, which are taken over; and the groups before them, to be given back."""


class Reconnection:
    """One rank's part in making new connections.

    Args:
        groups: make the groups.
        make_transport: makes a transport on a migration group and warms it up, in so many seconds; leaves nothing where
            it fails.
        probe: told of each point on the way.

    Attributes:
        under_way: whether the old connections are not to be used any more, and no new ones hold yet.
        tries: attempts since the connections broke.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        make_transport: Callable[[dist.ProcessGroup, float], Transport],
        probe: Probe = unobserved,
    ) -> None:
        self._groups = groups
        self._make_transport = make_transport
        self._probe = probe
        self._attempt, self._here, self._said = 1, 0, ""
        self.under_way = False
        self.tries = 0

    def begin(self) -> None:
        """Begin after the connections broke."""
        if not self.under_way:
            self.under_way, self.tries, self._said = True, 0, ""
            self._groups.hang_up()

    def at_boundary(self, boundary: int) -> Link | None:
        """Return what holds from here on, at the same boundary since attach on all ranks, or None: nothing yet."""
        if not self.under_way or self.tries > MOST_TRIES:
            return None
        try:
            step = self._step_of_meeting(boundary)
            if boundary == step:
                return self._connect()
            for word in ("go", "hold") if step is not None and boundary > step else ():
                self._groups.store.compare_set(self._key(word), f"rank {self._groups.job.rank} had passed the step")
        except StoreError as error:
            if str(error) != self._said:  # a store that is gone is so at every boundary
                logger.info("the ranks could not connect yet: %s", error)
            self._said = str(error)
        return None

    def _key(self, word: str) -> str:
        return f"connections/{self._attempt}/{word}"

    def _step_of_meeting(self, boundary: int) -> int | None:
        """Return the boundary at which all ranks meet; None: not all are known to have lost their connections."""
        store = self._groups.store
        while store.word_of(self._key("hold")):
            self._attempt += 1
        if joins := self._here != self._attempt:
            self.tries += 1
            if self.tries > MOST_TRIES:
                logger.warning("the ranks could not connect in %d tries: nothing is rebalanced any more", MOST_TRIES)
                return None
        here = store.add(self._key("here"), int(joins))
        self._here = self._attempt
        if here < len(self._groups.job.ranks):
            return None
        return int(store.compare_set(self._key("step"), str(boundary + LEAD_STEPS)))

    def _connect(self) -> Link | None:
        """Meet the others, make groups and the transport, and take them over if all ranks could."""
        # On a busy machine no try would be through in a short timeout: each has more time than the one before.
        seconds = min(self._groups.setup_seconds, self._groups.timeout_seconds * self.tries)
        with ExitStack() as undo:
            problem = ""
            if cause := self._meet("go", "", seconds):
                self._groups.store.compare_set(self._key("hold"), cause)
            else:
                try:
                    made = self._groups.make_again(self._attempt, seconds)
                    undo.callback(self._groups.give_back, *made)
                    transport = self._make_transport(made[1], seconds)
                    undo.callback(transport.close)
                    self._probe(Phase.CONNECTED, self._attempt)
                except Exception as error:
                    problem = one_line(error, with_type=True)
                if not (cause := self._meet("hold", problem, 3 * seconds)):
                    undo.pop_all()
                    self.under_way = False
                    return transport, self._groups.take_over(made)
        logger.info("the ranks could not connect: %s", cause)
        return None

    def _meet(self, word: str, problem: str, seconds: float) -> str:
        """Wait for all ranks. Returns why they cannot go on, the same on all of them; empty: they can."""
        store, job = self._groups.store, self._groups.job
        said = problem and f"rank {job.rank}: {problem}"
        arrive(store, self._key(word), job.ranks, job.rank, said)
        return outcome_of(store, self._key(word), job.ranks, seconds)[0]
