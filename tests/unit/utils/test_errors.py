"""Errors of other libraries as a part of our messages."""

from __future__ import annotations

import pytest

from eplb_runtime.utils.errors import one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("first\nsecond"), "first"),
        (RuntimeError("\n  first\nsecond"), "first"),
        (RuntimeError(""), "RuntimeError"),
        (ValueError(" \n "), "ValueError"),
    ],
)
def test_a_message_gives_its_first_line_and_an_empty_one_its_type(error: Exception, line: str) -> None:
    assert one_line(error) == line
