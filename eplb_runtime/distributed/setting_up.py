"""What ranks tell each other while they make something together: who fails says why, and nobody waits for what will not
come.

Making groups, cutting models and measuring links take as long as a busy machine lets them: they have a deadline of
their own, whatever a rebalance may take.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from ..utils.errors import one_line

SETUP_SECONDS = 120.0
"""For each step of setting up, or the balancer's own timeout where that is longer."""
ACCOUNT_SECONDS = 10.0
"""Who has lost the others waits so long for what they say of it."""
SPARE_DESCRIPTORS = 32
"""Left for what else a process opens meanwhile: stores, shared memory, files of the user's."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02


class OthersGaveUp(RuntimeError):
    """Another rank has given up what all were making together. Its words."""


class TooFewDescriptors(RuntimeError):
    """A process would run out of file descriptors: gloo's listener ends it then."""


class WatchedStore(dist.Store):
    """A store whose waits end as soon as a word stands under a key: what is waited for will not come any more.

    Args:
        store: whose keys these are.
        key: of the word.

    Attributes:
        plain: that store.
    """

    def __init__(self, store: dist.Store, key: str) -> None:
        super().__init__()
        self.plain = store
        self._key = key

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises `OthersGaveUp`, or a RuntimeError after the timeout."""
        seconds = (self.plain.timeout if timeout is None else timeout).total_seconds()  # type: ignore[attr-defined]
        deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
        while not self.plain.check(keys):
            if word := self.given_up():
                raise OthersGaveUp(word)
            if time.monotonic() > deadline:
                raise RuntimeError(f"a rank did not come to connect within {seconds:g} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def given_up(self) -> str:
        """The word; empty: there is none."""
        return self.plain.get(self._key).decode() if self.plain.check([self._key]) else ""

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.plain.get(key)

    def set(self, key: str, value: str) -> None:
        self.plain.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self.plain.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.plain.check(keys)

    def has_extended_api(self) -> bool:
        return bool(self.plain.has_extended_api())  # type: ignore[attr-defined]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return self.plain.multi_get(keys)

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.plain.multi_set(keys, values)  # type: ignore[attr-defined]


class SettingUp:
    """One rank's part in finding out why setting up failed.

    Args:
        store: of all ranks; used on one thread.
        name: equal on all ranks, and new.
        ranks: that set up together.
        rank: this one.
    """

    def __init__(self, store: dist.Store, name: str, ranks: Sequence[int], rank: int) -> None:
        self._store = store
        self._name = name
        self._ranks = ranks
        self._rank = rank

    @property
    def key(self) -> str:
        """A word stands here as soon as a rank has failed."""
        return f"{self._name}/failed"

    def cause(self, error: BaseException, hang_up: Callable[[], None]) -> str:
        """Why it failed, as all ranks say it; empty: by this rank's own error. Waits for what others say of it.

        Args:
            error: of this rank: its own trouble, or what it has of another's.
            hang_up: ends the waits of others for this rank.
        """
        words: dict[int, tuple[bool, str]] = {}
        own = is_echo(error), one_line(error, with_type=True)
        try:
            self._store.set(f"{self._name}/failed/{self._rank}", json.dumps(own))
            self._store.compare_set(self.key, "", f"rank {self._rank}: {own[1]}")
            hang_up()
            if own[0]:
                self._hear(words)
        except Exception:
            return ""  # the store is gone
        first = next((rank for rank in sorted(words) if not words[rank][0]), None)
        if first is not None:
            return f"rank {first} failed at attach: {words[first][1]}"
        if own[0] and (missing := [rank for rank in self._ranks if rank not in words]):
            return f"rank {', '.join(map(str, missing[:8]))} was lost at attach: it has died, or does not answer"
        return ""

    def _hear(self, words: dict[int, tuple[bool, str]]) -> None:
        """Until somebody's own trouble is known, or all have failed by somebody else's."""
        deadline = time.monotonic() + ACCOUNT_SECONDS
        while time.monotonic() < deadline:
            for rank in self._ranks:
                key = f"{self._name}/failed/{rank}"
                if rank not in words and self._store.check([key]):
                    echo, text = json.loads(self._store.get(key))
                    words[rank] = bool(echo), str(text)
                    if not echo:
                        return
            if len(words) == len(self._ranks):
                return
            time.sleep(_LONGEST_PAUSE)


def is_echo(error: BaseException) -> bool:
    """Return whether an error only says that another rank did not come, or has gone."""
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if isinstance(chain, OthersGaveUp | dist.DistNetworkError | dist.DistStoreError):
            return True
        if any(sign in text for sign in ("gloo/", "gloo: ", "did not come", "not through in time", "does not answer")):
            return True
        chain = chain.__cause__
    return False


# -- file descriptors --------------------------------------------------------------------------------------------------


def descriptors_of_gloo(ranks: int) -> int:
    """That a group of so many ranks takes on each: a listener, its loop (two), an address, and a connection to each
    other rank."""
    return 3 + ranks


def descriptors_left() -> int | None:
    """How many more this process can open; None: nobody says."""
    try:
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = [int(name) for name in os.listdir("/proc/self/fd")]
    except (ImportError, OSError):
        return None
    return None if limit == resource.RLIM_INFINITY else limit - sum(number < limit for number in used) + 1


def lacks_descriptors(rank: int, groups: Sequence[int]) -> str:
    """What this rank lacks to make gloo groups of so many ranks each, in a line; empty: nothing."""
    left, needed = descriptors_left(), sum(map(descriptors_of_gloo, groups)) + SPARE_DESCRIPTORS
    if left is None or left >= needed:
        return ""
    return (
        f"rank {rank} can open {left} more files, and connections to the other ranks need {needed} file descriptors: "
        "raise its limit (ulimit -n)"
    )
