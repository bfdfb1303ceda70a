"""Every output is written whole or not at all and never through a link; what cannot be a file of ours is not read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_runtime.placement import Placement, PlacementError
from eplb_runtime.tools.formats.convert import write_placement
from eplb_runtime.tools.formats.loads import write_load
from eplb_runtime.utils import files
from eplb_runtime.utils.files import FileError, require_readable, require_writable, write_file

PLACEMENT = Placement.initial(2, 4, 2, replica_slots=1)
LOAD = np.arange(1.0, 25).reshape(3, 2, 4)


def to_engine(name: str) -> Callable[[Path], object]:
    return lambda path: write_placement(path, PLACEMENT, name)


WRITERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "placement.json": ("p.json", PLACEMENT.save),
    "load.npz": ("l.npz", lambda path: write_load(path, LOAD)),
    "sglang map": ("m.json", to_engine("sglang")),
    "vllm": ("m.json", to_engine("vllm")),
    "tensorrt-llm": ("m.yaml", to_engine("tensorrt-llm")),
}
each_writer = pytest.mark.parametrize("writer", WRITERS)


# -- writing -------------------------------------------------------------------------------------------------------


@each_writer
def test_no_output_goes_through_a_link_that_was_planted(tmp_path: Path, writer: str) -> None:
    name, write = WRITERS[writer]
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "out"
    folder.mkdir()
    for planted in (name, name + ".partial", f".{name}.partial", name + ".tmp"):
        (folder / planted).symlink_to(victim)
    write(folder / name)
    assert victim.read_text() == "untouched"
    assert (folder / name).is_file() and not (folder / name).is_symlink()


@each_writer
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write = WRITERS[writer]
    (tmp_path / name).write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / name)
    assert (tmp_path / name).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [name]


@each_writer
def test_until_the_end_the_old_file_stands(tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, write = WRITERS[writer]
    (tmp_path / name).write_text("old")
    seen = []
    real = os.replace

    def spy(source: Path, target: Path) -> None:
        seen.append((Path(source).parent, Path(target), (tmp_path / name).read_text()))
        real(source, target)

    monkeypatch.setattr(files.os, "replace", spy)
    write(tmp_path / name)
    assert seen == [(tmp_path, tmp_path / name, "old")]
    assert (tmp_path / name).stat().st_size > 0


def test_a_file_that_is_replaced_keeps_its_permissions_and_a_new_one_gets_the_usual(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(0o600)
    write_file(tmp_path / "secret", "x")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    (tmp_path / "usual").touch()
    write_file(tmp_path / "new", "x")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_a_destination_that_will_not_do_is_noticed_beforehand(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").touch()
    require_writable(tmp_path / "new.json", [".json"])
    with pytest.raises(FileError, match=r"must end in \.json or \.csv"):
        require_writable(tmp_path / "new.xls", [".json", ".csv"])
    with pytest.raises(FileNotFoundError):
        require_writable(tmp_path / "none" / "new.json")
    with pytest.raises(NotADirectoryError):
        require_writable(tmp_path / "file" / "new.json")
    with pytest.raises(IsADirectoryError):
        require_writable(tmp_path / "folder.json")


# -- reading -------------------------------------------------------------------------------------------------------


def test_a_device_or_pipe_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.json")
    for name in ("zero.json", "pipe.json"):
        with pytest.raises(FileError, match="not a regular file"):
            require_readable(tmp_path / name, 1)
        with pytest.raises(PlacementError, match="not a regular file"):
            Placement.load(tmp_path / name)
