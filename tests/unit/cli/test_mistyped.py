"""A mistyped option or command is refused in a line that names what was probably meant."""

from __future__ import annotations

import pytest

from eplb_runtime.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    return said.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["simulat", "sample"], "simulate"),
        (["bench", "planer"], "planner"),
        (["assess", "sample", "--moe-shore", "0.3"], "--moe-share"),
        (["assess", "sample", "--evry=5"], "--every"),
        (["plan", "sample", "--ranks", "8", "--layout", "hom"], "home"),
    ],
)
def test_the_nearest_name_is_asked_about(arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"; did you mean {meant}?; see eplb-runtime " in refused(capsys, *arguments)


def test_a_mistyped_option_is_named_before_those_it_leaves_missing(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "plan", "sample", "--rnks", "8", "--ranks-per-node", "8", "--slots-per-rank", "9")
    assert said.startswith("eplb-runtime plan: unrecognized arguments: --rnks; did you mean --ranks?")


def test_nothing_is_guessed_where_nothing_is_near(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean" not in refused(capsys, "assess", "sample", "--zzz")
    assert "did you mean" not in refused(capsys, "zzz")


def test_the_beginning_of_an_option_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bubbles", "--sched", "1f1b", "--ranks", "2", "--micro", "4", "--json"]) == 0
