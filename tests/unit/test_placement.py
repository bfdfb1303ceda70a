"""A placement that exists is a valid one; what breaks a rule is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.placements import free_placements, home_placements

from eplb_runtime.placement import EMPTY, Placement, PlacementError

placements = st.one_of(home_placements(), free_placements())


def two_layers() -> tuple[list[list[int]], list[list[int]]]:
    """4 experts on 2 ranks with one replica slot each: maps that the tests below break."""
    map_ = [[0, 1, 2, 2, 3, -1], [3, 1, 0, 2, 0, 3]]
    home = [[0, 1, 3, 4], [4, 1, 3, 0]]
    return map_, home


def refusal(make: Callable[[], object]) -> str:
    with pytest.raises(PlacementError) as caught:
        make()
    said = str(caught.value)
    assert "\n" not in said
    return said


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "home_changes", "names"),
    [
        ({(1, 5): 4}, {}, ["layer 1", "rank 1", "slot 5", "expert 4", "0..3"]),
        ({(0, 2): -2}, {}, ["layer 0", "rank 0", "slot 2", "expert -2"]),
        ({(0, 1): 0}, {}, ["layer 0", "expert 1", "no slot"]),
        ({(0, 0): 3, (0, 5): 0}, {}, ["layer 0", "rank 0", "slot 0", "home of expert 0", "holds 3"]),
        ({}, {(1, 0): 2}, ["layer 1", "rank 0", "home of expert 0", "local slot 2", "0..1"]),
        ({}, {(0, 2): 6}, ["layer 0", "expert 2", "home slot 6"]),
        ({}, {(1, 3): -1}, ["layer 1", "expert 3", "home slot -1"]),
        ({(0, 2): 0}, {}, ["layer 0", "rank 0", "expert 0", "twice"]),
        ({(1, 5): 2}, {}, ["layer 1", "rank 1", "expert 2", "twice"]),
    ],
)
def test_a_broken_rule_is_named_with_layer_rank_and_expert(
    changes: dict[tuple[int, int], int], home_changes: dict[tuple[int, int], int], names: list[str]
) -> None:
    map_, home = two_layers()
    for (layer, slot), expert in changes.items():
        map_[layer][slot] = expert
    for (layer, expert), slot in home_changes.items():
        home[layer][expert] = slot
    said = refusal(lambda: Placement(map_, 4, 2, home))
    assert all(name in said for name in names), said


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Placement([[0, 1, 2, EMPTY]], 3, 2), "layer 0, rank 1: slot 3 holds expert -1"),
        (lambda: Placement([0, 1], 2, 2), r"shape (2,)"),
        (lambda: Placement([[]], 2, 2), "not empty"),
        (lambda: Placement([[0, 1]], 0, 2), "both must be positive"),
        (lambda: Placement([[0, 1, 2]], 3, 2), "3 slots cannot be spread evenly over 2 ranks"),
        (lambda: Placement([[0, 1], [0]], 2, 2), "ragged"),
        (lambda: Placement([[0.0, 1.0]], 2, 2), "must hold integers"),
        (lambda: Placement([[0, 2**31]], 2, 2), "is no id"),
        (lambda: Placement([[0, 1, 2, 0]], 3, 2, [[0, 1, 2]]), "2 ranks do not divide 3 experts"),
        (lambda: Placement([[0, 1]], 4, 2, [[0, 1, 2, 3]]), "4 experts do not fit in 2 slots"),
        (lambda: Placement([[0, 1]], 2, 2, [0, 1]), "home has shape (2,); it must be [1, 2]"),
        (lambda: Placement([[0, 1]], 10**12, 2), "1000000000000 experts do not fit in 2 slots"),
    ],
)
def test_shapes_and_kinds_that_are_no_placement_are_refused(make: Callable[[], object], says: str) -> None:
    assert says in refusal(make)


# -- where every job starts ------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_a_job_starts_in_logical_order_with_empty_replica_slots(
    layers: int, homes: int, ranks: int, replicas: int
) -> None:
    placement = Placement.initial(layers, homes * ranks, ranks, replicas)
    by_rank = placement.physical_to_logical.reshape(layers, ranks, homes + replicas)
    for layer in range(layers):
        assert by_rank[layer, :, :homes].ravel().tolist() == list(range(homes * ranks))
    assert (by_rank[:, :, homes:] == EMPTY).all()
    assert (placement.replica_slots, placement.epoch) == (replicas, 0)


@pytest.mark.parametrize("ranks", [3, 0, -1])
def test_ranks_that_do_not_divide_the_experts_are_refused(ranks: int) -> None:
    said = refusal(lambda: Placement.initial(1, 8, ranks))
    assert said == f"8 experts cannot be spread evenly over {ranks} ranks: EP sizes are 1, 2, 4, 8"


# -- derived maps ----------------------------------------------------------------------------------------------------


@given(placements)
def test_logical_to_physical_lists_each_slot_once_home_first_then_ascending(placement: Placement) -> None:
    table = placement.logical_to_physical
    for layer in range(placement.num_layers):
        for expert in range(placement.num_experts):
            slots = np.flatnonzero(placement.physical_to_logical[layer] == expert).tolist()
            if placement.home is not None:
                home = int(placement.home[layer, expert])
                slots = [home, *(slot for slot in slots if slot != home)]
            padding = [-1] * (table.shape[2] - len(slots))
            assert table[layer, expert].tolist() == slots + padding
            assert placement.copy_count[layer, expert] == len(slots)
    assert table.shape[2] == placement.copy_count.max()


def test_a_free_placement_has_no_homes() -> None:
    free = Placement([[0, 1]], 2, 2)
    assert "no homes" in refusal(lambda: free.home_rank)
    assert "no homes" in refusal(free.without_replicas)


@given(placements)
def test_nobody_can_write_into_a_placement(placement: Placement) -> None:
    arrays = [placement.physical_to_logical, placement.copy_count, placement.logical_to_physical]
    if placement.home is not None:
        arrays += [placement.home, placement.home_rank]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0, 0] = 0


# -- identity --------------------------------------------------------------------------------------------------------


def test_the_digest_sees_shape_layout_and_empty_slots() -> None:
    same_numbers = [
        Placement([[0, 1, 0, 1]], 2, 2),
        Placement([[0, 1, 0, 1]], 2, 1),
        Placement([[0, 1, 0, 1]], 2, 4),
        Placement([[0, 1], [0, 1]], 2, 2),
        Placement([[0, 1], [0, 1]], 2, 2, [[0, 1], [0, 1]]),
        Placement([[0, 1, 1, 0]], 2, 2, [[0, 2]]),
        Placement([[0, 1, 1, -1]], 2, 2, [[0, 2]]),
    ]
    assert len({placement.digest() for placement in same_numbers}) == len(same_numbers)


# -- for this model? -------------------------------------------------------------------------------------------------


def test_a_placement_of_another_model_says_what_it_is_for_and_what_is_needed() -> None:
    placement = Placement.initial(2, 8, 4, 1)
    placement.require_model(2, 8, 4, 1)
    for wanted in [(3, 8, 4, 1), (2, 16, 4, 1), (2, 8, 2, 1), (2, 8, 4, 0)]:
        said = refusal(lambda wanted=wanted: placement.require_model(*wanted))
        assert "2 MoE layers x 8 experts on 4 ranks with 1 replica slots" in said
        assert "{} MoE layers x {} experts on {} ranks with {} replica slots".format(*wanted) in said


def test_training_refuses_a_free_placement() -> None:
    assert "free layout" in refusal(lambda: Placement([[0, 1]], 2, 2).require_model(1, 2, 2, 0))


@given(home_placements(), st.sampled_from([1, 2, 3]))
def test_homes_that_are_divided_over_ranks_are_found_where_they_are(placement: Placement, parts: int) -> None:
    if placement.homes_per_rank % parts:
        parts = 1
    rows = placement.home_rows(parts)
    homes = placement.homes_over(placement.num_ranks * parts)
    layer = np.arange(placement.num_layers)[:, None]
    home_LE = placement.require_homes()
    assert (homes[layer, rows.rank_of(home_LE), rows.row_of(home_LE)] == np.arange(placement.num_experts)).all()
    assert (rows.slot_at(rows.place_of(home_LE)) == home_LE).all()


# -- Placement files: what is written can be read, what is broken is one line that names the file


STANDING = Placement.initial(2, 4, 2, replica_slots=1)
FIELDS = json.loads(STANDING.to_json())


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
        ({"layers": 3}, "the file says 3 layers and 3 slots per rank, its map has 2 layers and 3"),
        ({"experts": 5}, "expert 4 is in no slot"),
        ({"experts": 7}, "7 experts do not fit in 6 slots"),
        ({"ranks": 4}, "6 slots cannot be spread evenly over 4 ranks"),
        ({"experts": 4.5}, "wrong type"),
        ({"experts": float("inf")}, "wrong type"),
        ({"epoch": True}, "wrong type"),
        ({"physical_to_logical": None}, "must hold integers"),
        ({"physical_to_logical": [[0, 1, -1, 2, 3, -1], [0]]}, "ragged"),
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
