"""New connections after a failure broke the old ones: taken over by all ranks at the same step or by none, tried until
it works, or until no groups are left to try with.

A rank that has lost the others waits in the launcher's store until all are there, however long that takes. Then they
connect, compare what they stand on, and propose a step from which the new connections hold. Whether they do is one
record in the store; a rank that comes to that step before the record is made writes "no" into it.

All of it runs beside training, on a thread; but for what a device waits in, which
`ProcessGroups.connects_in_background` tells: then ranks propose a step before they have more than control, training
makes the rest when it comes to that step, and the record that it holds is made there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

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


@dataclass
class _Proposal:
    """Connections that hold from the end of a step on, if the record says so; training knows it first.

    Args:
        key: of that record, or of the one that training makes them at this step.
        holds: whether they do; or why training could not make them.
    """

    step: int
    key: str
    making: _Making
    holds: Future[bool] = field(default_factory=Future)


@dataclass
class _Making:
    """The connections of one attempt, as far as they are made.

    Args:
        key: of the record whether they hold.
        seconds: for each part.
    """

    attempt: int
    key: str
    seconds: float
    control: dist.ProcessGroup | None = None
    connections: Connections | None = None
    link: Link | None = None


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
        or None. Waits only where a proposal falls due: for the store's answer, and where connections are not made
        beside training for all ranks to make them, within their deadline."""
        with self._lock:
            proposal = self._proposal
            if proposal is None or self._state.steps < proposal.step:
                return None
            self._proposal = None
        holds, problem = False, None
        try:
            self._probe(Phase.RESUMED, proposal.step)
            agreed = self._word(proposal.key, "no") == "yes"
            if agreed and proposal.making.link is None:
                agreed, problem = self._make_here(proposal.making)
            holds = agreed
        finally:
            self._under_way = not holds
            if problem is None:
                proposal.holds.set_result(holds)
            else:
                proposal.holds.set_exception(problem)
        return proposal.making.link if holds else None

    def dispose(self, connections: Connections) -> None:
        """Give back connections that stand no more, on our thread: that may take a moment."""
        self._worker.submit(lambda: self._groups.give_back(connections.control, connections.migration))

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
        # On a busy machine no try would be through in a short timeout: each has more time than the one before.
        seconds = min(self._groups.setup_seconds, self._groups.timeout_seconds * self.tries)
        making = _Making(self._attempt, f"connections/{self._attempt}/hold", seconds)
        hold = False
        try:
            self._probe(Phase.MET, self._attempt)
            making.control = self._groups.connect_control(making.attempt, making.key, seconds)
            if self._groups.connects_in_background:
                self._make(making)
            proposal = self._propose(making, making.control)
            # Training may not learn that they hold, if the store is silent just then; the others will miss it.
            hold = proposal is not None and proposal.holds.result()
        except Exception as error:
            self._word(making.key, f"{_LACKING}: {error}" if isinstance(error, TooFewDescriptors) else "no")
            raise
        finally:
            if not hold:
                self._give_up(making)
        return hold or bool(self.differing)

    def _make(self, making: _Making) -> None:
        """All but control."""
        assert making.control is not None
        making.connections = self._groups.connect(making.control, making.attempt, making.key, making.seconds)
        making.link = Link(making.connections, self._make_transport(making.connections, making.seconds))
        self._probe(Phase.CONNECTED, making.attempt)

    def _make_here(self, making: _Making) -> tuple[bool, Exception | None]:
        """On the thread that trains, at the same step on every rank: all but control, and the record whether it holds.
        That, and why this rank could not make it."""
        assert making.control is not None
        problem: Exception | None = None
        try:
            self._make(making)
        except Exception as error:
            problem = error
        try:
            agreement = Agreement(making.control, self._groups.store)
            made = not bool(agreement.highest(torch.tensor([int(problem is not None)]), making.seconds))
        except RuntimeError:
            made = False  # unless the others have recorded that it holds: they have heard from this rank then
        return self._word(making.key, "yes" if made else "no") == "yes" and problem is None, problem

    def _give_up(self, making: _Making) -> None:
        if making.link is not None:
            making.link.transport.close()
        if making.connections is not None:
            self._groups.give_back(making.connections.migration)
        if making.control is not None:
            self._groups.give_back(making.control)

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

    def _propose(self, making: _Making, control: dist.ProcessGroup) -> _Proposal | None:
        """Compare, and agree on a step from which these connections hold, or at which training makes them; None: they
        do not."""
        key = making.key if making.link is not None else f"connections/{making.attempt}/step"
        agreement = Agreement(control, self._groups.store)
        lead = 1 + int(LEAD_SECONDS * self.tries / max(self._state.step_seconds, 1e-3))
        own = torch.tensor([self._state.steps + lead])
        highest = agreement.highest(torch.cat([own, two_sided(self._state.digest)]))
        if not is_one_value(highest[1:]):
            who = agreement.who_differs(self._state.digest, "placement").cause
            self.differing = f"{who}: they parted in a failure that could not be agreed on; go back to a checkpoint"
            return None
        proposal = _Proposal(int(highest[0]), key, making)
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
            return proposal  # training looks at it just now, and may see more than this thread
        self._word(making.key, "no")
        return None

    def _word(self, key: str, word: str) -> str:
        """What stands under a key, after this rank wrote it if nobody else had; another word if the store does not
        answer."""
        try:
            return self._groups.store.compare_set(key, word)
        except StoreError as error:
            logger.info("%s", error)
            return _UNKNOWN
