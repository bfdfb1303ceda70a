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


class Worker:
    """A daemon thread that does what it is given, in order; it starts with the first work. Work that never returns does
    not keep the process from ending."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._name, self._begin = name, begin
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.closed = False

    @property
    def waiting(self) -> int:
        return self._tasks.qsize()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue ``work`` and return its future; the first call starts the thread. Work whose future is cancelled before
        it begins is skipped. RuntimeError: the worker is closed."""
        if self.closed:
            raise RuntimeError(f"the thread {self._name!r} is closed")
        future: Future[T] = Future()
        self._tasks.put((future, work))  # type: ignore[arg-type]
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(None, _work_off, self._name, (self._tasks, self._begin), daemon=True)
                self._thread.start()
        return future

    def do(self, work: Callable[[], T], seconds: float) -> T:
        """Do ``work`` on the thread, wait, and return its result or raise its exception. TimeoutError: it is not done
        after ``seconds``. Work that has begun then goes on; other work is cancelled."""
        future = self.submit(work)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # it is the work's own
            future.cancel()
            raise TimeoutError(f"no answer in {seconds:g} s") from None

    def close(self, seconds: float) -> bool:
        """Refuse further work, and wait at most ``seconds`` for the queued work, unless this is the worker's own
        thread. Return whether no thread is left."""
        self._end()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(seconds)
        return thread is None or not thread.is_alive()

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self._tasks.put(None)

    __del__ = _end  # a balancer that was never closed leaves no thread behind


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
    """Exempt the calling thread from CUDA graph captures of other threads. Call it first on a thread.

    A capture in torch's default mode forbids every thread of the process to ask for events, to wait for them or to
    copy: one such call ends the capture, and the job with it. This sets the calling thread's capture mode to
    thread-local, as torch's watchdog of NCCL does. Without CUDA, or before torch has initialized it, nothing is done.
    """
    torch = sys.modules.get("torch")  # who has not imported it has no device
    if torch is None or not torch.cuda.is_initialized():
        return
    exchange = getattr(_driver(), "cuThreadExchangeStreamCaptureMode", None)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(1)))  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
