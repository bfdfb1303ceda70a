"""`eplb-runtime bench` refuses options that cannot be before it starts any rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from eplb_runtime.cli import main
from eplb_runtime.tools import launch


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: object) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr(launch, "start_ranks", started)


def test_a_profile_with_brief_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "train", "--brief", "--profile", str(tmp_path)]) == 2
    assert "--profile goes without --brief" in capsys.readouterr().err


def test_a_profile_that_is_a_file_is_refused_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "traces"
    file.write_text("")
    assert main(["bench", "train", "--profile", str(file)]) == 2
    assert "this is a file; give a folder" in capsys.readouterr().err


def test_options_that_can_be_start_ranks(tmp_path: Path) -> None:
    """Control."""
    with pytest.raises(AssertionError, match="ranks were started"):
        main(["bench", "train", "--profile", str(tmp_path)])
