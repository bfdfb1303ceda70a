"""Finds objects that were made lately, without reading all that there are."""

from __future__ import annotations

import contextlib
import gc
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


class NewObjects:
    """Objects of some kind that were made since `restart`.

    Python's collector keeps objects that are young apart from old ones, and says when a collection is about to make
    young ones old: what is wanted of them is noted then. So old objects are never read, and young ones once or twice.

    Args:
        pick: of many objects, those that are wanted, which take weak references. Called while collections begin, on
            any thread.
    """

    def __init__(self, pick: Callable[[Sequence[Any]], Sequence[Any]]) -> None:
        self._pick = pick
        self._noted: list[weakref.ref[Any]] = []
        self._frozen: int | None = None
        self._callback: Callable[[str, dict[str, int]], None] | None = None

    def restart(self) -> None:
        """Take what there is now for old."""
        self._noted = []
        self._frozen = gc.get_freeze_count()
        if self._callback is None:
            self._callback = partial(_note, weakref.ref(self))
            gc.callbacks.append(self._callback)

    def found(self) -> list[Any] | None:
        """Those that are wanted and alive, perhaps with older ones among them; None: they are not known, since Python
        keeps no young ones apart (from 3.14 on), or somebody has frozen them or removed callbacks."""
        is_told = self._callback in gc.callbacks and self._frozen == gc.get_freeze_count()
        if not is_told or sys.version_info >= (3, 14):
            return None
        young = self._young()
        noted = [one for one in (reference() for reference in self._noted) if one is not None]
        return list({id(one): one for one in (*young, *noted)}.values())

    def close(self) -> None:
        """Listen no more."""
        callback, self._callback = self._callback, None
        if callback is not None:
            with contextlib.suppress(ValueError):  # somebody has cleared the list
                gc.callbacks.remove(callback)

    def __del__(self) -> None:
        self.close()

    def _note_young(self) -> None:
        noted = [reference for reference in self._noted if reference() is not None]
        self._noted = noted + [weakref.ref(one) for one in self._young()]

    def _young(self) -> list[Any]:
        # The youngest first: a collection in between makes them older, and is noted.
        return [*self._pick(gc.get_objects(0)), *self._pick(gc.get_objects(1))]


def _note(owner: weakref.ref[NewObjects], phase: str, information: dict[str, int]) -> None:
    """A callback of the collector."""
    listening = owner()
    if listening is not None and phase == "start" and information["generation"] > 0:
        listening._note_young()
