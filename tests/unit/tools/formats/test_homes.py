"""Homes are kept where a file can say them, and found again in maps that were written from the home layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from placements import home_placements

from eplb_runtime.placement import EMPTY, Placement
from eplb_runtime.tools.formats.convert import convert, read_placement, write_placement
from eplb_runtime.tools.formats.reading import FormatError
from eplb_runtime.tools.formats.slots import restore_homes

ENGINES = {"sglang": "m.json", "vllm": "m.json", "tensorrt-llm": "m.yaml"}


def some_placement() -> Placement:
    """Two layers of four experts on two ranks, homes moved, a copy in two of four replica slots."""
    rows = [[2, 0, 1, 3, 1, EMPTY], [3, 1, EMPTY, 0, 2, 3]]
    homes = [[1, 4, 0, 3], [3, 1, 4, 0]]
    return Placement(rows, 4, 2, homes, epoch=3)


@pytest.mark.parametrize("to", ENGINES)
def test_homes_come_back_from_every_engines_map(tmp_path: Path, to: str) -> None:
    placement = some_placement()
    placement.save(tmp_path / "own.json")
    assert convert(tmp_path / "own.json", tmp_path / ENGINES[to], to=to).homes == ""
    done = convert(tmp_path / ENGINES[to], tmp_path / "back.json", num_ranks=2, dense_layers=0)
    assert (done.homes, done.format) == ("restored", "eplb-runtime")
    back = Placement.load(tmp_path / "back.json")
    assert back.layout == "home"
    assert np.array_equal(back.home, placement.home)
    kept = placement.physical_to_logical != EMPTY
    assert np.array_equal(back.physical_to_logical[kept], placement.physical_to_logical[kept])


@given(placement=home_placements())
@settings(deadline=None)
def test_any_home_placement_is_found_again(tmp_path_factory: pytest.TempPathFactory, placement: Placement) -> None:
    assume(placement.slots_per_rank <= placement.num_experts)  # else a filled slot is a second copy on its rank
    path = tmp_path_factory.mktemp("homes") / "map.json"
    write_placement(path, placement, "vllm")
    back = read_placement(path, placement.num_ranks)
    assert back.home is not None and np.array_equal(back.home, placement.home)


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        ([[0, 1, 0, 1]], 2),  # rank 0 has both homes, rank 1 the copies
        ([[0, 0, 1, 0]], 2),  # an expert twice on a rank
        ([[0, 1, 2, 0]], 2),  # ranks do not divide the experts
        ([[0, 1, 1, 0], [0, 1, 0, 1]], 2),  # the second layer is none
    ],
)
def test_a_map_that_is_no_home_layout_stays_free(tmp_path: Path, rows: list[list[int]], ranks: int) -> None:
    placement = Placement(rows, max(rows[0]) + 1, ranks)
    assert restore_homes(placement) is None
    write_placement(tmp_path / "map.json", placement, "vllm")
    done = convert(tmp_path / "map.json", tmp_path / "own.json", num_ranks=ranks)
    assert done.homes == "" and Placement.load(tmp_path / "own.json") == placement
    with pytest.raises(FormatError, match=r"map\.json: it cannot be read in the home layout"):
        read_placement(tmp_path / "map.json", ranks, layout="home")


def test_homes_are_left_out_on_request_only(tmp_path: Path) -> None:
    full = Placement.initial(2, 4, 2)
    full.save(tmp_path / "own.json")
    assert convert(tmp_path / "own.json", tmp_path / "same.json").homes == "kept"
    assert read_placement(tmp_path / "same.json", 2) == full
    read_placement(tmp_path / "own.json", 2, layout="free").save(tmp_path / "free.json")
    assert convert(tmp_path / "free.json", tmp_path / "still.json").homes == "", "our own files say what they are"
    assert Placement.load(tmp_path / "still.json").layout == "free"
    assert read_placement(tmp_path / "free.json", 2, layout="home") == full
    some_placement().save(tmp_path / "gaps.json")
    with pytest.raises(FormatError, match="empty replica slots, which the free layout does not know"):
        read_placement(tmp_path / "gaps.json", 2, layout="free")
