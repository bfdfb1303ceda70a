"""A walk hands out copies of experts that are elsewhere, and notices what is written to them, however it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from eplb_runtime.hosts.walks import Walk


def replaced(tensor: Tensor) -> None:
    tensor.data = tensor.data + 1


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "through data": lambda tensor: tensor.data.add_(1),
    "replaced": replaced,
}


def walked(write: Callable[[Tensor], object], *, is_elsewhere: bool) -> list[str]:
    """Names that a walk over two experts has handed out; ``write`` is called with each."""
    walk = object.__new__(Walk)
    walk._at_launch = lambda name, tensor: tensor.clone() if is_elsewhere else tensor  # type: ignore[method-assign]
    seen = []
    for name, tensor in walk.pairs([("first", torch.zeros(8, 100)), ("second", torch.zeros(8, 100))], str):
        write(tensor)
        seen.append(name)
    return seen


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_to_a_copy_raises(way: str) -> None:
    with pytest.raises(RuntimeError, match=r"^first was written to, and it is a copy of an expert"):
        walked(WRITES[way], is_elsewhere=True)
    assert walked(WRITES[way], is_elsewhere=False) == ["first", "second"], "the model's own may be written to"


def test_what_is_read_does_not_raise() -> None:
    assert walked(lambda tensor: tensor.sum(), is_elsewhere=True) == ["first", "second"]
    with torch.inference_mode():
        assert walked(lambda tensor: tensor.sum(), is_elsewhere=True) == ["first", "second"]
