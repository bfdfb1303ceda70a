"""Errors of other libraries as a part of our messages, and errors of ours without the calls inside of libraries."""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType


def one_line(error: BaseException, *, with_type: bool = False) -> str:
    """Return the first line of an error's message, or the name of its type if it has none.

    Args:
        with_type: put the name of its type before the message, unless the error is one of this package.
    """
    kind = type(error)
    text = (str(error).strip().splitlines() or [kind.__name__])[0]
    if told := _GLOO.search(text):
        text = f"gloo: {told['what']}"
    foreign = with_type and not kind.__module__.startswith("eplb_runtime") and text != kind.__name__
    return f"{kind.__name__}: {text}" if foreign else text


_GLOO = re.compile(r"\[\S*gloo/\S*\.(?:cc|h):\d+\] (?P<what>.*?)(?:\. This is typically caused by .*)?$")
"""A message of gloo has the file and line of its own source before it, and general advice after it."""


class JobError(RuntimeError):
    """Other ranks did not come, or came elsewhere. The message says all there is to know: what this process prints at
    its end is the line of the script, without the calls inside of libraries (`brief_tracebacks`)."""


def brief_tracebacks() -> Callable[[], None]:
    """Let this process print errors of the job that end it without the calls inside of libraries; other errors are
    printed as before.

    Returns:
        a function that undoes it, unless somebody else has set ``sys.excepthook`` meanwhile.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, JobError):
            before(kind, error, trace)
            return
        calls = list(_calls(trace))
        of_script = [call for call in calls if not _is_library(call.tb_frame.f_code.co_filename)]
        shown = None
        for call in reversed(of_script):
            shown = TracebackType(shown, call.tb_frame, call.tb_lasti, call.tb_lineno)
        if left_out := len(calls) - len(of_script):
            error.add_note(f"({left_out} calls inside of libraries are not shown)")
        error.__suppress_context__, error.__cause__ = True, None
        before(kind, error.with_traceback(shown), shown)

    def undo() -> None:
        if sys.excepthook is hook:
            sys.excepthook = before

    sys.excepthook = hook
    return undo


def _calls(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


_LIBRARIES = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _is_library(file: str) -> bool:
    return file.startswith("<") or file.startswith(_LIBRARIES)
