"""What `eplb-runtime verify` looks for at the end of a run: tensors that may be experts, and who holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from eplb_runtime.hosts.attaching.unregistered import (
    ALIKE,
    OWN,
    Candidate,
    _name_of,
    candidates,
    memories,
    named,
    shared_memory,
)
from eplb_runtime.moe.experts.registry import ExpertTensors

SHAPE = (2, 7, 13)


class Average:
    """Keeps something in a list."""

    def __init__(self, kept: object) -> None:
        self.shadow = [kept]


def found(thing: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """What is found in a loop that keeps this."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SHAPE))
    registry = ExpertTensors(1, SHAPE[0], [])
    registry.add(0, "weight", model.weight)
    average = {"averages": [Average(thing)]}
    assert average
    shape = tuple(thing.shape)  # of other tests there may be things as long as there are experts
    all_found, holders, _ = candidates([model], registry, memories([model], registry, []))
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
    assert content.startswith(OWN) or (content.startswith(ALIKE) and make().ndim == 2)
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


@pytest.mark.parametrize("make", [np.ones, torch.ones])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int8"])
def test_what_is_spoiled_is_another_and_finite_and_zero_stays(make: Callable[..., Any], dtype: str) -> None:
    kind = getattr(torch if make is torch.ones else np, dtype)
    for times in (1, 0):
        value = Candidate(times * make(SHAPE, dtype=kind))
        before = value.content()
        assert value.spoil([]) == (value.content() != before) == (times == 1)


def test_what_is_a_files_is_never_written(tmp_path: Path) -> None:
    held = np.memmap(tmp_path / "features", np.float32, "w+", shape=SHAPE)
    held[:] = 1
    for thing in (held, torch.from_numpy(held), np.frombuffer(held, np.float32)):
        assert Candidate(thing).spoil(shared_memory()) and (held == 1).all()
