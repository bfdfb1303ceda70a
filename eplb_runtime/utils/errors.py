"""Errors of other libraries as a part of our messages."""

from __future__ import annotations

import re


def one_line(error: BaseException, *, with_type: bool = False) -> str:
    """Return the first line of an error's message, or the name of its type, which ``with_type`` puts before the message
    unless the error is one of this package."""
    kind = type(error)
    text = (str(error).strip().splitlines() or [kind.__name__])[0]
    if told := _GLOO.search(text):
        text = f"gloo: {told['what']}"
    foreign = with_type and not kind.__module__.startswith("eplb_runtime") and text != kind.__name__
    return f"{kind.__name__}: {text}" if foreign else text


_GLOO = re.compile(r"\[\S*gloo/\S*\.(?:cc|h):\d+\] (?P<what>.*?)(?:\. This is typically caused by .*)?$")
"""A message of gloo has the file and line of its own source before it, and general advice after it."""
