"""Placement files: what is written can be read, what is broken is one line that names the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placements import free_placements, home_placements

from eplb_runtime.placement import Placement, PlacementError

placements = st.one_of(home_placements(), free_placements())
STANDING = Placement.initial(2, 4, 2, replica_slots=1)
FIELDS = json.loads(STANDING.to_json())


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(PlacementError) as caught:
        make()
    said = str(caught.value)
    assert "\n" not in said
    return said


@given(placement=placements)
@settings(deadline=None)
def test_what_is_saved_is_what_is_loaded(placement: Placement) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "placement.json"
        placement.save(file)
        loaded = Placement.load(file)
        assert list(Path(folder).iterdir()) == [file]
    assert loaded == placement
    assert (loaded.epoch, loaded.layout) == (placement.epoch, placement.layout)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "something else"}, "not a placement file"),
        ({"version": 2}, "version 2 of the placement format; this release reads 1"),
        ({"layers": 3}, "the file says 3 layers and 3 slots per rank, its map has 2 and 3"),
        ({"slots_per_rank": 2}, "the file says 2 layers and 2 slots per rank"),
        ({"experts": 5}, "expert 4 stands in no slot"),
        ({"experts": 7}, "7 experts do not fit in 6 slots"),
        ({"ranks": 4}, "6 slots cannot be spread evenly over 4 ranks"),
        ({"ranks": 0}, "must be positive"),
        ({"experts": 4.5}, "wrong type"),
        ({"experts": 10**12, "home": None}, "do not fit in 6 slots"),
        ({"experts": float("inf")}, "wrong type"),
        ({"ranks": float("nan")}, "wrong type"),
        ({"epoch": None}, "wrong type"),
        ({"epoch": True}, "wrong type"),
        ({"layers": "two"}, "wrong type"),
        ({"version": {}}, "wrong type"),
        ({"physical_to_logical": None}, "must hold integers"),
        ({"physical_to_logical": [[0, 1, -1, 2, 3, -1], [0]]}, "ragged"),
        ({"physical_to_logical": [["a"]]}, "must hold integers"),
        ({"physical_to_logical": [[10**30]]}, "must hold integers"),
        ({"home": 3}, "home must hold integers"),
        ({"home": [[0, 1, 3, 5]] * 2}, "layer 0, rank 1: slot 5 is said to be the home of expert 3"),
    ],
)
def test_a_field_that_is_wrong_is_one_line_that_names_the_file(tmp_path: Path, change: dict, says: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(json.dumps({**FIELDS, **change}))
    said = refusal(lambda: Placement.load(file))
    assert said.startswith(f"{file}: ")
    assert says in said


@pytest.mark.parametrize("field", sorted(FIELDS.keys() - {"format"}))
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(json.dumps({key: value for key, value in FIELDS.items() if key != field}))
    said = refusal(lambda: Placement.load(file))
    assert said.startswith(f"{file}: ")
    assert f"'{field}' is missing" in said


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"{", b"\0" * 40, bytes(range(256)), b"[" * 100_000, b"\xff\xfe"],
    ids=["empty", "null", "list", "cut", "zeros", "binary", "nested", "utf16"],
)
def test_a_file_that_is_something_else_is_one_line_that_names_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "broken.json"
    file.write_bytes(content)
    assert refusal(lambda: Placement.load(file)).startswith(f"{file}: not a ")


@given(st.data())
@settings(deadline=None)
def test_a_file_that_breaks_off_is_never_a_placement(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cut.json"
        STANDING.save(file)
        whole = file.read_bytes()
        file.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
        assert refusal(lambda: Placement.load(file)).startswith(f"{file}: ")


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    missing = tmp_path / "none.json"
    assert refusal(lambda: Placement.load(missing)) == f"{missing}: cannot be read: No such file or directory"
    folder = tmp_path / "folder.json"
    folder.mkdir()
    assert refusal(lambda: Placement.load(folder)) == f"{folder}: cannot be read: Is a directory"


def test_a_write_that_breaks_off_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "placement.json"
    STANDING.save(file)
    before = file.read_bytes()

    def break_off(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", break_off)
    with pytest.raises(OSError, match="disk full"):
        STANDING.with_epoch(1).save(file)
    assert file.read_bytes() == before
    assert Placement.load(file) == STANDING
