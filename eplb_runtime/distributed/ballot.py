"""One rank's part in one decision, as a table: what it may do by itself, and from when on only the record decides.

Each rank says yes or no, ranks count what all have said, and the outcome is the first word in a record that all can
read. Nobody can have counted "all yes" without this rank's yes: until it has said that, it may refuse alone. From then
on it is in doubt. It may propose a word, but acts on what the record holds, however long that takes to hear.
`tests/unit/distributed/test_ballot.py` explores the table exhaustively.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

COMMIT = "commit"


@dataclass(frozen=True)
class Verdict:
    """What all ranks will do. ``connections_broken`` tells that the groups' connections are closed, or that this rank
    cannot be sure of the others: they have to find together again. ``kind``: one word, for those who act on the cause.
    """

    commit: bool
    cause: str = ""
    connections_broken: bool = False
    kind: str = ""

    @property
    def word(self) -> str:
        """As it is recorded."""
        state = "broken" if self.connections_broken else "whole"
        return COMMIT if self.commit else f"abort {state} {self.kind or '-'} {self.cause}"

    @classmethod
    def of_word(cls, word: str) -> Verdict:
        if word == COMMIT:
            return cls(True)
        _, state, kind, cause = word.split(" ", 3)
        return cls(False, cause, state == "broken", kind.removeprefix("-"))


class State(Enum):
    """How far a rank is with a decision."""

    OPEN = "has said nothing"
    DOUBT = "has said yes, and does not know what became of it"
    COMMITTED = "commits"
    ABORTED = "does not commit"


class Heard(Enum):
    """What can happen to it."""

    VOTE = "nothing is wrong here: it is about to say yes"
    REFUSE = "something is wrong here, or training cannot wait"
    ALL_YES = "it has counted what all have said: yes"
    A_NO = "it has counted what all have said: a rank said no"
    LOST = "the count did not finish"
    COMMIT = "the record holds commit"
    ABORT = "the record holds abort"
    SILENCE = "the record does not answer"


class Act(Enum):
    """What it does."""

    NOTHING = "nothing"
    SAY_YES = "say yes to the others"
    RECORD = "propose a word for the record, and ask which one it holds"


_S, _H, _A = State, Heard, Act

TABLE: Mapping[tuple[State, Heard], tuple[State, Act]] = {
    (_S.OPEN, _H.VOTE): (_S.DOUBT, _A.SAY_YES),
    (_S.OPEN, _H.REFUSE): (_S.ABORTED, _A.RECORD),
    (_S.DOUBT, _H.ALL_YES): (_S.DOUBT, _A.RECORD),
    (_S.DOUBT, _H.A_NO): (_S.ABORTED, _A.RECORD),
    (_S.DOUBT, _H.LOST): (_S.DOUBT, _A.RECORD),
    (_S.DOUBT, _H.REFUSE): (_S.DOUBT, _A.RECORD),
    (_S.DOUBT, _H.SILENCE): (_S.DOUBT, _A.RECORD),
    (_S.DOUBT, _H.COMMIT): (_S.COMMITTED, _A.NOTHING),
    (_S.DOUBT, _H.ABORT): (_S.ABORTED, _A.NOTHING),
    (_S.ABORTED, _H.A_NO): (_S.ABORTED, _A.RECORD),
    (_S.ABORTED, _H.LOST): (_S.ABORTED, _A.RECORD),
}
"""A pair that is not in it changes nothing: what is decided stays so."""

_TELLS = (Heard.COMMIT, Heard.ABORT, Heard.SILENCE)
DECIDED = (State.COMMITTED, State.ABORTED)


class Ballot:
    """One rank's part in one decision. Two threads may use it at once, one that votes and one that cannot wait.

    Args:
        key: names the decision; new for each, equal on every rank.

    Attributes:
        refusal: why this rank has said no before it had said yes; empty: it has not.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.refusal = ""
        self._state = State.OPEN
        self._verdict: Verdict | None = None
        self._changed = threading.Condition()

    @property
    def state(self) -> State:
        return self._state

    @property
    def verdict(self) -> Verdict | None:
        """What all ranks do, in the words that they all have it in; None: that is not known here yet."""
        return self._verdict

    def hear(self, heard: Heard, verdict: Verdict) -> Act:
        """Take a step of the table, with what the record holds, or else what this rank says from here on."""
        with self._changed:
            before = self._state
            self._state, act = TABLE.get((before, heard), (before, Act.NOTHING))
            if before is State.OPEN and self._state is State.ABORTED:
                self.refusal = verdict.cause
            if self._verdict is not None:
                return Act.NOTHING
            if self._state is State.ABORTED and heard is Heard.COMMIT:
                raise RuntimeError(f"the record of {self.key} holds a commit that this rank has refused")
            if heard in _TELLS and self._state in (State.COMMITTED, State.ABORTED):
                # No answer after a refusal: no rank commits, but some may not know yet.
                broken = verdict.connections_broken or heard is Heard.SILENCE
                commit = self._state is State.COMMITTED
                self._verdict = replace(verdict, commit=commit, connections_broken=broken)
            self._changed.notify_all()
            return act

    def wait(self, seconds: float) -> bool:
        """Whether it is known what all ranks do, by now or soon."""
        with self._changed:
            return self._changed.wait_for(lambda: self._verdict is not None, seconds)
