"""Tables that a worker's stream has made are read on the stream that trains, and are not freed under it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eplb_runtime.moe.routing import lookup, splitter
from eplb_runtime.moe.routing.lookup import SlotTable, record_use
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings
from eplb_runtime.placement import Placement

PLACEMENT = Placement(np.array([[0, 1, 2, 2, 3, 0]]), 4, 2, np.array([[0, 1, 3, 4]]))


def test_memory_on_a_device_is_held_for_the_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"training on {device}")
    for kind in ("cuda", "cpu"):
        record_use(SimpleNamespace(device=torch.device(kind), record_stream=held.append))  # type: ignore[arg-type]
    assert held == ["training on cuda"]


@pytest.mark.parametrize("kind", ["table", "splitter"])
def test_a_table_is_held_when_it_is_taken_over_and_not_before(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    used: list[torch.Tensor] = []
    for module in (lookup, splitter):
        monkeypatch.setattr(module, "record_use", lambda *tensors: used.extend(tensors))
    maps: Any
    if kind == "table":
        homes = Placement(np.array([[0, 1, 2, 3]]), 4, 2, np.array([[0, 1, 2, 3]]))
        maps, placement = SlotTable(homes, torch.device("cpu")), homes
    else:
        placement = PLACEMENT
        maps = BatchSplitter(placement, torch.device("cpu"), 0, SplitSettings(ranks_per_node=1))
    used.clear()
    take_over = maps.prepare(placement, [0])
    assert not used
    take_over()
    assert len(used) == (2 if kind == "table" else 1), "the map and its index; the slots"
