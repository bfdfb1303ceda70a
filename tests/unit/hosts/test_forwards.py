"""A model's forwards, as the balancer is told of them, and which of their tokens are real."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.balancer.loop_state import LoopHooks, LoopState
from eplb_runtime.hosts.attaching.optimizers import follow_forwards
from eplb_runtime.hosts.transformers.describe import _Padding


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padding = _Padding()
        self.seen: Tensor | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, fails: bool = False) -> None:
        self.seen = self.padding.real_tokens(input_ids.numel())
        if fails:
            raise ValueError("a layer fails")


IDS, MASK = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[1, 0], [1, 1]])


def test_a_forward_that_fails_has_ended_when_the_next_begins() -> None:
    told: list[object] = []

    class Told(LoopHooks):
        def on_forward_begin(self, trains: bool) -> None:
            told.append("begins")

        def on_forward_end(self, layers: Collection[int]) -> None:
            told.append(layers)

    loop = LoopState(SimpleNamespace(optimizers=[]))  # type: ignore[arg-type]
    loop.hooks.append(Told())
    model = Model()
    follow_forwards(model, loop, frozenset({1}))
    model(IDS)
    with pytest.raises(ValueError, match="a layer fails"):
        model(IDS, fails=True)
    model(IDS)
    assert told == ["begins", {1}] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_mask_is_that_of_its_own_forward_and_of_nothing_after_it(fails: bool) -> None:
    model = Model()
    padding = model.padding
    padding.watch(model, padding.see)
    try:
        model(IDS, attention_mask=MASK, fails=fails)
    except ValueError:
        assert fails
    assert model.seen is not None and model.seen.tolist() == [True, False, True, True]
    assert padding.real_tokens(4) is None, "a part of the model that is called by itself has no mask"
    model(IDS)
    assert model.seen is None


def test_hooks_that_are_removed_see_nothing() -> None:
    model = Model()
    model.padding.watch(model, model.padding.see).remove()
    model(IDS, attention_mask=MASK)
    assert model.seen is None
