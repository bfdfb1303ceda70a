"""The launcher's store as a job uses it: names that no other job, attach or life of this one has, answers in time."""

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..config import launcher_environment
from ..utils.worker import Worker

T = TypeVar("T")

SETUP_SECONDS = 120.0
"""For each step of setting up, or the balancer's own timeout where that is longer: a busy machine may be slow."""

_SPARE: WeakKeyDictionary[dist.Store, list[dist.Store]] = WeakKeyDictionary()
"""Connections that were given back: making one takes seconds now and then."""


class StoreError(RuntimeError):
    """The launcher's store did not answer in time, or not at all."""


class JobStore:
    """Small words that all ranks of a job see alike.

    A store's client waits for its answer however long that takes. So it works on a thread and a connection of its own:
    who asks waits for the timeout at most, and no other caller waits at all. Once a wait has expired, questions raise
    StoreError at once until the store has answered. ``store`` is only cloned; ``prefix`` is that of all keys.
    """

    def __init__(self, store: dist.Store, prefix: str, timeout_seconds: float) -> None:
        self._source, self._prefix, self._seconds = store, prefix, timeout_seconds
        self._connection: dist.Store | None = None
        self._silence: Future[None] | None = None
        self._passing, self._passed = list[str](), list[str]()
        self._worker = Worker("eplb_runtime store")

    @property
    def silent(self) -> bool:
        """Return whether a wait has expired with no answer since; questions fail at once then."""
        return self._silence is not None and not self._silence.done()

    def compare_set(self, key: str, word: str, *, passing: bool = False) -> str:
        """Set a key to ``word`` if it has none, and return the word that it has now. ``passing``: a later `forget`
        deletes the key. StoreError: no answer in time."""
        if passing and key not in self._passing:
            self._passing.append(key)
        return self._ask(lambda store: bytes(store.compare_set(key, "", word)).decode())

    def add(self, key: str, amount: int) -> int:
        """Add to a counter (0 at first), and return its new value. StoreError: no answer in time."""
        return self._ask(lambda store: int(store.add(key, amount)))

    def word_of(self, key: str) -> str:
        """Return the word of a key; "": it has none yet. StoreError: no answer in time."""
        return self._ask(lambda store: bytes(store.get(key)).decode() if store.check([key]) else "")

    def wait(self, key: str, seconds: float) -> bool:
        """Wait until a key has a word, at most so many seconds; return whether it has. Other questions to the store
        wait meanwhile. StoreError: no answer in time."""

        def waited(store: dist.Store) -> bool:
            with contextlib.suppress(RuntimeError):  # which says in the same way that it is late and that it is gone
                store.wait([key], timedelta(seconds=seconds))
            return bool(store.check([key]))

        return self._ask(waited, extra_seconds=seconds)

    def delete(self, *keys: str) -> None:
        """Queue the deletion of keys, and do not wait; nothing if silent or closed. Some kinds of store keep them."""
        if not self.silent and not self._worker.closed:
            self._worker.submit(lambda: self._answer(lambda store: [store.delete_key(key) for key in keys]))

    def forget(self) -> None:
        """Delete the ``passing`` keys that were set before the last call; the next call deletes those set since."""
        keys, self._passed, self._passing = self._passed, self._passing, []
        self.delete(*keys)

    def close(self) -> None:
        """Leave the connection to later `JobStore`s, and end the thread; waits up to the timeout, if not silent."""
        if not self._worker.closed:
            self._worker.submit(self._give_back)
            self._worker.close(0.0 if self.silent else self._seconds)

    def _ask(self, question: Callable[[dist.Store], T], extra_seconds: float = 0.0) -> T:
        """Return the answer, asked on the thread; StoreError: none within the timeout."""
        if self.silent:
            raise StoreError(f"the launcher's store has given no answer for more than {self._seconds:g} s")
        try:
            return self._worker.do(lambda: self._answer(question), self._seconds + extra_seconds)
        except Exception as error:
            if isinstance(error, TimeoutError) and not self.silent and not self._worker.closed:
                self._silence = self._worker.submit(lambda: None)  # done as soon as the thread has its answer
            raise StoreError(f"the launcher's store does not answer: {error}") from error

    def _answer(self, question: Callable[[dist.Store], T]) -> T:
        """Ask on the thread, over a connection that was given back or a new one; a failure leaves none."""
        spare = _SPARE.setdefault(self._source, [])
        while self._connection is None and spare:
            with contextlib.suppress(RuntimeError, IndexError):  # it was cut or taken meanwhile
                (known := spare.pop()).check([self._prefix])
                self._connection = known
        if self._connection is None:
            self._connection = self._source.clone()  # type: ignore[attr-defined]
        try:
            return question(dist.PrefixStore(self._prefix, self._connection))
        except Exception:
            self._connection = None
            raise

    def _give_back(self) -> None:
        if self._connection is not None:
            _SPARE[self._source].append(self._connection)
        self._connection = None


def name_of_job(store: dist.Store, ranks: Sequence[int], rank: int) -> str:
    """Return a key prefix for what these ranks make together now, equal on all of them, and new each time: each rank
    counts in the store (adds 1 to a key of its own) how often it came with these very ranks.

    The launcher's number of restarts is in it, as the store may outlive a life of the job; where every life has a store
    of its own, as it must when hosts come and go, that number is 0, since launchers may count unlike.
    """
    environment = launcher_environment()
    own_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "False"
    life = "0" if own_store else environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    together = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
    base = f"eplb_runtime/life {life}/{together}"
    number = int(store.add(f"{base}/made by {rank}", 1))
    return f"{base}/{number}"
