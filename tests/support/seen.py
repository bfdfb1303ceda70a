"""What a job is compared by: the bits of its tensors, what it warns of, and the line that a call refuses with."""

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch


def differing(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> list[Any]:
    """Names of tensors whose dtypes or bits are not the same, and of other values that are not equal."""
    assert one.keys() == other.keys()
    return [name for name, value in one.items() if not _is_same(value, other[name])]


def same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return one.keys() == other.keys() and not differing(one, other)


def furthest(one: Mapping[Any, torch.Tensor], other: Mapping[Any, torch.Tensor]) -> float:
    """The largest difference of any tensor, over its own largest number."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    pairs = [(tensor.double(), other[name].double()) for name, tensor in one.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def said_by(call: Callable[[], Any]) -> str:
    """What a call raises as a RuntimeError or a ValueError; empty: nothing."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def assert_refused(cases: Mapping[str, Callable[[], Any]]) -> None:
    """All calls are made, and each says these words, in one line."""
    for words, line in {words: said_by(call) for words, call in cases.items()}.items():
        assert words in line and "\n" not in line, (words, line)


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Lines of the package's log of this level or above, while they come."""
    lines: list[str] = []
    handler, logger = logging.Handler(level), logging.getLogger("eplb_runtime")
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before, _ = logger.level, logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield lines
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A digest of the bits of each tensor, after its dtype and shape. A rank that trains several times keeps these in
    place of the tensors, which the balancer would look through before each move as a user's own copies of experts."""
    return {name: _digest(tensor.detach()) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {[*tensor.shape]} {hashlib.blake2b(content).hexdigest()}"
