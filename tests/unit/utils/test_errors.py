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


GLOO = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:15795: Connection "
    "reset by peer. This is typically caused by a remote worker hanging or bugs in the application. Check the logs"
)


def test_gloo_is_quoted_without_its_source_lines_and_its_general_advice() -> None:
    assert one_line(RuntimeError(GLOO)) == "gloo: Read error [127.0.0.1]:15795: Connection reset by peer"
