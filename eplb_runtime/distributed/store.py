"""The launcher's store as a job uses it: names that no other job, attach or life of this one has, answers in time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

from ..config import launcher_environment
from ..utils.worker import Worker

T = TypeVar("T")


class StoreError(RuntimeError):
    """The launcher's store did not answer in time, or not at all."""


class JobStore:
    """Small words that all ranks of a job see alike.

    A store's client waits for its answer however long that takes. So it works on a thread and a connection of its own:
    who asks waits for the timeout at most, and nobody else waits at all. Once a wait has expired, nobody waits again
    until the store has answered what it was asked: an outage costs one timeout.

    Args:
        store: of a process group; only cloned.
        prefix: of all keys.
        timeout_seconds: for each call.
    """

    def __init__(self, store: dist.Store, prefix: str, timeout_seconds: float) -> None:
        self._source = store
        self._prefix = prefix
        self._seconds = timeout_seconds
        self._connection: dist.Store | None = None
        self._silence: Future[None] | None = None
        self._worker = Worker("eplb_runtime store")

    @property
    def silent(self) -> bool:
        """Whether a wait has expired, and the store has not answered since."""
        return self._silence is not None and not self._silence.done()

    def compare_set(self, key: str, word: str, *, patient: bool = False) -> str:
        """Write the first word of a key; the word that stands, the same for all who ask.

        Args:
            patient: wait for the timeout also where the store is silent.
        """
        return self._ask(lambda store: bytes(store.compare_set(key, "", word)).decode(), patient)

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 at first); what it is then."""
        return self._ask(lambda store: int(store.add(key, amount)))

    def look(self, key: str) -> str:
        """The word of a key; empty where there is none yet."""
        return self._ask(lambda store: bytes(store.get(key)).decode() if store.check([key]) else "")

    def close(self) -> None:
        """Give the connection back."""
        if not self._worker.closed:
            self._worker.submit(self._disconnect)
            self._worker.close(self._seconds)

    def _ask(self, question: Callable[[dist.Store], T], patient: bool = False) -> T:
        """Ask on the thread.

        Raises:
            StoreError: no answer within the timeout, or an error instead of one.
        """
        if self.silent and not patient:
            raise StoreError(f"the launcher's store does not answer: it has not for more than {self._seconds:g} s")

        def ask() -> T:
            if self._connection is None:
                self._connection = dist.PrefixStore(self._prefix, self._source.clone())  # type: ignore[attr-defined]
            try:
                return question(self._connection)
            except Exception:
                self._disconnect()  # the next one tries a new connection
                raise

        try:
            return self._worker.do(ask, self._seconds)
        except Exception as error:
            if isinstance(error, TimeoutError) and not self.silent and not self._worker.closed:
                self._silence = self._worker.submit(lambda: None)  # done as soon as the thread has its answer
            raise StoreError(f"the launcher's store does not answer: {error}") from error

    def _disconnect(self) -> None:
        self._connection = None


def name_of_job(store: dist.Store, ranks: Sequence[int], rank: int) -> str:
    """A name for what these ranks make together now, equal on all of them, and new each time.

    The launcher counts the lives of a job that fails and starts anew; its store may outlive them. Within one life each
    rank counts, in the store, how often it came with these very ranks.

    Each host's launcher counts for itself, and one that only follows the others counts nothing. Where every life has a
    store of its own, as it must when hosts come and go, lives need no number.
    """
    environment = launcher_environment()
    own_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    life = "0" if own_store else environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    together = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
    base = f"eplb_runtime/life {life}/{together}"
    number = int(store.add(f"{base}/made by {rank}", 1))
    return f"{base}/{number}"
