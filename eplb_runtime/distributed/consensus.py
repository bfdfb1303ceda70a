"""All agreements of ranks: gather, barrier, the first problem, equality, and a vote with a record.

Each waits no longer than its deadline, or than its group's timeout where it is given none. Each answer is the same on
every rank, and names the ranks that differ or have failed.

A vote alone is not enough: a rank may time out in it while the others finish. So the outcome is a record in the
launcher's store, written by compare-and-set: the first word counts, and a rank that timed out writes "abort".

No rank can have counted "all yes" without this rank's yes: until it has said that, it may refuse alone. From then on
it is bound, until it hears of another's no: it may propose a word, but acts on what the record holds, however long that
takes to hear. `tests/unit/distributed/test_ballot.py` explores all that can happen.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.text import one_line
from .store import SETUP_SECONDS, JobStore, StoreError

logger = logging.getLogger("eplb_runtime")

Group = dist.ProcessGroup
_CPU = torch.device("cpu")
_CLOSING = timedelta(milliseconds=1)
_NO_TAG = 0x7FFFFF
"""Tag of a message that is never sent: one that met a real message of another size would end the process."""
POLL_SECONDS = 0.0002
_STORE_SECONDS = 30.0
"""So long a store may take to answer: it may be slow where a meeting's deadline is short."""
_SOON_SECONDS = 10.0
_PAUSE_SECONDS = 0.05  # between two questions to a store whose connection fails at once
_CAUSE_BYTES, _KIND_BYTES = 240, 8
_ALL, _NOT_COME, _CANNOT = "all", "not come ", "cannot "

all_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch 2.13 has a new name for it and warns of the old one, which 2.11 alone knows."""


class TransportError(RuntimeError):
    """Bytes did not arrive: a peer is gone or too slow. Transport and groups may be unusable now."""


def timeout_of(group: Group, device: torch.device = _CPU) -> timedelta:
    """Return how long collectives of this group may take now, on its backend for ``device``."""
    limit: timedelta = group._get_backend(device).options._timeout
    return limit


def close_connections(group: Group) -> None:
    """Make the group unusable on this rank, so that ranks which wait for this one fail at once. Aborts NCCL's
    communicator, or closes gloo's connections (none in a group of one rank). Errors are ignored."""
    with contextlib.suppress(RuntimeError):
        if group.name() != "gloo":
            group.abort()
        elif group.size() > 1:
            # gloo closes all connections of a group when a wait on it expires.
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NO_TAG).wait(_CLOSING)


def gather_rows(mine: Tensor, group: Group, deadline: float | None = None) -> Tensor:
    """Return one contiguous tensor of each rank, of equal shapes, stacked: ``[R, ...]``, by one all-gather. With a
    deadline (of `time.monotonic`) the host waits. TransportError: it passed, or a rank is gone: the group is broken."""
    rows = mine.new_empty(group.size() * mine.numel())
    if deadline is None:
        all_gather_into(rows, mine.reshape(-1), group=group)
        return rows.view(group.size(), *mine.shape)
    try:
        work = all_gather_into(rows, mine.reshape(-1), group=group, async_op=True)
        # On a device wait() makes the stream wait, not the host; and a watchdog would end the process.
        while mine.device.type != "cpu" and not work.is_completed():
            if time.monotonic() > deadline:
                group.abort()
                raise RuntimeError("a rank did not come in time")
            time.sleep(POLL_SECONDS)
        work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
    except RuntimeError as error:
        raise TransportError(f"the ranks could not meet: {one_line(error)}") from error
    return rows.view(group.size(), *mine.shape)


def gather_bytes(mine: bytes, group: Group, device: torch.device = _CPU, deadline: float | None = None) -> list[bytes]:
    """Return bytes of any length from all ranks, in the order of the group, by two all-gathers (one if no rank has
    any). TransportError: the deadline passed (of `time.monotonic`; None: the group's timeout), or a rank is gone."""
    if deadline is None:
        deadline = time.monotonic() + timeout_of(group, device).total_seconds()
    lengths = gather_rows(torch.tensor([len(mine)], device=device), group, deadline).flatten().tolist()
    longest = max(lengths)
    if not longest:
        return [b""] * group.size()
    padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
    rows = gather_rows(padded.to(device), group, deadline).cpu().numpy()
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def gather_json(mine: Any, group: Group, device: torch.device = _CPU, deadline: float | None = None) -> list[Any]:
    """Return what each rank gives, as JSON by `gather_bytes`. None is sent as no bytes, and comes as None."""
    words = gather_bytes(b"" if mine is None else json.dumps(mine).encode(), group, device, deadline)
    return [json.loads(word) if word else None for word in words]


def first_problem(problem: str, group: Group, device: torch.device = _CPU, deadline: float | None = None) -> str:
    """Return ``rank N: problem`` of the first rank whose problem is not "", or ""; the same on all. Collective."""
    texts = gather_bytes(problem.encode(), group, device, deadline)
    said = zip(dist.get_process_group_ranks(group), texts, strict=True)
    return next((f"rank {rank}: {text.decode(errors='replace')}" for rank, text in said if text), "")


@contextlib.contextmanager
def failing_together(group: Group, device: torch.device, deadline: float) -> Iterator[None]:
    """Enclose what a rank does alone between meetings: if it fails on one, TransportError on all. Collective."""
    try:
        yield
    except Exception as error:
        problem = one_line(error)
        with contextlib.suppress(TransportError):  # then nobody hears of it, and this rank says so itself
            problem = first_problem(problem, group, device, deadline)
        raise TransportError(problem) from error
    if problem := first_problem("", group, device, deadline):
        raise TransportError(problem)


def maxima(values: Tensor, group: Group) -> Tensor:
    """Replace ``values`` by their element-wise maximum over ranks (all-reduce, in place), and return it."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return values


def deviating(values: Mapping[int, Hashable], ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` whose value differs from the value of the first of them."""
    return [rank for rank in ranks if values[rank] != values[ranks[0]]]


def differing(values: Mapping[int, Hashable], ranks: Sequence[int], what: str) -> str:
    """Return a line that names those of ``ranks`` whose value differs from the first one's; "": all are equal."""
    odd = ", ".join(map(str, deviating(values, ranks)))
    return odd and f"rank {odd} has another {what} than rank {ranks[0]}"


def all_equal(digest: bytes, what: str, group: Group, sets: Sequence[Sequence[int]] | None = None) -> str:
    """Compare all ranks' digests in each of ``sets`` (None: the group). Return a line that names the ranks that differ
    in the first set where some do; "": they are equal. Collective."""
    ranks = dist.get_process_group_ranks(group)
    digests = dict(zip(ranks, gather_bytes(digest, group), strict=True))
    return next(filter(None, (differing(digests, together, what) for together in sets or [ranks])), "")


def arrive(store: JobStore, key: str, ranks: Sequence[int], rank: int, problem: str = "") -> None:
    """Write into the store that this rank is at the meeting ``key``, and its problem ("": it has none). Waits for no
    rank. The last rank to come writes the outcome: that all can go on, or the first problem that was written."""
    if problem:
        store.compare_set(f"{key}/problem", problem)
    store.compare_set(f"{key}/{rank}", "here")
    if store.add(f"{key}/here", 1) == len(ranks):
        first = store.word_of(f"{key}/problem")
        store.compare_set(key, _CANNOT + first if first else _ALL)


def missing_at(store: JobStore, key: str, ranks: Sequence[int]) -> str:
    """Return the numbers of up to 8 ranks that have not come to a meeting, as ``1, 5``; "": all have come."""
    return ", ".join([str(rank) for rank in ranks if not store.word_of(f"{key}/{rank}")][:8])


def outcome_of(store: JobStore, key: str, ranks: Sequence[int], seconds: float, what: str = "") -> tuple[str, bool]:
    """Wait for the outcome of a meeting (`arrive`). Returns why ranks cannot go on ("": they can), and whether the
    reason is that a rank did not come in time: this rank writes that outcome if none is there after ``seconds``. The
    first outcome written holds for all. ``what`` goes into the line."""
    if not store.wait(key, seconds):
        late = f"rank {missing_at(store, key, ranks)} did not come {what}within {seconds:g} s"
        store.compare_set(key, _NOT_COME + late)
    word = store.word_of(key)
    return word.removeprefix(_ALL).removeprefix(_NOT_COME).removeprefix(_CANNOT), word.startswith(_NOT_COME)


def barrier(
    everyone: Sequence[int], what: str, seconds: float, problem: BaseException | None = None, *, patient: bool = False
) -> str:
    """Wait, by way of the launcher's store, until all of these ranks have called this; no group is needed. Returns
    ``rank N: reason`` if another rank cannot go on, "" if all can. RuntimeError: a rank or the store does not answer.

    Args:
        what: name of the call, equal on all ranks.
        problem: why this rank cannot go on. It is raised here once all have come; an interruption (Ctrl-C), at once.
        patient: after ten seconds or the timeout the first rank that has come logs a warning, and all wait as long as
            the host's process group does: ranks that load models may come at very different times.
    """
    world, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    base = f"eplb_runtime/{what}/{everyone[0]}-{everyone[-1]}-{len(everyone)}"
    store = JobStore(world, base, max(seconds, SETUP_SECONDS if patient else _STORE_SECONDS))
    with contextlib.closing(store):
        key = _NOT_COME  # Skip calls that the other ranks have already given up on; they are to come again.
        while key == _NOT_COME or store.word_of(key).startswith(_NOT_COME):
            key = str(call := store.add(f"calls of {rank}", 1))
        is_error = isinstance(problem, Exception)
        said = "" if problem is None else str(problem) if is_error else one_line(problem, with_type=True)
        arrive(store, key, everyone, rank, said and f"rank {rank}: {said}")
        if problem is not None and not is_error:
            raise problem
        if patient and not store.wait(key, soon := min(seconds, _SOON_SECONDS)):
            if rank == next(one for one in everyone if store.word_of(f"{key}/{one}")):
                late = f"{missing_at(store, key, everyone)}, which is slower or has ended: see the log of that rank"
                logger.warning("%s has waited %g s for rank %s", what, soon, late)
            seconds = world.timeout.total_seconds()  # type: ignore[attr-defined]
        cause, not_come = outcome_of(store, key, everyone, seconds, f"to {what} ")
        if problem is not None:
            raise problem
        if not_come:
            raise RuntimeError(f"{cause}: it is collective: call it on every rank")
        before = str(call - 1)  # all are here, and past it
        of_all = (before, f"{before}/here", f"{before}/problem") if rank == everyone[0] else ()
        store.delete(f"{before}/{rank}", *of_all)
        return cause


@dataclass(frozen=True)
class Verdict:
    """A decision of all ranks. ``connections_broken``: the groups' connections are closed, or this rank cannot be sure
    of the others: they have to find together again. ``kind``: up to 8 letters, for those who act on the cause."""

    commit: bool
    cause: str = ""
    connections_broken: bool = False
    kind: str = ""


class Ballot:
    """One rank's part in one decision, which ``key`` names: new for each, equal on every rank. Two threads may use it
    at once, one that votes and one that cannot wait.

    Attributes:
        refusal, kind: why this rank has said no, and of what kind that is; empty: it has not.
        bound: whether this rank has said yes and knows of no rank's no: only the record decides then.
        verdict: the recorded decision of all ranks, in their common words; None: not known here yet.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.refusal, self.kind, self.bound = "", "", False
        self.verdict: Verdict | None = None
        self._changed = threading.Condition()

    def say(self, problem: str, kind: str = "") -> None:
        """Set this rank's vote: yes (``bound``) if ``problem`` is "", else no (``refusal``). The first vote counts."""
        with self._changed:
            if not problem:
                self.bound = not self.refusal
            elif not self.bound and not self.refusal:
                self.refusal, self.kind = problem, kind

    def settle(self, verdict: Verdict) -> None:
        """Set ``verdict``, set ``bound`` to whether it is a commit, and wake `wait`; nothing if a verdict is set
        already. RuntimeError: it is a commit, and this rank is not ``bound``."""
        with self._changed:
            if self.verdict is None:
                if verdict.commit and not self.bound:
                    raise RuntimeError(f"the record of {self.key} holds a commit that this rank has refused")
                self.verdict, self.bound = verdict, verdict.commit
                self._changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait at most so many seconds until ``verdict`` is set; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.verdict is not None, seconds)


class Phase(Enum):
    """Where a rank can stand still, die or fail, in the order in which it comes there. The code calls a probe at each,
    with the subject named last; tests and `tests/soak` put faults there."""

    STEPPED = "stepped"  # An optimizer step is over, on the training thread. The number of the step.
    DECIDING = "deciding"  # A decision begins, on the worker's thread. Its key.
    PLANNED = "planned"  # A plan has come from rank 0. Its bytes, a bytearray that is read afterwards.
    PREPARED = "prepared"  # This rank has its schedule and its memory. The schedule.
    POSTED = "posted"  # A round has been posted. The round.
    STAGED = "staged"  # Experts have come. What is staged, perhaps nothing.
    VERIFIED = "verified"  # Experts came as they left. What is staged.
    VOTED = "voted"  # This rank has said yes or no to a round or plan; nothing is recorded. The verdict of the vote.
    DECIDED = "decided"  # The verdict on a round is recorded. The verdict.
    AWAITED = "awaited"  # With overlap: a forward has come to a layer whose experts are on their way. The layer.
    COMMITTING = "committing"  # A layer of a round is about to be written. The layer.
    COMMITTED = "committed"  # A round is committed. The round.
    CONNECTED = "connected"  # New connections are made, and nothing is recorded yet. The attempt.


Probe = Callable[[Phase, Any], None]
"""Called at each point with what the rank works on. One that raises makes the rank fail there."""


def unobserved(phase: Phase, subject: Any) -> None:
    """Do nothing: the probe of a job that is not under test."""


class InDoubt(RuntimeError):
    """This rank has said yes to a decision, and cannot learn its outcome any more."""


class Agreement:
    """Comparisons and votes among the ranks of the control group, recorded in ``store``. Each call is collective over
    it. A rank that has said yes asks for the outcome for ``most_seconds``."""

    def __init__(
        self, control: Group, store: JobStore, probe: Probe = unobserved, most_seconds: float = 1800.0
    ) -> None:
        self._control, self._store, self._probe, self._most_seconds = control, store, probe, most_seconds
        self._rank, self._ranks = control.rank(), dist.get_process_group_ranks(control)

    def close(self) -> None:
        """Drop the reference to the group, whose threads and connections end with the last one. Only at the end."""
        del self._control

    def gather(self, word: Tensor, seconds: float | None = None) -> Tensor:
        """Return this CPU tensor of every rank, of equal shapes, in order: ``[R, ...]``. Collective: each rank sends
        ``ceil(log2 R)`` messages. RuntimeError: one took longer than ``seconds`` (None: the group's timeout)."""
        size = len(self._ranks)
        rows, count = word.new_empty(size, *word.shape), 1
        rows[0] = word
        limit = timeout_of(self._control) if seconds is None else timedelta(seconds=seconds)
        while count < size:
            more = min(count, size - count)
            to, source = (self._ranks[(self._rank + distance) % size] for distance in (-count, count))
            sent = dist.isend(rows[:more], to, group=self._control)
            received = dist.irecv(rows[count : count + more], source, group=self._control)
            for work in filter(None, (sent, received)):
                work.wait(limit)  # by itself gloo waits as long as was said when the group was made
            count += more
        return rows.roll(self._rank, 0)

    def gather_words(self, word: bytes, problem: str, seconds: float | None = None) -> tuple[dict[int, bytes], str]:
        """Return ``word`` of every rank, equally long, by rank; and ``rank N: problem`` of the first rank whose problem
        is not "" (cut to 240 bytes), "" if there is none. Collective."""
        said = word + problem.encode()[:_CAUSE_BYTES].ljust(_CAUSE_BYTES, b"\0")
        gathered = self.gather(torch.frombuffer(bytearray(said), dtype=torch.uint8), seconds).numpy()
        rows = {rank: row.tobytes() for rank, row in zip(self._ranks, gathered, strict=True)}
        texts = ((rank, row[len(word) :].rstrip(b"\0").decode(errors="replace")) for rank, row in rows.items())
        first = next((f"rank {rank}: {text}" for rank, text in texts if text), "")
        return {rank: row[: len(word)] for rank, row in rows.items()}, first

    def check_equal(self, digest: bytes, what: str, problem: str = "") -> Verdict:
        """Compare 16 bytes of every rank (zeros: it has none). The verdict commits if all are equal and no rank has a
        problem; else its cause names the ranks. Collective; a failed exchange becomes a verdict, too."""
        try:
            digests, cause = self.gather_words(digest, problem)
        except RuntimeError as error:
            return Verdict(False, f"the ranks could not compare their {what}: {one_line(error)}", True)
        if not cause and (none := [rank for rank in self._ranks if not any(digests[rank])]):
            cause = f"no {what} on rank {', '.join(map(str, none))}"
        cause = cause or differing(digests, self._ranks, what)
        return Verdict(not cause, cause)

    def go_on(self, problem: str, stops: bool, seconds: float) -> str:
        """Compare, before each part of longer work, who goes on and who stops (``stops``). Returns "" if all go on or
        all stop, and no rank has a problem; else a line that names a rank and why. Collective."""
        words, first = self.gather_words(bytes([stops]), problem, seconds)
        stopped = [rank for rank, word in words.items() if any(word)]
        if not first and 0 < len(stopped) < len(words):
            return f"rank {stopped[0]} has stopped before the end"
        return first

    def vote_and_record(self, ballot: Ballot, problem: str, timed_out: bool) -> Verdict:
        """Vote on a ballot with all ranks, write the outcome into the store unless one is there, and return the
        recorded one: a commit only if all said yes. Collective. ``problem``: why this rank says no; "": yes, if the
        store answers. ``timed_out``: its connections broke; it refuses, does not vote, and closes the control group's.
        InDoubt: after its yes, no answer for ``most_seconds``."""
        if timed_out:
            return self.refuse(ballot, Verdict(False, problem, True), votes=False)
        if not problem and self._store.silent:
            problem = "the launcher's store does not answer"
        ballot.say(problem)
        try:
            word = ballot.kind[:_KIND_BYTES].ljust(_KIND_BYTES) if ballot.refusal else "\0" * _KIND_BYTES
            words, cause = self.gather_words(word.encode(), ballot.refusal)
            kind = next((said.decode().strip() for said in words.values() if any(said)), "")
            verdict = Verdict(not cause, cause, kind=kind)
            self._probe(Phase.VOTED, verdict)
            if cause:
                ballot.bound = False
        except Exception as error:
            verdict = Verdict(False, f"the vote did not finish: {one_line(error)}", True)
        return self._follow(ballot, verdict)

    def refuse(self, ballot: Ballot, verdict: Verdict, *, votes: bool = True) -> Verdict:
        """Say no, write ``verdict`` into the store unless an outcome is there, settle the ballot with the recorded one,
        and return it: after a yes of this rank it may be a commit (or InDoubt), after a no this rank's own if the store
        is silent. Sends no vote. ``votes`` False: none will follow; close the control group's connections."""
        ballot.say(verdict.cause or "no", verdict.kind)
        try:
            return self._follow(ballot, verdict)
        finally:
            if not votes:
                close_connections(self._control)

    def _follow(self, ballot: Ballot, verdict: Verdict) -> Verdict:
        """Propose a verdict for the record, and return the one that it holds. A rank that is not bound does without an
        answer: no rank commits then, but some may not know yet."""
        began, warn = time.monotonic(), logger.warning
        while ballot.verdict is None:
            try:
                ballot.settle(self._first_word(ballot.key, verdict))
            except StoreError as error:
                warn("%s; it is asked for what became of a migration", one_line(error))
                warn = logger.debug  # the next answer comes when the store has given the one before
                if not ballot.bound:
                    own = replace(verdict, cause=verdict.cause or one_line(error), connections_broken=True)
                    ballot.settle(replace(own, commit=False))
                # For another thread of this rank, which has refused or is in a meeting, or for an answer that may come.
                elif not ballot.wait(_PAUSE_SECONDS) and time.monotonic() - began > self._most_seconds:
                    raise InDoubt("the launcher's store does not say whether the ranks committed a migration") from None
        return ballot.verdict

    def record(self, key: str, verdict: Verdict) -> Verdict:
        """Write a verdict into the store under ``key`` unless one is there, and return the one that is there. If the
        store is silent, log an error and return this rank's own: so only for what moves nothing before another vote."""
        try:
            return self._first_word(key, verdict)
        except StoreError as error:
            logger.error("%s; this rank follows its own vote", one_line(error))
            return replace(verdict, cause=verdict.cause or one_line(error), connections_broken=True)

    def _first_word(self, key: str, verdict: Verdict) -> Verdict:
        return Verdict(*json.loads(self._store.compare_set(key, json.dumps(astuple(verdict)), passing=True)))
