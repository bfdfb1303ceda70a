"""Threads of this package beside one that captures a CUDA graph.

A capture in torch's default mode forbids every thread of the process to ask for events, to wait for them or to copy:
one such call ends the capture, and the job with it. The mode of a thread that does so says that it has no part in it.
torch's own watchdog of NCCL does the same.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

_OF_THIS_THREAD_ALONE = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


@cache
def _driver() -> Any:
    """CUDA's driver; None where there is none. Its functions set what the runtime that torch uses reads, and its name
    is the same for all versions."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def ignore_captures_of_others() -> None:
    """Let calls of this thread be no part of captures that other threads begin. Call it first on a thread."""
    torch = sys.modules.get("torch")  # who has not imported it has no device
    if torch is None or not torch.cuda.is_initialized():
        return
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_OF_THIS_THREAD_ALONE)))
