"""Numbers out of what a reader found: nested lists, numpy arrays, torch tensors; counted before they are unpacked."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from .errors import FormatError, first_line

if TYPE_CHECKING:
    from torch import Tensor

LoadArray = NDArray[np.float64]

MOST_NUMBERS = 2**28
"""So many numbers are taken from one array: 18,000 windows of 58 layers x 256 experts, 2 GiB as float64."""
MOST_LISTED = 2**26
"""So many from nested lists, which take some ten times the memory."""
MOST_EXPERTS = 1 << 16
"""Experts of a layer: larger ids are none of it."""
MOST_LEVELS = 8
"""Lists in lists in lists ...: an array of ours has three."""


def numbers(values: Any, name: str) -> LoadArray:
    """``values`` as float64, of any shape.

    Raises:
        FormatError: ragged, no numbers, or too many; the message names ``name``.
    """
    return _plain_array(values, name, "iuf", "hold numbers").astype(np.float64)


def expert_ids(values: Any, name: str, shape: tuple[str, ...] = ("layers", "slots")) -> NDArray[np.int64]:
    """``values`` as int64 of whatever ids; whether there are such experts is not looked at.

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
    if _is_tensor(values):
        values = _from_tensor(values, name, wanted)
    elif isinstance(values, np.ndarray):
        require_few(values.size, name)
    elif isinstance(values, list | tuple):
        if count_listed(values, name, wanted) > MOST_LISTED:
            raise FormatError(f"{name} lists more than {MOST_LISTED:,} numbers: give an array, as .npz holds")
    else:
        raise FormatError(f"{name} is a {type(values).__name__}; it must {wanted}")
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError):
        raise FormatError(f"{name} is ragged: every window and layer needs the same number of entries") from None
    if array.dtype.kind not in kinds:
        raise FormatError(f"{name} holds {_dtype_words(array.dtype)}; it must {wanted}")
    return array


def count_listed(values: Any, name: str, wanted: str = "hold numbers") -> int:
    """How many numbers nested lists hold when each mention of a list counts, as it does in an array.

    A file may mention one list many times over, and a list of such lists again, so that few bytes stand for more
    numbers than any memory holds; here each list is looked at once.

    Raises:
        FormatError: something else than numbers, a list that holds itself, or lists nested deeper than an array can be.
    """
    counted: dict[int, int] = {}
    open_lists: list[Any] = [values]
    entered: set[int] = set()
    while open_lists:
        current = open_lists[-1]
        kinds = set(map(type, current)) - {int, float}
        if kinds - {list, tuple}:
            held = min(kind.__name__ for kind in kinds - {list, tuple})
            raise FormatError(f"{name} holds {held}; it must {wanted}")
        inner = [entry for entry in current if isinstance(entry, list | tuple)] if kinds else []
        unseen = {id(entry): entry for entry in inner if id(entry) not in counted}
        if unseen:
            if id(current) in entered or len(entered) >= MOST_LEVELS:
                raise FormatError(f"{name} is nested too deep to be an array")
            entered.add(id(current))
            open_lists.extend(unseen.values())
        else:
            open_lists.pop()
            entered.discard(id(current))
            counted[id(current)] = len(current) - len(inner) + sum(counted[id(entry)] for entry in inner)
    return counted[id(values)]


def _is_tensor(values: Any) -> TypeGuard[Tensor]:
    torch = sys.modules.get("torch")  # else nobody can have made one
    return torch is not None and isinstance(values, torch.Tensor)


def _from_tensor(tensor: Tensor, name: str, wanted: str) -> NDArray[Any]:
    """A tensor's numbers; bfloat16 and the 8-bit floats, which numpy lacks, as float64."""
    import torch

    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "meta" if tensor.is_meta else str(tensor.layout).removeprefix("torch.")
        raise FormatError(f"{name} is a {kind} tensor without plain values: save a dense one")
    require_few(tensor.numel(), name)
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise FormatError(f"{name} holds {str(tensor.dtype).removeprefix('torch.')}; it must {wanted}")
    try:
        plain = tensor.detach().cpu()
        return (plain.to(torch.float64) if plain.is_floating_point() else plain).numpy()
    except (RuntimeError, TypeError) as error:
        raise FormatError(f"{name} holds {tensor.dtype}; it must {wanted} ({first_line(error)})") from None


def _dtype_words(dtype: np.dtype[Any]) -> str:
    return "numbers beyond 64 bits" if dtype.kind == "O" else str(dtype)
