"""One rank's part in one decision, as a table: what it may do by itself, and from when on only the record decides.

Each rank says yes or no, ranks count what all have said, and the outcome is the first word in a record that all can
read. No rank can have counted "all yes" without this rank's yes: until it has said that, it may refuse alone. From then
on it is in doubt. It may propose a word, but acts on what the record holds, however long that takes to hear.
`tests/unit/distributed/test_ballot.py` explores the table exhaustively.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from enum import Enum


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
        return json.dumps(astuple(self))

    @classmethod
    def of_word(cls, word: str) -> Verdict:
        return cls(*json.loads(word))


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


_S, _H = State, Heard
_ALONE, _PROPOSES = False, True

TABLE: Mapping[tuple[State, Heard], tuple[State, bool]] = {
    (_S.OPEN, _H.VOTE): (_S.DOUBT, _ALONE),
    (_S.OPEN, _H.REFUSE): (_S.ABORTED, _PROPOSES),
    (_S.DOUBT, _H.ALL_YES): (_S.DOUBT, _PROPOSES),
    (_S.DOUBT, _H.A_NO): (_S.ABORTED, _PROPOSES),
    (_S.DOUBT, _H.LOST): (_S.DOUBT, _PROPOSES),
    (_S.DOUBT, _H.REFUSE): (_S.DOUBT, _PROPOSES),
    (_S.DOUBT, _H.SILENCE): (_S.DOUBT, _PROPOSES),
    (_S.DOUBT, _H.COMMIT): (_S.COMMITTED, _ALONE),
    (_S.DOUBT, _H.ABORT): (_S.ABORTED, _ALONE),
    (_S.ABORTED, _H.A_NO): (_S.ABORTED, _PROPOSES),
    (_S.ABORTED, _H.LOST): (_S.ABORTED, _PROPOSES),
}
"""The state that follows, and whether the rank proposes a word for the record and asks which one it holds. A pair that
is not in it changes nothing: what is decided stays so."""

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

    def hear(self, heard: Heard, verdict: Verdict) -> bool:
        """Take a step of the table, with what the record holds, or else what this rank says from here on. Returns
        whether to propose a word for the record."""
        with self._changed:
            before = self._state
            self._state, proposes = TABLE.get((before, heard), (before, False))
            if before is State.OPEN and self._state is State.ABORTED:
                self.refusal = verdict.cause
            if self._verdict is not None:
                return False
            if self._state is State.ABORTED and heard is Heard.COMMIT:
                raise RuntimeError(f"the record of {self.key} holds a commit that this rank has refused")
            if heard in _TELLS and self._state in (State.COMMITTED, State.ABORTED):
                # No answer after a refusal: no rank commits, but some may not know yet.
                broken = verdict.connections_broken or heard is Heard.SILENCE
                commit = self._state is State.COMMITTED
                self._verdict = replace(verdict, commit=commit, connections_broken=broken)
            self._changed.notify_all()
            return proposes

    def wait(self, seconds: float) -> bool:
        """Return whether it is known what all ranks do, by now or soon."""
        with self._changed:
            return self._changed.wait_for(lambda: self._verdict is not None, seconds)
