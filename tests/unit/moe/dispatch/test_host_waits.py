"""`host_waits` notices what reads values on the host, and lets pass what does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from host_waits import HostWaitsError, no_waits
from torch import Tensor

WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "if": lambda x: 1 if x.any() else 0,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "nonzero": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "bincount": lambda x: x.bincount(),
    "slice by a value": lambda x: x[: x[1]],
}


@pytest.mark.parametrize("name", WAITS)
def test_what_reads_values_is_refused(name: str) -> None:
    x = torch.tensor([0, 1, 2, 3])
    WAITS[name](x)
    with pytest.raises(HostWaitsError), no_waits():
        WAITS[name](x)


def test_what_waits_for_nothing_passes() -> None:
    x = torch.tensor([2, 0, 1])
    with no_waits():
        order = x.argsort(stable=True)
        x.cumsum(0).index_select(0, order).scatter_add_(0, order, x)
        torch.where(x > 0, x[order], 0).clamp_(max=1).masked_fill_(x > 0, 2)
        torch.repeat_interleave(x, x, output_size=3)
        torch.searchsorted(x, x)
        x[order] = x.clone()
