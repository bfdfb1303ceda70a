"""How ranks agree: compare what each will do, vote, and record one decision that nobody can see differently.

Words of all ranks are joined by messages between pairs, in a number of steps that grows with the logarithm of the
number of ranks; only when something is wrong does every rank say what it has. A vote alone is not enough: a rank may
time out in it while the others finish. So the outcome is a record in the launcher's store, written by compare-and-set:
the first word stands, and who timed out writes "abort". `ballot` says what a rank does when.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.errors import one_line
from .ballot import Act, Ballot, Heard, State, Verdict
from .points import Phase, Probe, unobserved
from .private_groups import hang_up
from .process_groups import timeout_of
from .store import JobStore, StoreError

logger = logging.getLogger("eplb_runtime")

_STORE_SECONDS = 30.0
_MOST_SECONDS = 1800.0
_PAUSE_SECONDS = 0.05
"""Between two questions to a store whose connection fails at once."""
_CAUSE_BYTES = 240
_LARGEST_WORD = 2**63 - 1


class InDoubt(RuntimeError):
    """This rank has said yes to a decision, and what became of it cannot be learnt any more."""


class Agreement:
    """Comparisons and votes among the ranks of the control group. Each call is collective over it.

    Args:
        control: gloo, all ranks of the job.
        store: where decisions are recorded; None: the group's own.
        probe: told of each vote.
        most_seconds: that a rank which has said yes asks for the outcome.
    """

    def __init__(
        self,
        control: dist.ProcessGroup,
        store: JobStore | None = None,
        probe: Probe = unobserved,
        most_seconds: float = _MOST_SECONDS,
    ) -> None:
        self._most_seconds = most_seconds
        self._control = control
        self._rank = control.rank()
        self._ranks = dist.get_process_group_ranks(control)
        if store is None:
            store = JobStore(control.get_group_store(), "agreement", _STORE_SECONDS)
        self._store = store
        self._probe = probe

    def close(self) -> None:
        """Let go of the group, whose threads and connections go with the last who holds it. Nobody compares or votes
        any more."""
        del self._control

    @property
    def turn(self) -> int:
        """A positive number that is the higher, the lower the rank: the highest over ranks names the lowest rank."""
        return len(self._ranks) - self._rank

    def highest(self, words: Tensor) -> Tensor:
        """The element-wise maximum of int64 words over all ranks; every rank learns it after ``ceil(log2 R)`` steps.

        In step ``i`` each rank hands what it knows to the rank ``2^i`` places further on.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        known, arrived, distance = words.clone(), torch.empty_like(words), 1
        limit = timeout_of(self._control)
        while distance < len(self._ranks):
            to = self._ranks[(self._rank + distance) % len(self._ranks)]
            source = self._ranks[(self._rank - distance) % len(self._ranks)]
            sent = known.clone()
            works = [dist.isend(sent, to, group=self._control), dist.irecv(arrived, source, group=self._control)]
            for work in works:
                assert work is not None
                work.wait(limit)  # by itself gloo waits as long as was said when the group was made
            torch.maximum(known, arrived, out=known)
            distance *= 2
        return known

    def same_on_all(self, digest: bytes, what: str, problem: str = "") -> Verdict:
        """Whether every rank came with the same 16 bytes.

        Args:
            digest: zeros: this rank has no ``what``.
            problem: why this rank cannot go on, whatever the digests; empty: it can. Every rank learns it.
        """
        own = torch.tensor([not any(digest), self.turn if problem else 0])
        try:
            highest = self.highest(torch.cat([two_sided(digest), own]))
            if highest[-1]:
                return Verdict(False, self.problem_of(int(highest[-1]), problem))
            if is_one_value(highest[:4]) and not highest[4]:
                return Verdict(True)
            return self.who_differs(digest, what)
        except RuntimeError as error:
            return Verdict(False, f"the ranks could not compare their {what}: {one_line(error)}", True)

    def who_differs(self, digest: bytes | None, what: str) -> Verdict:
        """The verdict that names the ranks whose 16 bytes are zeros, or others than the first rank's.

        Args:
            digest: None: this rank has nothing to compare, and that is as it should be.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        mine = torch.zeros(17, dtype=torch.uint8)
        if digest is not None:
            mine[0] = 1
            mine[1:] = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_ = [torch.empty_like(mine) for _ in self._ranks]
        dist.all_gather(all_, mine, group=self._control)
        said = {rank: bytes(row[1:].tolist()) for rank, row in zip(self._ranks, all_, strict=True) if row[0]}
        none = [rank for rank, theirs in said.items() if not any(theirs)]
        first = next(iter(said), 0)
        odd = [rank for rank, theirs in said.items() if theirs != said[first]]
        if none:
            return Verdict(False, f"no {what} on rank {', '.join(map(str, none))}")
        return Verdict(False, f"rank {', '.join(map(str, odd))} has another {what} than rank {first}")

    def problem_of(self, turn: int, problem: str) -> str:
        """What is wrong on the rank that has this `turn`, in its own words.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        rank = self._ranks[len(self._ranks) - turn]
        text = torch.zeros(_CAUSE_BYTES, dtype=torch.uint8)
        if turn == self.turn:
            said = problem.encode()[:_CAUSE_BYTES]
            text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        dist.broadcast(text, src=rank, group=self._control)
        return f"rank {rank}: {bytes(text.tolist()).rstrip(bytes(1)).decode(errors='replace')}"

    def decide(self, ballot: Ballot, problem: str, timed_out: bool) -> Verdict:
        """Vote, and come to the one decision. A rank that has said yes asks for it until the store answers.

        Args:
            ballot: new for each decision; its other thread may have refused already.
            problem: why this rank cannot commit; empty: it can. Every rank learns it.
            timed_out: whether the problem broke the groups' connections: then this rank says so to nobody, and hangs
                up, so that nobody waits for it.

        Raises:
            InDoubt: the store has not answered for ``most_seconds``.
        """
        if timed_out:
            return self.stay_away(ballot, Verdict(False, problem, True))
        if not problem and self._store.silent:
            problem = "the launcher's store does not answer"
        ballot.hear(Heard.REFUSE if problem else Heard.VOTE, Verdict(False, problem))
        return self._follow(ballot, *self._count(ballot.refusal))

    def refuse(self, ballot: Ballot, verdict: Verdict) -> Verdict:
        """Say no. A rank that has said yes already can only propose that, and follows what all come to.

        Raises:
            InDoubt: as `decide`.
        """
        return self._follow(ballot, Heard.REFUSE, verdict)

    def stay_away(self, ballot: Ballot, verdict: Verdict) -> Verdict:
        """`refuse`, and take no part in the vote: who waits for this rank's word there comes back at once."""
        try:
            return self.refuse(ballot, verdict)
        finally:
            hang_up(self._control, "gloo")

    def _follow(self, ballot: Ballot, heard: Heard, verdict: Verdict) -> Verdict:
        """Do what the table says until it is known what all ranks do."""
        began, act = time.monotonic(), ballot.hear(heard, verdict)
        while ballot.verdict is None:
            if act is not Act.RECORD:
                self._wait_for_another(ballot, began)  # thread of this rank, which has refused, or is in a meeting
                continue
            try:
                patient = ballot.state is State.DOUBT
                said = self._store.compare_set(ballot.key, verdict.word, patient=patient, passing=True)
                answer = Verdict.of_word(said)
                act = ballot.hear(Heard.COMMIT if answer.commit else Heard.ABORT, answer)
            except StoreError as error:
                act = ballot.hear(Heard.SILENCE, replace(verdict, cause=verdict.cause or one_line(error)))
                logger.warning("%s; it is asked for what became of a migration", one_line(error))
                if act is Act.RECORD:
                    self._wait_for_another(ballot, began)
        return ballot.verdict

    def _wait_for_another(self, ballot: Ballot, began: float) -> None:
        """Thread of this rank, or an answer that may come.

        Raises:
            InDoubt: it never will.
        """
        if time.monotonic() - began > self._most_seconds:
            raise InDoubt("this rank has said yes to a migration, and cannot learn what became of it")
        ballot.wait(_PAUSE_SECONDS)

    def record(self, key: str, verdict: Verdict) -> Verdict:
        """Write down the verdict on a decision, unless another stands already; what stands.

        A rank that the store does not answer follows its own: so only for what moves nothing before another vote.
        """
        try:
            return Verdict.of_word(self._store.compare_set(key, verdict.word, passing=True))
        except StoreError as error:
            logger.error("%s; this rank follows its own vote", one_line(error))
            return replace(verdict, cause=verdict.cause or one_line(error), connections_broken=True)

    def _count(self, problem: str) -> tuple[Heard, Verdict]:
        """Say this rank's word and hear those of all."""
        try:
            worst = int(self.highest(torch.tensor([self.turn if problem else 0])))
            counted = Verdict(False, self.problem_of(worst, problem)) if worst else Verdict(True)
            self._probe(Phase.VOTED, counted)
            return (Heard.A_NO if worst else Heard.ALL_YES), counted
        except Exception as error:
            return Heard.LOST, Verdict(False, f"the vote did not finish: {one_line(error)}", True)


def two_sided(digest: bytes) -> Tensor:
    """int64 ``[4]``: two words of 16 bytes, each followed by what it lacks to the largest word, so that the highest
    over ranks tells the lowest too. None is negative: zeros, for a rank that has nothing to compare, never win."""
    words = torch.from_numpy(np.frombuffer(digest, dtype="<i8").copy()) & _LARGEST_WORD
    return torch.stack([words, _LARGEST_WORD - words], dim=1).flatten()


def is_one_value(highest: Tensor) -> Tensor:
    """bool ``[...]``: whether the highest of `two_sided` words ``[..., 4]`` over ranks came from one digest alone, or
    from none."""
    word, lacks = highest[..., 0::2], highest[..., 1::2]
    return ((word + lacks == _LARGEST_WORD) | (word + lacks == 0)).all(dim=-1)
