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


def test_what_cannot_be_judged_is_two_sentences(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(capsys, skewed, "--ranks", "4", "--every", "5")
    assert shown.replace("\n", " ") == (
        "Too few steps: 12 steps were recorded, and a plan every 5 steps needs 15. Record 15 steps or more, or give "
        "--every 4. "
    )


def test_counts_of_one_rank_alone_are_no_load_of_the_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = np.zeros((40, 3, 8), dtype=np.int64)
    load[:, :, 5] = 4000
    np.savez(tmp_path / "load.npz", load=load)
    assert "It cannot be said: at most 1 of 8 experts" in printed(capsys, tmp_path / "load.npz", "--ranks", "4")
    assert json.loads(printed(capsys, tmp_path / "load.npz", "--ranks", "4", "--json"))["pays"] is None


def test_json_is_the_verdict_alone(skewed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(printed(capsys, skewed, "--ranks", "4", "--every", "3", "--json"))
    assert list(shown) == ["pays", "imbalance", "step_saved", "move_seconds", "data_parallel", "advice"]
    assert shown["pays"] is True and shown["imbalance"]["now"] == pytest.approx(16 / 7)


def test_ranks_that_do_not_fit_their_nodes_are_refused_in_a_line(
    skewed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["assess", str(skewed), "--ranks", "4", "--ranks-per-node", "3"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "does not divide" in said.err


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
