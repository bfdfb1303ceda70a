"""What commands print beside their results: headings with units, signs of life, more on request, shells."""

from __future__ import annotations

import pytest

from eplb_runtime.cli import printing


def test_markup_in_a_cell_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table("[t]", [{"a": "[red]x[/red]"}])
    shown = capsys.readouterr().out
    assert "[red]x[/red]" in shown and "[t]" in shown


def wide(*heads: str) -> list[dict[str, object]]:
    return [{"policy": head, **{f"a_long_number_{n}": 123456.789 * n for n in range(9)}} for head in heads]


def test_a_wide_table_is_turned(capsys: pytest.CaptureFixture[str]) -> None:
    """No column goes into a second table."""
    printing.print_table("t", wide("one", "two"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line for line in lines if "policy" in line] == ["┃ policy          ┃       one ┃       two ┃"]
    assert all(f" {123456.789 * n:.4g} " in lines[4 + n] and f"a long number {n}" in lines[4 + n] for n in range(9))


def test_a_turned_table_that_is_too_wide_comes_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    printing.print_table("t", wide(*map(str, range(20))))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80 and shown.count(f" {123456.789:.4g} ") == 20
