"""Streams and events without a device, as `torch.cuda` names them: memory that is used without a wait is a race.

Work runs at once, in the order of the program. Each stream has a clock for every stream: what of it must be over.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

Clock = dict["Stream", int]


class Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.clock: Clock = defaultdict(int)

    def runs(self) -> Clock:
        """One more piece of work; what is done when it begins, and itself."""
        self.clock[self] += 1
        return dict(self.clock)

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for stream, time in event.items():
            self.clock[stream] = max(self.clock[stream], time)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Module:
    """In the place of `torch.cuda`.

    Attributes:
        devices: that threads have set, by thread.
    """

    def __init__(self) -> None:
        self.default = Stream()
        self.devices: dict[int, Any] = {}
        self._here = threading.local()

    Stream = staticmethod(Stream)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._here, "stream", self.default)

    def set_device(self, device: Any) -> None:
        self.devices[threading.get_ident()] = device

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before


class Memory:
    """Blocks that are handed out as a caching allocator does: one that was freed goes to who asks next on the stream
    that it was made on, at once.

    Attributes:
        races: uses that wait for none of those before.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._free: dict[Stream, list[Block]] = defaultdict(list)
        self.races: list[str] = []

    def make(self, name: str) -> Block:
        """A block, written on the current stream."""
        stream = self._module.current_stream()
        block = self._free[stream].pop() if self._free[stream] else Block(stream)
        self.use(block, name)
        return block

    def use(self, block: Block, name: str) -> None:
        """The current stream writes or reads it."""
        stream = self._module.current_stream()
        before = stream.runs()
        for other, time in block.uses.items():
            if other is not stream and before.get(other, 0) < time:
                self.races.append(name)
        block.uses[stream] = before[stream]

    def free(self, block: Block) -> None:
        self._free[block.of].append(block)


class Block:
    def __init__(self, of: Stream) -> None:
        self.of = of
        self.uses: Clock = {}
