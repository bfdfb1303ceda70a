"""An engine that balances its experts itself is loaded by its own map, not by logical numbers taken for slots."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eplb_runtime.tools.formats.convert import read_placement
from eplb_runtime.tools.formats.reading import FormatError
from eplb_runtime.tools.formats.slots import tensors_of_slots

MAP = [[2, 0, 1, 3, 2, 0], [1, 3, 0, 2, 3, 1]]
"""[layers, slots] of 4 experts, two of which have two slots in each layer."""


class Stream:
    """As `Balancer.named_logical_tensors`: expert e of layer l is filled with 10 l + e."""

    num_experts = 4

    def __init__(self, stacked: bool, layers: int = 2, receives: bool = True) -> None:
        self._receives = receives
        self._tensors: dict[str, Tensor] = {"norm": torch.full((2,), -1.0)}
        self.experts: dict[str, tuple[int, int | None]] = {}
        for layer in range(layers):
            rows = torch.stack([torch.full((2, 3), 10.0 * layer + expert) for expert in range(4)])
            if stacked:
                self._tensors[f"{layer}.experts.up"] = rows
                self.experts[f"{layer}.experts.up"] = (layer, None)
            for expert in range(0 if stacked else 4):
                name = f"{layer}.experts.{expert}.up"
                self._tensors[name], self.experts[name] = rows[expert], (layer, expert)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items() if self._receives else ())


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("engine", ["lists", "vllm", "sglang"])
def test_each_slot_gets_the_tensor_of_the_expert_that_the_engine_has_there(
    stacked: bool, engine: str, tmp_path: Path
) -> None:
    given = MAP
    if engine != "lists":
        path = tmp_path / "map.json"
        dense = [[0, 1, 2, 3, 0, 1]]
        path.write_text(json.dumps(MAP if engine == "vllm" else {"physical_to_logical_map": dense + MAP}))
        given = read_placement(path, 2, 1)
    filled = torch.full((2, 6), torch.nan)
    others = []
    for name, tensor, layer, slot in tensors_of_slots(Stream(stacked), given):  # type: ignore[arg-type]
        if layer is None or slot is None:
            others.append((name, slot))
            continue
        assert tensor.shape == (2, 3) and filled[layer, slot].isnan(), "each slot once"
        filled[layer, slot] = tensor[0, 0]
    assert others == [("norm", None)]
    wanted = torch.tensor(MAP) + torch.tensor([[0], [10]])
    assert torch.equal(filled, wanted.float())
    assert not torch.equal(filled[:, :4], torch.tensor([[0.0, 1, 2, 3], [10, 11, 12, 13]])), "control: not by number"


def test_a_map_of_another_model_is_refused() -> None:
    with pytest.raises(FormatError, match=r"has shape \[2, 6\], and the model 3 MoE layers"):
        list(tensors_of_slots(Stream(False, layers=3), MAP))  # type: ignore[arg-type]
    lacking = [[0, 1, 2, 2, 1, 0], MAP[1]]
    with pytest.raises(FormatError, match="layer 0 has no slot for expert 3"):
        list(tensors_of_slots(Stream(True), lacking))  # type: ignore[arg-type]


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("receives", [True, False])
def test_a_map_is_refused_on_every_rank_ahead_of_the_first_tensor(stacked: bool, receives: bool) -> None:
    for wrong, given in {
        "layer 1 has no slot for expert 3": [MAP[0], [0, 1, 2, 2, 1, 0]],
        "layer 0 has expert 4, and the model 4": [[0, 1, 2, 3, 4, 0], MAP[1]],
    }.items():
        with pytest.raises(FormatError, match=wrong):
            next(tensors_of_slots(Stream(stacked, receives=receives), given))  # type: ignore[arg-type]
    assert next(tensors_of_slots(Stream(stacked), MAP)).name == "norm", "control"  # type: ignore[arg-type]
