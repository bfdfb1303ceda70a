"""New control and migration groups after a failure broke the old ones, made by all ranks at the end of one step.

The protocol of one attempt, in words of the launcher's store under ``connections/N/``. Everything runs on the training
thread, and a rank whose connections are whole asks the store nothing.

1. A rank that lost the others closes its old connections, so that the others fail in their next decision. It adds one
   to ``here`` at its next boundary, and reads the words below at each later one. It does not wait.
2. A rank that finds all ranks in ``here`` writes the boundary at which they meet into ``step``: its own and a few more.
   Ranks that train together are at most one boundary apart, so all read the word before they come there.
3. At that boundary each rank adds one to ``came``. The last one writes "yes" into ``go``; a rank that has passed the
   boundary, or cannot make groups, adds nothing and writes why. The others wait for the word for the timeout times the
   number of tries. Whoever waited in vain writes the ranks that did not come.
4. After "yes" all make the groups and the transport, within the same time, and vote; a rank that failed votes no. They
   also compare their placements.
5. A rank that counted "yes" from all writes "yes" into ``hold``, any other writes why not. The first word decides: all
   take the new groups, or none does. Nobody counts "yes" from all without this rank's, so a rank that failed never
   reads "yes".

After an attempt without "yes" ranks begin the next one at their next boundary. After `MOST_TRIES` this rank makes no
more: the balancer stays off with one warning, and training goes on. It goes on as well where the store does not answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..utils.errors import one_line
from .consensus import Agreement, is_one_value, two_sided
from .points import Phase, Probe, unobserved
from .process_groups import ProcessGroups
from .store import StoreError
from .transports.base import Transport

logger = logging.getLogger("eplb_runtime")

MOST_TRIES = 5
LEAD_STEPS = 2
"""How many boundaries ahead ranks meet at the first try; twice as many at each later one."""
_YES = "yes"


@dataclass(frozen=True)
class Link:
    """New groups, and the transport of experts on them."""

    control: dist.ProcessGroup
    migration: dist.ProcessGroup
    transport: Transport


class Reconnection:
    """One rank's part in making new connections.

    Args:
        groups: make the groups.
        make_transport: makes a transport on a migration group and warms it up, in so many seconds; leaves nothing where
            it fails.
        probe: told of each point on the way.

    Attributes:
        under_way: whether the old connections are not to be used any more, and no new ones hold yet.
        differing: error message if ranks hold different placements; empty if they agree.
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
        self._digest = bytes(16)
        self._attempt = 1
        self._here = 0
        self.under_way = False
        self.differing = ""
        self.tries = 0

    def begin(self, digest: bytes) -> None:
        """Begin after the connections broke, with the placement's digest."""
        if not self.under_way:
            self.under_way, self.tries, self._digest = True, 0, digest
            self._groups.hang_up()

    def at_boundary(self, boundary: int) -> Link | None:
        """Return what holds from here on, at the same boundary since attach on all ranks, or None: nothing yet."""
        if not self.under_way or self.tries > MOST_TRIES:
            return None
        try:
            step = self._step_of_meeting(boundary)
            if step is None or boundary < step:
                return None
            if boundary > step:
                late = f"rank {self._groups.job.rank} had passed the step"
                for word in ("go", "hold"):
                    self._groups.store.compare_set(self._key(word), late)
                return None
            return self._connect()
        except StoreError as error:
            logger.info("the ranks could not connect yet: %s", error)
            return None

    def _key(self, word: str) -> str:
        return f"connections/{self._attempt}/{word}"

    def _step_of_meeting(self, boundary: int) -> int | None:
        """Return the boundary at which all ranks meet; None: not all are known to have lost their connections."""
        store, ranks = self._groups.store, self._groups.job.ranks
        while store.word_of(self._key("hold")):
            self._attempt += 1
        joins = self._here != self._attempt
        if joins:
            self.tries += 1
            if self.tries > MOST_TRIES:
                logger.warning("the ranks could not connect in %d tries: nothing is rebalanced any more", MOST_TRIES)
                return None
        here = store.add(self._key("here"), int(joins))
        self._here = self._attempt
        word = store.word_of(self._key("step"))
        if not word and here >= len(ranks):
            word = store.compare_set(self._key("step"), str(boundary + LEAD_STEPS * 2 ** (self.tries - 1)))
        return int(word) if word else None

    def _connect(self) -> Link | None:
        """Meet the others, make what `Link` has, and record whether it holds."""
        groups, link = self._groups, None
        # On a busy machine no try would be through in a short timeout: each has more time than the one before.
        seconds = min(groups.setup_seconds, groups.timeout_seconds * self.tries)
        with ExitStack() as undo:
            cause = self._meet(seconds)
            try:
                if not cause:
                    control = groups.new_control(self._attempt, seconds)
                    undo.callback(groups.give_back, control)
                    link, problem = self._make(control, seconds, undo)
                    cause = self._vote(control, problem, 3 * seconds)
            except Exception as error:
                cause = one_line(error)
            word = groups.store.compare_set(self._key("hold"), cause or _YES)
            if word == _YES and link is not None:
                undo.pop_all()
                self.under_way = False
                return link
        logger.info("the ranks could not connect: %s", word)
        return None

    def _meet(self, seconds: float) -> str:
        """Wait until all ranks have come to this boundary. Returns why they cannot go on; empty: they can."""
        groups, store = self._groups, self._groups.store
        try:
            self._probe(Phase.MET, self._attempt)
            problem = groups.lacks_descriptors()
        except Exception as error:
            problem = one_line(error, with_type=True)
        store.compare_set(self._key(f"came/{groups.job.rank}"), "came")
        if problem:
            store.compare_set(self._key("go"), f"rank {groups.job.rank}: {problem}")
        elif store.add(self._key("came"), 1) == len(groups.job.ranks):
            store.compare_set(self._key("go"), _YES)
        if not store.wait(self._key("go"), seconds):
            missing = [str(rank) for rank in groups.job.ranks if not store.word_of(self._key(f"came/{rank}"))]
            store.compare_set(self._key("go"), f"rank {', '.join(missing[:8])} did not come within {seconds:g} s")
        word = store.word_of(self._key("go"))
        return "" if word == _YES else word

    def _make(self, control: dist.ProcessGroup, seconds: float, undo: ExitStack) -> tuple[Link | None, str]:
        """Make the migration group and the transport. Returns why this rank could not, too; empty: it could."""
        try:
            migration = self._groups.new_migration(self._attempt, seconds)
            undo.callback(self._groups.give_back, migration)
            transport = self._make_transport(migration, seconds)
            undo.callback(transport.close)
            self._probe(Phase.CONNECTED, self._attempt)
            return Link(control, migration, transport), ""
        except Exception as error:
            return None, one_line(error, with_type=True)

    def _vote(self, control: dist.ProcessGroup, problem: str, seconds: float) -> str:
        """Return why the connections do not hold, as all ranks say it; empty: they do. Also compares placements."""
        agreement = Agreement(control, self._groups.store)
        own = torch.tensor([agreement.rank_priority if problem else 0])
        highest = agreement.highest(torch.cat([own, two_sided(self._digest)]), seconds)
        if highest[0]:
            return agreement.problem_of(int(highest[0]), problem)
        if is_one_value(highest[1:]):
            return ""
        who = agreement.who_differs(self._digest, "placement").cause
        self.differing = f"{who}: they parted in a failure that could not be agreed on; go back to a checkpoint"
        return self.differing
