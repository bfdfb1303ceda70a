"""Numbers out of whatever a reader found: nested lists, numpy arrays, torch tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FormatError

LoadArray = NDArray[np.float64]


def numbers(values: Any, name: str) -> LoadArray:
    """``values`` as float64, of any shape.

    Raises:
        FormatError: ragged, or no numbers; the message names ``name``.
    """
    return plain_array(values, name, "iuf", "hold numbers").astype(np.float64)


def expert_ids(values: Any, name: str) -> NDArray[np.int64]:
    """``values`` as int64 ``[layers, slots]`` of whatever ids; whether there are such experts is not looked at.

    Raises:
        FormatError: ragged, no integers, or of another shape.
    """
    array = plain_array(values, name, "iu", "be [layers, slots] of expert ids")
    if array.ndim != 2:
        raise FormatError(f"{name} must be [layers, slots] of expert ids")
    return array.astype(np.int64)


def plain_array(values: Any, name: str, kinds: str, wanted: str) -> NDArray[Any]:
    """``values`` as an array of one of numpy's ``kinds`` of dtype; ``wanted`` ends the sentence of a refusal."""
    if hasattr(values, "numpy"):
        values = values.numpy()
    try:
        array = np.asarray(values)
    except ValueError:
        raise FormatError(f"{name} is ragged: every window and layer needs the same number of entries") from None
    if array.dtype.kind not in kinds:
        raise FormatError(f"{name} holds {array.dtype}; it must {wanted}")
    return array


def names_in(container: Iterable[Any]) -> str:
    """The first few names of a mapping, for messages."""
    found = list(container)
    shown = [repr(str(name)) for name in found[:6]]
    return ", ".join(shown + ["..."] * (len(found) > 6)) or "nothing"
