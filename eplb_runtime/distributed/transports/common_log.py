"""Words of all ranks in one order that every rank reads alike, kept in the launcher's store.

Writing goes by a thread of its own, so that nobody waits for the store; reading waits in the store's server, so that
an idle rank costs nothing.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...utils.worker import Worker

_AT_ONCE = timedelta(hours=1)
"""A wait of the store is no longer than that; it is begun anew."""


class CommonLog:
    """One rank's end of it.

    Args:
        store: of a process group; only cloned.
        name: of the log, equal on all ranks and new each time.
        rank, num_ranks: of the group.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, num_ranks: int) -> None:
        self._reading, self._writing = (
            dist.PrefixStore(f"eplb_runtime/{name}", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self._rank = rank
        self._num_ranks = num_ranks
        self._writer = Worker("eplb_runtime transport notes")
        self._read = self._turn = 0
        self._gone_on = 0, 0
        """The words with which all went on last and before: who is ready anew has read up to the last one."""

    def write(self, word: dict[str, Any]) -> Future[None]:
        """Append a word, some time soon; words of one rank stay in order."""
        text = json.dumps({**word, "rank": self._rank}, separators=(",", ":"))
        return self._writer.submit(lambda: self._append(text))

    def ready(self, number: int) -> Future[None]:
        """Say that this rank is ready to go on, with a number, once after each time that all were. The last one appends
        ``{"go": the largest number}``, and takes away what all ranks have read."""
        turn, self._turn = self._turn, self._turn + 1
        begin, end = self._gone_on

        def say() -> None:
            said = [f"ready {turn}/{rank}" for rank in range(self._num_ranks)]
            self._writing.set(said[self._rank], str(number))
            if self._writing.add(f"ready {turn}", 1) == self._num_ranks:
                largest = max(int(word) for word in self._writing.multi_get(said))
                self._append(json.dumps({"go": largest, "rank": self._rank}))
                for key in [*said, f"ready {turn}", *map(str, range(begin + 1, end + 1))]:
                    self._writing.delete_key(key)

        return self._writer.submit(say)

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The next word; None: there was none in time.

        Args:
            deadline: a time of `time.monotonic`.

        Raises:
            RuntimeError: the store is gone.
        """
        key = str(self._read + 1)
        seconds = timedelta(seconds=max(0.001, min(deadline - time.monotonic(), _AT_ONCE.total_seconds())))
        try:
            self._reading.wait([key], seconds)
        except dist.DistStoreError:
            return None
        self._read += 1
        word: dict[str, Any] = json.loads(self._reading.get(key))
        if "go" in word:
            self._gone_on = self._gone_on[1], self._read
        return word

    def close(self, seconds: float) -> None:
        """No more words of this rank, after those that are on their way."""
        self._writer.close(seconds)

    def _append(self, text: str) -> None:
        self._writing.set(str(self._writing.add("words", 1)), text)
