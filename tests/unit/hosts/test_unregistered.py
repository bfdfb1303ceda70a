"""What `eplb-runtime verify` looks for at the end of a run: tensors that may be experts, and who holds them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eplb_runtime.hosts.attaching.unregistered import ALIKE, Places, _name_of, kept, memories, named
from eplb_runtime.moe.experts.registry import ExpertTensors
from eplb_runtime.tools.verification import runs

SHAPE = (2, 7, 13)


class Average:
    """Keeps something in a list."""

    def __init__(self, kept: object) -> None:
        self.shadow = [kept]


def found(thing: Any, places: Places | None = None) -> list[tuple[str, tuple[int, ...], str]]:
    """What is found in a loop that keeps this."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SHAPE))
    registry = ExpertTensors(1, SHAPE[0], [])
    registry.add(0, "weight", model.weight)
    average = {"averages": [Average(thing)]}
    assert average
    shape = tuple(thing.shape)  # of other tests there may be things as long as there are experts
    all_found, holders = kept([model], registry, memories([model], registry, []), places)
    wanted = [place for place, (of, _) in enumerate(all_found) if of == shape]
    return [(*named(all_found, holders, [place])[0], all_found[place][1]) for place in wanted]


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.ones(SHAPE, np.int16),
        lambda: np.ones(SHAPE, np.int8),
        lambda: torch.ones(SHAPE, dtype=torch.int16),
        lambda: torch.ones(SHAPE[1:], dtype=torch.bfloat16),
    ],
)
def test_an_average_is_found_in_any_number_format_and_its_owner_is_named(make: Callable[[], Any]) -> None:
    ((holder, _, content),) = found(make())
    assert content == "" or (content.startswith(ALIKE) and make().ndim == 2)
    assert holder == "an object of Average" or holder.startswith("variable ")


def test_a_module_is_named_but_for_those_of_frameworks() -> None:
    names = [_name_of(ModuleType(name), []) for name in ("averages", "numba.tables")]
    assert names == ["module averages", ""]


def test_a_snapshot_of_the_whole_model_before_attach_has_a_content_that_all_ranks_can_compare() -> None:
    ((_, shape, content),) = found(torch.ones(4, *SHAPE[1:]))
    assert shape == (4, *SHAPE[1:]) and content.startswith(ALIKE)


def test_what_has_only_the_number_of_elements_is_told_from_an_average_by_its_bits() -> None:
    (output,) = found(torch.arange(91.0))
    (average,), (moved,) = found(torch.ones(91)), found(torch.zeros(91))
    assert output[2] and average[2] and moved[2] != average[2]

    def run(kind: str, *of: tuple[str, tuple[int, ...], str]) -> Any:
        return SimpleNamespace(meta={kind: [{"holder": holder, "shape": shape} for holder, shape, _ in of]})

    made_new = ("an object of Sharpness", (91,), "")
    suspects = run("unregistered", moved, made_new)
    assert len(runs._unregistered(suspects)) == len(runs._unregistered(suspects, SimpleNamespace(meta={}))) == 2
    (left,) = runs._unregistered(suspects, run("confirmed", moved))
    assert left == {"holder": moved[0], "shape": (91,)}


def test_what_is_zero_as_a_step_begins_or_made_anew_elsewhere_is_not_kept() -> None:
    buffer, average = torch.zeros(SHAPE), {"of": torch.ones(SHAPE)}
    places = Places({0})
    average["of"] = average["of"] * 0.9
    places.kept.clear()
    holders = [holder for holder, *_ in found(buffer.add_(1), places)]
    assert any(one.startswith("variable average") for one in holders), "made anew, in the same place"
    assert not any(one.startswith("variable buffer") for one in holders)
