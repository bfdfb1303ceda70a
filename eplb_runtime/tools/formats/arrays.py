"""Numbers out of a file's content: nested lists, numpy arrays, torch tensors."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FormatError, first_line

LoadArray = NDArray[np.float64]

MOST_NUMBERS = 2**28
"""So many numbers are taken from one array: 18,000 windows of 58 layers x 256 experts, 2 GiB as float64."""
MOST_EXPERTS = 1 << 16
"""Experts of a layer: larger ids are none of it."""


def numbers(values: Any, name: str) -> LoadArray:
    """``values`` as float64, of any shape.

    Raises:
        FormatError: ragged, no numbers, or too many; the message names ``name``.
    """
    return _plain_array(values, name, "iuf", "hold numbers").astype(np.float64)


def expert_ids(values: Any, name: str, shape: tuple[str, ...] = ("layers", "slots")) -> NDArray[np.int64]:
    """``values`` as int64, any ids.

    Args:
        shape: names of the dimensions.

    Raises:
        FormatError: ragged, no integers, too many, or of another shape.
    """
    wanted = f"be [{', '.join(shape)}] of expert ids"
    array = _plain_array(values, name, "iu", wanted)
    if array.ndim != len(shape):
        raise FormatError(f"{name} must {wanted}")
    if array.size and array.max() > np.iinfo(np.int64).max:
        raise FormatError(f"{name} holds {array.max()}, which is no id")
    return array.astype(np.int64)


def require_few(count: int, name: str) -> None:
    """Refuse more numbers than are ever read.

    Raises:
        FormatError: more than ``MOST_NUMBERS``.
    """
    if count > MOST_NUMBERS:
        raise FormatError(
            f"{name} has {count:,} numbers, but up to {MOST_NUMBERS:,} are read: give fewer or merged windows"
        )


def names_in(container: Iterable[Any]) -> str:
    """The first few names of a mapping, for messages."""
    found = list(container)
    shown = [repr(str(name)[:80]) for name in found[:6]]
    return ", ".join(shown + ["..."] * (len(found) > 6)) or "nothing"


def _plain_array(values: Any, name: str, kinds: str, wanted: str) -> NDArray[Any]:
    """``values`` as an array of one of numpy's ``kinds`` of dtype; ``wanted`` ends the sentence of a refusal."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        require_few(values.numel(), name)
        try:
            plain = values.detach().cpu()
            # numpy lacks bfloat16 and the 8-bit floats
            values = (plain.to(torch.float64) if plain.is_floating_point() else plain).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise FormatError(f"{name} is a tensor without plain values ({first_line(error)}): save another") from None
    elif not isinstance(values, np.ndarray | list | tuple):
        raise FormatError(f"{name} is a {type(values).__name__}; it must {wanted}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, TypeError):
        raise FormatError(f"{name} is ragged: every window and layer needs the same number of entries") from None
    require_few(array.size, name)
    if array.dtype.kind not in kinds:
        held = "numbers beyond 64 bits" if array.dtype.kind == "O" else array.dtype
        raise FormatError(f"{name} holds {held}; it must {wanted}")
    return array
