"""Measure the load: count tokens per logical expert, sum the counts over ranks, and check loads, given or counted."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_TOKENS = 1e150
"""Tokens of all windows; sums of more, and their squares, leave float64, and what cannot be added up looks even."""


def checked_load(load: Any, name: str, error: type[ValueError]) -> NDArray[np.float64]:
    """Return ``load`` (an array, tensor or nested lists, also of tensors; ``[L, E]`` or ``[T, L, E]``) as a new float64
    array ``[T, L, E]`` on the CPU; T is 1 for ``[L, E]``. Raise ``error``, with ``name`` in its message: another shape,
    empty, masked entries, not numbers, a negative, infinite or NaN entry, or numbers too large to add up."""
    if isinstance(load, np.ma.MaskedArray) and np.ma.is_masked(load):
        raise error(f"{name} has masked entries: fill them in (.filled(0) where nothing was counted)")
    layouts = "give [layers, experts] or [windows, layers, experts]"
    try:
        array = np.asarray([_on_host(one) for one in load] if isinstance(load, list | tuple) else _on_host(load))
        if array.dtype.kind == "c":
            raise TypeError
        array = array.astype(np.float64, order="C")  # sums add up in the order in which numbers lie
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise error(f"{name} is not an array of numbers: {layouts}") from None
    if array.ndim not in (2, 3) or array.size == 0:
        raise error(f"{name} has shape {array.shape}: {layouts}, not empty")
    array = array.reshape(-1, *array.shape[-2:])
    for bad, what in ((~np.isfinite(array), "not a finite number"), (array < 0, "negative")):
        if bad.any():
            window, layer, expert = np.argwhere(bad)[0]
            raise error(
                f"{name} of window {window}, layer {layer}, expert {expert} is {array[window, layer, expert]}, {what}: "
                "give token counts, zero where nothing was counted"
            )
    if array.max() > MOST_TOKENS / array.size:
        raise error(f"{name} goes up to {array.max():.3g}, too much to add up: give token counts")
    return array


def _on_host(load: Any) -> Any:
    """A tensor on the CPU, in a type that NumPy has (it has no bfloat16); anything else as it is."""
    if not hasattr(load, "detach"):
        return load
    load = load.detach().cpu()
    return load.double() if load.is_floating_point() else load
