"""How ranks agree: compare what each will do, vote, and record one decision that nobody can see differently.

A vote by all-reduce alone is not enough: a rank may time out in it while the others finish. So the outcome is a record
in the launcher's store, written by compare-and-set: the first word stands, and who timed out writes "abort".
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger("eplb_runtime")

COMMIT = "commit"
_CAUSE_BYTES = 240


@dataclass(frozen=True)
class Verdict:
    """What all ranks will do. ``connections_broken`` tells that a timeout closed the groups' connections."""

    commit: bool
    cause: str = ""
    connections_broken: bool = False


class Agreement:
    """Comparisons and votes among the ranks of the control group."""

    def __init__(self, control: dist.ProcessGroup) -> None:
        self._control = control
        self._size = control.size()
        # A clone has its own connection: a slow store call elsewhere in the process cannot hold ours up.
        self._store = control.get_group_store().clone()  # type: ignore[attr-defined]

    def same_on_all(self, digest: bytes, what: str) -> Verdict:
        """Whether every rank came with the same 16 bytes. A rank that has a problem comes with zeros."""
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        all_ = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            dist.all_gather(all_, mine, group=self._control)
        except RuntimeError as error:
            return Verdict(False, f"the ranks could not compare their {what}: {_one_line(error)}", True)
        odd = [rank for rank, theirs in enumerate(all_) if not torch.equal(theirs, all_[0])]
        none = [rank for rank, theirs in enumerate(all_) if not theirs.any()]
        if none:
            return Verdict(False, f"no {what} on rank {', '.join(map(str, none))}")
        if odd:
            return Verdict(False, f"rank {', '.join(map(str, odd))} has another {what} than rank 0")
        return Verdict(True)

    def decide(self, key: str, problem: str, timed_out: bool) -> Verdict:
        """Vote, then record and return the one decision.

        Args:
            key: names this decision; new for each.
            problem: why this rank cannot commit; empty: it can. Every rank learns it.
            timed_out: whether the problem broke the groups' connections.
        """
        word = self._abort("broken", problem) if timed_out else self._vote(problem)
        recorded = self._record(key, word)
        if recorded == COMMIT:
            return Verdict(True)
        _, state, cause = recorded.split(" ", 2)
        return Verdict(False, cause, state == "broken")

    def _vote(self, problem: str) -> str:
        mine = torch.zeros(_CAUSE_BYTES, dtype=torch.uint8)
        text = problem.encode()[:_CAUSE_BYTES]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        all_ = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            dist.all_gather(all_, mine, group=self._control)
        except RuntimeError as error:
            return self._abort("broken", f"the vote did not finish: {_one_line(error)}")
        for rank, theirs in enumerate(all_):
            if theirs.any():
                cause = bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace")
                return self._abort("whole", f"rank {rank}: {cause}")
        return COMMIT

    @staticmethod
    def _abort(state: str, cause: str) -> str:
        return f"abort {state} {cause}"

    def _record(self, key: str, word: str) -> str:
        try:
            return str(self._store.compare_set(key, "", word).decode())
        except RuntimeError as error:
            # Without the store nobody can record anything; the vote, where there was one, is the best that is known.
            logger.error("the launcher's store does not answer (%s); following the vote", _one_line(error))
            return word


def _one_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
