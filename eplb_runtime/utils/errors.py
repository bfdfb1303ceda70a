"""Errors of other libraries as a part of our messages."""

from __future__ import annotations


def one_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
