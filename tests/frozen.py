"""Imported last by the process that ranks are forked from: a rank's collector leaves alone what is there by then, which
was four tenths of what a rank did.

The interpreter counts frozen objects one by one, half a million of them at each call: a tenth of what a rank did. So
the count is kept until something is frozen or thawed. What else each rank would find out for itself is found out here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

from eplb_runtime.utils.jit import cache_folder

_count = gc.get_freeze_count
_counted: list[int] = []


def _count_once() -> int:
    if not _counted:
        _counted.append(_count())
    return _counted[0]


def _then_count_anew(change: Callable[[], None]) -> Callable[[], None]:
    def changed() -> None:
        change()
        _counted.clear()

    return changed


gc.freeze, gc.unfreeze = _then_count_anew(gc.freeze), _then_count_anew(gc.unfreeze)
gc.get_freeze_count = _count_once
cache_folder()  # reads all sources of the package, and keeps of when they are
gc.collect()
gc.freeze()
gc.get_freeze_count()
