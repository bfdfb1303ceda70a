"""Two carriers as one: one for the ranks of this node, one for all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from .base import Message, Pending, Transport


class Mixed(Transport):
    """Sends each message by the carrier of its peer. Both work on the same device.

    Args:
        within, across: made on the same group.
        near: ranks that ``within`` reaches, this one among them.
    """

    def __init__(self, within: Transport, across: Transport, near: Collection[int]) -> None:
        self.device = within.device
        self._within = within
        self._across = across
        self._near = frozenset(near)

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
            return _Both(within, self._across.post(self._to(sends, False), self._to(receives, False)))
        except BaseException:
            within.abort()
            raise

    def close(self) -> None:
        self._within.close()
        self._across.close()

    def _to(self, messages: Sequence[Message], near: bool) -> list[Message]:
        return [message for message in messages if (message.peer in self._near) == near]


class _Both(Pending):
    def __init__(self, *parts: Pending) -> None:
        self._parts = parts

    def poll(self) -> bool:
        return self._on_all(lambda part: part.poll())

    def wait(self, deadline: float) -> None:
        self._on_all(lambda part: part.wait(deadline))

    def abort(self) -> None:
        for part in self._parts:
            part.abort()

    def _on_all(self, ask: Callable[[Pending], bool | None]) -> bool:
        """Where one part has failed, the other is given up too: who has an error may use the memory again."""
        try:
            answers = [ask(part) for part in self._parts]  # of all, also after one that is not done
            return all(answers)
        except BaseException:
            self.abort()
            raise
