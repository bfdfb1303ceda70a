"""Threads of ours: one that does one thing after another, calls that end in time whatever becomes of it, and no part
in a CUDA graph that the training thread captures."""

import ctypes
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")

_Task = tuple["Future[object]", Callable[[], object]]

_OF_THIS_THREAD_ALONE = 1
"""``CU_STREAM_CAPTURE_MODE_THREAD_LOCAL``."""


class Worker:
    """Does what it is given, in order, on a daemon thread that starts with the first of it, so that work that never
    returns does not keep the process from ending."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._begin = begin
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.closed = False

    @property
    def waiting(self) -> int:
        return self._tasks.qsize()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Return the future of ``work``; cancelled before it begins, it is left out."""
        if self.closed:
            raise RuntimeError(f"the thread {self._name!r} is closed")
        future: Future[T] = Future()
        self._tasks.put((future, work))  # type: ignore[arg-type]
        with self._starting:
            if self._thread is None:
                arguments = (self._tasks, self._begin)
                self._thread = threading.Thread(target=_work_off, args=arguments, name=self._name, daemon=True)
                self._thread.start()
        return future

    def do(self, work: Callable[[], T], seconds: float) -> T:
        """Return what ``work`` returns; TimeoutError: not done in time, it goes on if it has begun, and else never
        begins."""
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # it is the work's own
            future.cancel()
            raise TimeoutError(f"no answer in {seconds:g} s") from None

    def close(self, seconds: float) -> bool:
        """Take no more work, and wait for what was given at most so long. Whether the thread is gone."""
        self._end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._tasks.put(None)

    def __del__(self) -> None:
        self._end()  # a balancer that was never closed leaves no thread behind


def _work_off(tasks: queue.SimpleQueue[_Task | None], begin: Callable[[], None]) -> None:
    """The thread knows the tasks alone, so that it does not keep who gives them alive."""
    ignore_captures_of_others()
    begin()
    while (task := tasks.get()) is not None:
        future, work = task
        if future.set_running_or_notify_cancel():
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, work


@cache
def _driver() -> Any:
    """CUDA's driver; None where there is none. Its functions set what the runtime that torch uses reads, and its name
    is the same for all versions."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def ignore_captures_of_others() -> None:
    """Let calls of this thread be no part of captures that other threads begin. Call it first on a thread.

    A capture in torch's default mode forbids every thread of the process to ask for events, to wait for them or to
    copy: one such call ends the capture, and the job with it. The mode of a thread that does so says that it has no
    part in it. torch's own watchdog of NCCL does the same.
    """
    torch = sys.modules.get("torch")  # who has not imported it has no device
    if torch is None or not torch.cuda.is_initialized():
        return
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_OF_THIS_THREAD_ALONE)))
