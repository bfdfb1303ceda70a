"""Imported last by the process that ranks are forked from: what numba would load in each of them, for seconds; and a
rank's collector leaves alone what is there by then, which was four tenths of what a rank did.

The interpreter counts frozen objects one by one, half a million of them at each call: a tenth of what a rank did. So
the count is kept until something is frozen or thawed. And they stay frozen where a rank has frozen nothing itself: a
verification looks through all objects that are not, which was two thirds of what it did, and none of a job is among
them. What else each rank would find out for itself is found out here.
"""

import gc
from collections.abc import Callable

from eplb_runtime.balancer.planner_process import compile_planner
from eplb_runtime.utils.jit import cache_folder

_count = gc.get_freeze_count
_counted: list[int] = []
_thaw = gc.unfreeze
_frozen_here: list[bool] = []


def _count_once() -> int:
    if not _counted:
        _counted.append(_count())
    return _counted[0]


def _freeze_also(freeze: Callable[[], None] = gc.freeze) -> None:
    freeze()
    _counted.clear()
    _frozen_here.append(True)


def _thaw_what_was_frozen_here() -> None:
    if _frozen_here:
        _thaw()
        _counted.clear()


gc.freeze, gc.unfreeze = _freeze_also, _thaw_what_was_frozen_here
gc.get_freeze_count = _count_once
compile_planner()  # nothing of it runs in threads, which would not survive a fork
cache_folder()  # reads all sources of the package, and keeps of when they are
gc.collect()
gc.freeze()
_frozen_here.clear()
gc.get_freeze_count()
