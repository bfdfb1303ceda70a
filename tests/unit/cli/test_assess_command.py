"""``eplb-runtime assess`` answers in words."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.cli import main, printing
from eplb_runtime.tools.formats.loads import write_load


@pytest.fixture
def skewed(tmp_path: Path) -> Path:
    load = np.full((12, 2, 8), 1000)
    load[:, :, :2] = 4000
    write_load(tmp_path / "load.npz", load)
    return tmp_path / "load.npz"


def printed(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["assess", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def test_a_paragraph_stands_above_what_is_assumed(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, skewed, "--ranks", "4", "--every", "3")
    paragraph, assumed = shown.split("\n\n")
    assert paragraph.startswith("4 ranks: the busiest rank has 2.29x the mean load; with homes moved 1.43x, with")
    assert "It pays. Next: BalancerConfig(interval=3" in paragraph.replace("\n", " ")
    assert "see assess --help" in assumed
    assert max(map(len, shown.splitlines())) <= 80


def test_json_is_the_verdict_alone(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capsys, skewed, "--ranks", "4", "--every", "3", "--json"))
    assert list(shown) == ["pays", "imbalance", "step_saved", "move_seconds", "data_parallel", "advice"]
    assert shown["pays"] is True and shown["imbalance"]["now"] == pytest.approx(16 / 7)


# -- What commands print beside their results: headings with units, signs of life, more on request, shells


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
