"""Two carriers as one: one for the ranks of this node, one for all others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor

from .base import Message, Pending, Together, Transport


class Mixed(Transport):
    """Sends each message by the carrier of its peer. Both work on the same device.

    Args:
        within, across: made on the same group.
        near: ranks that ``within`` reaches, this one among them.
    """

    def __init__(self, within: Transport, across: Transport, near: Collection[int]) -> None:
        self.device = within.device
        self.hashes = within.hashes and across.hashes
        self.one_by_one = within.one_by_one and across.one_by_one
        self._within = within
        self._across = across
        self._near = frozenset(near)

    def wait_at_most(self, seconds: float) -> None:
        self._within.wait_at_most(seconds)
        self._across.wait_at_most(seconds)

    def register(self, regions: Sequence[Tensor]) -> None:
        self._within.register(regions)
        self._across.register(regions)

    def warm_up(self, deadline: float) -> None:
        self._within.warm_up(deadline)
        self._across.warm_up(deadline)

    def empty(self, nbytes: int) -> Tensor:
        return self._within.empty(nbytes)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Pending:
        within = self._within.post(self._to(sends, True), self._to(receives, True))
        try:
            across = self._across.post(self._to(sends, False), self._to(receives, False))
        except BaseException:
            within.abort()
            raise
        seen, places = [0, 0], []
        for message in receives:
            part = int(message.peer not in self._near)
            places.append((part, seen[part]))
            seen[part] += 1
        return _Both(within, across, places)

    def close(self) -> None:
        self._within.close()
        self._across.close()

    def _to(self, messages: Sequence[Message], near: bool) -> list[Message]:
        return [message for message in messages if (message.peer in self._near) == near]


class _Both(Together):
    """Of both carriers.

    Args:
        places: of each message received, which carrier's it is and the how manyeth of those.
    """

    def __init__(self, within: Pending, across: Pending, places: Sequence[tuple[int, int]]) -> None:
        super().__init__(within, across)
        self._places = places

    def has(self, index: int) -> bool:
        part, place = self._places[index]
        return self._parts[part].has(place)
