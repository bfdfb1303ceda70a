"""New connections after a failure broke the old ones: made beside training, taken over by all ranks at the same step or
by none, tried until it works, or until no groups are left to try with.

A rank that has lost the others waits in the launcher's store until all are there, however long that takes. Then they
connect, compare what they stand on, and propose a step from which the new connections hold. Whether they do is one
record in the store; a rank that comes to that step before the record is made writes "no" into it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from ..utils.errors import one_line
from ..utils.worker import Worker
from .consensus import Agreement, is_one_value, two_sided
from .nccl_groups import NoGroupsLeft
from .points import Phase, Probe, unobserved
from .process_groups import Connections, ProcessGroups
from .setting_up import TooFewDescriptors
from .store import StoreError
from .transports.base import Transport

logger = logging.getLogger("eplb_runtime")

FIRST_PAUSE_SECONDS = 0.05
LONGEST_PAUSE_SECONDS = 10.0
_UNKNOWN = "unknown"
_ENDED = "connections/ended"
_LACKING = "no, there are too few file descriptors"
LEAD_SECONDS = 0.1
"""How far ahead the step lies from which new connections hold, at the first try; all should know of it by then."""


@dataclass(frozen=True)
class Link:
    """Connections, and the transport of experts on them."""

    connections: Connections
    transport: Transport


@dataclass(frozen=True)
class _Proposal:
    """Connections that hold from the end of a step on, if the record says so; training knows it first."""

    step: int
    key: str
    link: Link
    holds: Future[bool] = field(default_factory=Future)


@dataclass
class RankState:
    """The state of one rank that others compare; written by the training thread, read by the one that connects.

    Args:
        steps: boundaries that training has come to.
        step_seconds: of a training step.
        digest: 16 bytes of the placement.
    """

    steps: int = 0
    step_seconds: float = 0.0
    digest: bytes = bytes(16)


class Reconnection:
    """One rank's part in finding the others again, from the failure to the step where new connections are taken over.

    Args:
        groups: make the connections.
        state: of this rank.
        make_transport: warms one up on new connections, in so many seconds; leaves nothing where it fails.
        begin: called once on the thread that makes connections.
        probe: told of each point on the way.

    Attributes:
        differing: error message if ranks hold different placements; empty if they agree.
        tries: since the connections broke.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        state: RankState,
        make_transport: Callable[[Connections, float], Transport],
        begin: Callable[[], None],
        probe: Probe = unobserved,
    ) -> None:
        self._groups = groups
        self._state = state
        self._make_transport = make_transport
        self._probe = probe
        self._worker = Worker("eplb_runtime connect", begin)
        self._lock = threading.Lock()
        self._proposal: _Proposal | None = None
        self._closing = threading.Event()
        self._under_way = False
        self._attempt = 1
        self._used = 0
        self.differing = ""
        self.tries = 0

    @property
    def under_way(self) -> bool:
        """Whether the old connections are not to be used any more, and no new ones hold yet."""
        return self._under_way

    def begin(self) -> None:
        """The connections are broken: look for the others, on a thread of our own."""
        if not self._under_way and not self._closing.is_set():
            self._under_way = True
            broken = self._groups.current
            self._worker.submit(lambda: self._try_until_it_works(broken))

    def at_boundary(self) -> Link | None:
        """Training has come to the end of a step, which ``state`` says: what holds from here on, on all ranks,
        or None. Waits for the store's answer at most, and only where a proposal falls due."""
        with self._lock:
            proposal = self._proposal
            if proposal is None or self._state.steps < proposal.step:
                return None
            self._proposal = None
        self._probe(Phase.RESUMED, proposal.step)
        holds = self._word(proposal.key, "no") == "yes"
        self._under_way = not holds
        proposal.holds.set_result(holds)
        return proposal.link if holds else None

    def dispose(self, connections: Connections) -> None:
        """Give back connections that stand no more, on our thread: that may take a moment."""
        self._worker.submit(lambda: self._groups.give_back(connections))

    def close(self, seconds: float) -> None:
        """Try no more."""
        self._closing.set()
        with self._lock:
            proposal, self._proposal = self._proposal, None
        if proposal is not None:
            proposal.holds.set_result(False)
        self._worker.close(seconds)

    # -- on the thread -------------------------------------------------------------------------------------------------

    def _try_until_it_works(self, broken: Connections) -> None:
        self._groups.hang_up(broken)
        self.tries, pause, warned = 0, FIRST_PAUSE_SECONDS, False
        while not self._closing.is_set():
            try:
                self.tries += 1
                if self._try():
                    return
            except NoGroupsLeft as error:
                self._word(_ENDED, str(error))  # for ranks that have not come so far, and wait for this one
                logger.error("%s", error)
                return
            except Exception as error:
                lacking = isinstance(error, TooFewDescriptors) or _LACKING in str(error)
                level = logging.WARNING if lacking and not warned else logging.INFO
                warned = warned or lacking
                logger.log(level, "the ranks could not connect yet (%s); trying again", one_line(error))
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _try(self) -> bool:
        """One attempt; whether it needs no other."""
        self._wait_for_all()
        if self._closing.is_set():
            return True
        self._used = self._attempt
        key = f"connections/{self._attempt}/hold"
        connections: Connections | None = None
        link: Link | None = None
        hold = False
        try:
            self._probe(Phase.MET, self._attempt)
            # On a busy machine no try would be through in a short timeout: each has more time than the one before.
            seconds = min(self._groups.setup_seconds, self._groups.timeout_seconds * self.tries)
            connections = self._groups.connect(self._attempt, key, seconds)
            link = Link(connections, self._make_transport(connections, seconds))
            self._probe(Phase.CONNECTED, self._attempt)
            proposal = self._propose(key, link)
            # Training may not learn that they hold, if the store is silent just then; the others will miss it.
            hold = proposal is not None and proposal.holds.result()
        except Exception as error:
            self._word(key, f"{_LACKING}: {error}" if isinstance(error, TooFewDescriptors) else "no")
            raise
        finally:
            if not hold:
                if link is not None:
                    link.transport.close()
                if connections is not None:
                    self._groups.give_back(connections)
        return hold or bool(self.differing)

    def _wait_for_all(self) -> None:
        """Until all ranks of the job have come to the same attempt."""
        store, job = self._groups.store, self._groups.job
        if self._used == self._attempt:
            # No attempt is made twice: what the ranks have left in the store of this one would be met by the next. Its
            # record is missing where the store was silent when it was to be made.
            store.compare_set(f"connections/{self._attempt}/hold", "no")
        while store.word_of(f"connections/{self._attempt}/hold"):
            self._attempt += 1
        here = f"connections/{self._attempt}/here"
        if not store.word_of(f"{here}/{job.rank}"):
            store.add(here, 1)
            store.compare_set(f"{here}/{job.rank}", "here")
        pause = FIRST_PAUSE_SECONDS
        while store.add(here, 0) < len(job.ranks) and not self._closing.is_set():
            if ended := store.word_of(_ENDED):
                raise NoGroupsLeft(ended)
            self._closing.wait(pause)
            # Whoever comes last goes on at once, and waits for the others a timeout long.
            pause = min(1.5 * pause, self._groups.timeout_seconds / 8)

    def _propose(self, key: str, link: Link) -> _Proposal | None:
        """Compare, and agree on a step from which these connections hold; None: they do not."""
        agreement = Agreement(link.connections.control, self._groups.store)
        lead = 1 + int(LEAD_SECONDS * self.tries / max(self._state.step_seconds, 1e-3))
        own = torch.tensor([self._state.steps + lead])
        highest = agreement.highest(torch.cat([own, two_sided(self._state.digest)]))
        if not is_one_value(highest[1:]):
            who = agreement.who_differs(self._state.digest, "placement").cause
            self.differing = f"{who}: they parted in a failure that could not be agreed on; go back to a checkpoint"
            return None
        proposal = _Proposal(int(highest[0]), key, link)
        self._probe(Phase.PROPOSED, proposal.step)
        with self._lock:
            late = self._state.steps >= proposal.step or self._closing.is_set()
            if not late:
                self._proposal = proposal
        try:
            late_anywhere = bool(agreement.highest(torch.tensor([int(late)])))
        except RuntimeError:
            late_anywhere = True  # unless the others have recorded that it holds
        if self._word(key, "no" if late_anywhere else "yes") == "yes" and not late:
            return proposal
        with self._lock:
            untouched = late or self._proposal is proposal
            self._proposal = None
        if not untouched:
            wait([proposal.holds], self._groups.timeout_seconds)  # training looks at this very proposal
        return None

    def _word(self, key: str, word: str) -> str:
        """What stands under a key, after this rank wrote it if nobody else had; another word if the store does not
        answer."""
        try:
            return self._groups.store.compare_set(key, word)
        except StoreError as error:
            logger.info("%s", error)
            return _UNKNOWN
