"""A plan on the wire brings the placement it was made of, and nothing that is none."""

from __future__ import annotations

import base64
import json

import numpy as np
import pytest
from hypothesis import given
from placements import pairs_of_home_placements

from eplb_runtime.migration.difference import apply, difference
from eplb_runtime.placement import Placement, PlacementError


@given(pairs_of_home_placements())
def test_what_arrives_is_what_was_sent(pair: tuple[Placement, Placement]) -> None:
    current, target = pair
    assert apply(current, json.loads(json.dumps(difference(current, target)))) == target


def test_only_layers_that_change_travel_two_bytes_a_slot() -> None:
    current = Placement.initial(58, 256, 64, 1)
    home = current.home.copy()
    home[7, [0, 9]] = home[7, [9, 0]]
    map_ = current.physical_to_logical.copy()
    map_[7, home[7]] = np.arange(256)
    fields = difference(current, Placement(map_, 256, 64, home))
    assert fields["layers"] == [7]
    assert len(base64.b64decode(fields["slots"])) == 2 * 320


def altered(**changes: object) -> dict:
    return difference(Placement.initial(2, 8, 4, 1), Placement.initial(2, 8, 4, 1).with_epoch(1)) | changes


def in_slots(values: list[int]) -> str:
    return base64.b64encode(np.array(values, dtype="<i2").tobytes()).decode()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        altered(slots="&"),
        altered(slots=in_slots([1, 2, 3])),
        altered(layers=[0, 5]),
        altered(layers="no"),
        altered(layers=[0], slots=in_slots([0] * 12)),
        altered(layers=[0], slots=in_slots([8, *range(1, 12)])),
        altered(layers=[0], slots=in_slots([-7, *range(1, 12)])),
        altered(epoch="x"),
    ],
)
def test_what_is_no_placement_is_refused(fields: dict) -> None:
    with pytest.raises(PlacementError):
        apply(Placement.initial(2, 8, 4, 1), fields)
