"""Which tokens of a running batch are real, as Transformers' attention mask tells."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.hosts.transformers.describe import _Padding


class Model(nn.Module):
    """Notes which tokens are said to be real while it runs."""

    def __init__(self, padding: _Padding) -> None:
        super().__init__()
        self.padding = padding
        self.seen: Tensor | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, fails: bool = False) -> None:
        self.seen = self.padding.real_tokens(input_ids.numel())
        if fails:
            raise ValueError("a forward fails")


IDS, MASK = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[1, 0], [1, 1]])


@pytest.mark.parametrize("fails", [False, True])
def test_a_mask_is_that_of_its_own_forward_and_of_nothing_after_it(fails: bool) -> None:
    padding = _Padding()
    model = Model(padding)
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
    padding = _Padding()
    model = Model(padding)
    padding.watch(model, padding.see).remove()
    model(IDS, attention_mask=MASK)
    assert model.seen is None
