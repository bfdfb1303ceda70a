"""Errors of other libraries as a part of our messages, and errors of ours without the calls inside of libraries."""

from __future__ import annotations

import json
import sys

import pytest

from eplb_runtime.distributed.hang_watchdog import LostRankError
from eplb_runtime.utils.errors import brief_tracebacks, one_line


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


def raised(error: Exception) -> Exception:
    """The error, from below a library, itself caused by another one."""

    def fail(found: dict) -> None:
        raise error from RuntimeError("the cause")

    try:
        json.loads("{}", object_hook=fail)
    except type(error) as caught:
        return caught
    raise AssertionError("it was not raised")


def printed(error: Exception, capsys: pytest.CaptureFixture[str]) -> str:
    sys.excepthook(type(error), error, error.__traceback__)
    return capsys.readouterr().err


def test_what_other_ranks_did_is_printed_without_calls_inside_of_libraries(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # torch's begins each line with the rank
    before = sys.excepthook
    undo = brief_tracebacks()
    try:
        lost = printed(raised(LostRankError("rank 0 waited in vain")), capsys)
        other = printed(raised(RuntimeError("of the user")), capsys)
    finally:
        undo()
    assert "test_errors.py" in lost and "json" not in lost.replace("json.loads", "") and "direct cause" not in lost
    assert "LostRankError: rank 0 waited in vain\n(3 calls inside of libraries are not shown)" in lost
    assert "decoder.py" in other and "direct cause" in other, "other errors are printed as before"
    assert sys.excepthook is before


def test_a_hook_that_was_set_later_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    undo = brief_tracebacks()
    later = monkeypatch.setattr(sys, "excepthook", print) or sys.excepthook
    undo()
    assert sys.excepthook is later
