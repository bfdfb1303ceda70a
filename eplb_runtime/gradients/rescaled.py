"""Notices gradients that a rank changes by its own measure before they are averaged, as clipping by its own norm does.

The average of what each rank has scaled otherwise is the same on all of them, and says nothing any more. So a few
elements are kept when a backward pass leaves them, and looked at again ahead of averaging.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

WATCHED = 4
"""Tensors that are watched."""
_ELEMENTS = 256
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 3e-2
"""Of factors that are meant to be equal; for gradients of 16 bits."""


class Arrived:
    """What backward passes have left in the gradients of some parameters.

    Args:
        parameters: by name, in the same order on all ranks that share them.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        trained = [(name, p) for name, p in parameters.items() if p.requires_grad and not isinstance(p, DTensor)]
        self._watched = dict(trained[:: max(1, -(-len(trained) // WATCHED))])
        self._pieces: dict[str, Tensor] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
            for name, parameter in self._watched.items()
        ]
        self.names = tuple(self._watched)

    def end(self) -> None:
        """Watch no longer."""
        for handle in self._handles:
            handle.remove()

    def again(self) -> None:
        """Whoever made the gradients has scaled or completed them by itself: what is there now is what arrived."""
        for name, parameter in self._watched.items():
            self._take(name, parameter)

    def forget(self) -> None:
        """A step is over."""
        self._pieces.clear()

    def factors(self) -> tuple[float, ...]:
        """By how much the largest element of each has changed since it arrived; NaN where that says nothing. Empty: no
        gradient has arrived since this was asked."""
        pieces, self._pieces = self._pieces, {}
        return tuple(self._factor(pieces.get(name), p.grad) for name, p in self._watched.items()) if pieces else ()

    @torch.compiler.disable
    def _take(self, name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and not parameter.grad.is_sparse:
            self._pieces[name] = _piece(parameter.grad).clone()

    def _factor(self, before: Tensor | None, gradient: Tensor | None) -> float:
        if before is None or gradient is None or not before.numel():
            return math.nan
        place = before.abs().argmax()
        then, now = float(before[place]), float(_piece(gradient)[place])
        # A rank may drop its batch by zeros: that is no scaling of what others have.
        return now / then if then and now else math.nan


def other_factors(factors_of_rank: Mapping[int, Sequence[float]], dtype: torch.dtype) -> tuple[int, int, int] | None:
    """The first tensor that two ranks have changed by other factors: its position and those ranks."""
    tolerance = _TOLERANCE if dtype.itemsize >= 4 else _TOLERANCE_HALF
    for position in range(WATCHED):
        known = {
            rank: factors[position]
            for rank, factors in factors_of_rank.items()
            if position < len(factors) and math.isfinite(factors[position])
        }
        if known:
            low, high = min(known, key=lambda rank: known[rank]), max(known, key=lambda rank: known[rank])
            if known[high] - known[low] > tolerance * max(abs(known[high]), abs(known[low])):
                return position, min(low, high), max(low, high)
    return None


def _piece(gradient: Tensor) -> Tensor:
    flat = gradient if gradient.is_contiguous() else gradient[:1]
    return flat.detach().reshape(-1)[:_ELEMENTS]
