"""Finds gradients, and experts between steps, that a rank scales by a factor of its own, as clipping by its own norm
does.

Such a factor leaves no trace: the average of gradients that each rank has scaled differently is the same on all of
them, and an expert has its gradient on its owners alone. So a few elements of a few gradients are sampled on the
device: after a backward pass, ahead of their reduction, after it, and after the optimizer's step. Of a few expert
parameters elements are sampled after a step and at the next forward. The next decision brings them to the host and
compares factors over ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Variable

from ...load.aggregate import HostCopy
from ...moe.experts.slices import is_sliced, local

DENSE, EXPERTS = 2, 2
"""Tensors of each kind that are sampled at a time."""
WATCHED = DENSE + EXPERTS
ARRIVED, COMPLETE, REDUCED, STEPPED, LEFT, FOUND = range(6)
"""Times at which gradients are sampled, and for the last two, experts. Between the two of each pair no rank should
change them by a factor of its own."""
WHEN = (
    "before they were reduced",
    "between their reduction and the end of the optimizer's step",
    "ahead of its forward",
)
"""The windows between those pairs, in words."""
WEIGHTS = 2
"""The window in which experts themselves are compared."""
_ELEMENTS = 32
_MOST_STEPS = 512
_UNIFORM, _UNIFORM_HALF = 1e-4, 3e-2
"""Tolerance of the ratios of elements that are multiplied by one factor; for gradients of 16 bits."""
_EQUAL, _EQUAL_HALF = 3e-6, 5e-3
"""Tolerance of factors, each of which is the mean of many elements."""
_SMALLEST = 1e-3
"""Elements that are smaller than the largest by this factor are too coarse."""
_LEAST, _LEAST_CLIPPED = 3, 12
"""Number of elements that must agree in a factor, and number that must have become no larger where they were clipped
by value. Fewer may agree by chance, as the few rows of an embedding that a batch has used."""


@dataclass(frozen=True)
class WatchedTensor:
    """A tensor that is sampled for some steps.

    Args:
        elements: number of sampled elements.
        rows: row of each element, if rows are experts; None: the tensor is the same on all ranks that compare it.
    """

    name: str
    parameter: Tensor
    elements: int
    rows: tuple[int, ...] | None


@dataclass(frozen=True)
class GradientSamples:
    """Samples of some steps.

    Args:
        elements: float32 ``[T, 6, ...]``, the elements of all sampled tensors side by side; NaN: none.
        steps: number of each step ``[T]``.
        watched: the tensors; None: there are fewer than could be sampled.
        has_halves: whether gradients of 16 bits are among them.
    """

    elements: HostCopy = field(repr=False)
    steps: tuple[int, ...]
    watched: tuple[WatchedTensor | None, ...]
    has_halves: bool

    @property
    def tolerance(self) -> float:
        """Largest difference of factors that count as equal."""
        return _EQUAL_HALF if self.has_halves else _EQUAL

    def factors(self) -> NDArray[np.float64]:
        """``[3, T, WATCHED]``, factor by which each tensor was multiplied in each window; NaN: unknown."""
        elements_T6N = self.elements.wait().numpy().astype(np.float64)
        found = np.full((len(WHEN), len(self.steps), WATCHED), np.nan)
        first, uniform = 0, _UNIFORM_HALF if self.has_halves else _UNIFORM
        for number, one in enumerate(self.watched):
            if one is None:
                continue
            here = slice(first, first + one.elements)
            first += one.elements
            for window, (before, after) in enumerate(((ARRIVED, COMPLETE), (REDUCED, STEPPED), (LEFT, FOUND))):
                before_TN, after_TN = elements_T6N[:, before, here], elements_T6N[:, after, here]
                found[window, :, number] = _factors(before_TN, after_TN, one.rows, uniform)
        return found


def _factors(
    before_TN: NDArray[np.float64], after_TN: NDArray[np.float64], rows: Sequence[int] | None, tolerance: float
) -> NDArray[np.float64]:
    """``[T]``."""
    with np.errstate(all="ignore"):
        size_TN = np.where(np.isfinite(before_TN) & np.isfinite(after_TN), np.abs(before_TN), 0.0)
        # A rank may drop its batch by zeros: that is no scaling of what others have.
        is_usable_TN = (size_TN > _SMALLEST * size_TN.max(axis=1, keepdims=True)) & (after_TN != 0)
        ratio_TN = after_TN / before_TN
        low_T = np.where(is_usable_TN, ratio_TN, np.inf).min(axis=1)
        high_T = np.where(is_usable_TN, ratio_TN, -np.inf).max(axis=1)
        found_T = np.where(is_usable_TN, ratio_TN, 0.0).sum(axis=1) / is_usable_TN.sum(axis=1)
        uniform_T = high_T - low_T <= tolerance * np.maximum(np.abs(low_T), np.abs(high_T))
        uniform_T &= is_usable_TN.sum(axis=1) >= _LEAST
    if rows is None:
        # Clipped by value: where gradients are equal, all have changed the largest element alike.
        largest_T = np.take_along_axis(ratio_TN, size_TN.argmax(axis=1)[:, None], axis=1)[:, 0]
        clipped_T = (low_T >= 0) & (high_T <= 1 + tolerance) & (is_usable_TN.sum(axis=1) >= _LEAST_CLIPPED)
        return np.where(uniform_T, found_T, np.where(clipped_T, largest_T, np.nan))
    # One expert alone may be scaled, in any slot.
    row_N = np.asarray(rows)
    several_T = np.where(is_usable_TN, row_N, -1).max(axis=1) > np.where(is_usable_TN, row_N, row_N.max()).min(axis=1)
    return np.where(uniform_T & several_T, found_T, np.nan)


class GradientSampler:
    """Samples a few elements of some gradients. No host sync; no memory is taken between two decisions.

    Args:
        dense: parameters outside the experts, by name; in the same order on all ranks that share them.
        experts: home rows ``[E/R, ...]`` by name, likewise.
        average_dense: whether the balancer averages the dense gradients; until then each rank has its own.
        steps: number of steps between two decisions; None: any number.
    """

    def __init__(
        self,
        dense: Mapping[str, Tensor],
        experts: Mapping[str, Tensor],
        average_dense: bool,
        steps: int | None,
        device: torch.device,
    ) -> None:
        self._dense, self._experts = dense, experts
        self._average_dense = average_dense
        self._most = _MOST_STEPS if steps is None else max(4, min(steps, _MOST_STEPS))
        self._selection = 0
        self._pass = -1
        self._has_arrived = False
        self._arrivals: list[weakref.ref[Tensor] | None] = []
        self._taken_away = False
        self._has_left = False
        self._row = 0
        self._numbers: dict[int, int] = {}
        self._watched: tuple[WatchedTensor | None, ...] = ()
        self._widths: list[int] = []
        self._elements = torch.empty(0, device=device)
        self._begin()
        watched: tuple[WatchedTensor | None, ...] = self._watched if average_dense else self._watched[DENSE:]
        arriving = [one.parameter for one in watched if one is not None and not is_sliced(one.parameter)]
        accumulated = _weak(self._accumulated)
        self._handles = [p.register_post_accumulate_grad_hook(accumulated) for p in arriving]

    def end(self) -> None:
        """Stop sampling."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    # -- keeping -------------------------------------------------------------------------------------------------------

    def again(self) -> None:
        """Sample gradients as arrived again: a schedule has scaled or completed them by itself."""
        if self._handles:
            self._arrived()

    def before_reduction(self) -> None:
        """Sample gradients that are about to be reduced, if new ones have arrived."""
        if not self._has_arrived:
            return
        self._has_arrived = False
        if self._taken_away:  # the loop sums them by itself: these are not the last pass's, scaled
            self._taken_away = False
            self._elements[self._row, COMPLETE].fill_(torch.nan)
        else:
            self._keep(COMPLETE)

    def reduced(self) -> None:
        """Sample reduced gradients."""
        self._keep(REDUCED)

    def stepped(self) -> None:
        """Sample gradients after an optimizer's step: changes that it made to them first are visible."""
        self._keep(STEPPED)

    def left(self) -> None:
        """Sample experts after the step and its moves: they stay as they are until the next forward."""
        self._has_left = True
        self._keep(LEFT)

    def forward_begins(self) -> None:
        """Sample experts at the first forward after a step."""
        if self._has_left and not (self._elements.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._has_left = False
            self._keep(FOUND)

    def step_is_over(self, number: int) -> None:
        """Close the step of this number."""
        self._has_arrived = self._taken_away = False
        self._numbers[self._row] = number
        self._row = (self._row + 1) % self._most
        if self._numbers.pop(self._row, None) is not None:
            self._elements[self._row].fill_(torch.nan)

    def now(self, number: int) -> GradientSamples:
        """Samples of the running step."""
        return self._samples_of(self._elements[self._row : self._row + 1], (number,))

    def take(self) -> GradientSamples:
        """Samples of all steps since the last call; other tensors are sampled from now on."""
        rows = sorted(self._numbers, key=lambda row: self._numbers[row])
        numbers = tuple(self._numbers[row] for row in rows)
        wrapped = rows != list(range(len(rows)))
        samples = self._samples_of(self._elements[rows] if wrapped else self._elements[: len(rows)], numbers)
        self._selection += 1
        self._begin()
        return samples

    def _samples_of(self, elements: Tensor, numbers: tuple[int, ...]) -> GradientSamples:
        widths = [one.parameter.element_size() for one in self._watched if one is not None]
        return GradientSamples(HostCopy(elements), numbers, self._watched, min(widths, default=4) < 4)

    def _begin(self) -> None:
        self._row, self._numbers = 0, {}
        watched = (*self._chosen(self._dense, DENSE, None), *self._chosen(self._experts, EXPERTS, 2))
        if [one and one.elements for one in watched] != [one and one.elements for one in self._watched]:
            self._widths = [one.elements for one in watched if one is not None]
            self._elements = torch.empty((self._most, FOUND + 1, sum(self._widths)), device=self._elements.device)
        self._watched = watched
        self._elements.fill_(torch.nan)

    def _chosen(self, tensors: Mapping[str, Tensor], most: int, least_rows: int | None) -> list[WatchedTensor | None]:
        """The next few tensors in rotation."""
        fit = [
            (name, p)
            for name, p in tensors.items()
            if p.requires_grad and p.numel() and (not is_sliced(p) if least_rows is None else len(local(p)) > 1)
        ]
        stride = max(1, -(-len(fit) // most))
        chosen: list[WatchedTensor | None] = []
        for name, parameter in fit[self._selection % stride :: stride][:most]:
            here = local(parameter)
            elements, per_row = min(here.numel(), _ELEMENTS), here.shape[1:].numel()
            places = [place * (here.numel() // elements) for place in range(elements)]
            rows = None if least_rows is None else tuple(place // per_row for place in places)
            chosen.append(WatchedTensor(name, parameter, elements, rows))
        return [*chosen, *[None] * (most - len(chosen))]

    @torch.compiler.disable
    def _accumulated(self, parameter: Tensor) -> None:
        """Note that a gradient has arrived; all have when the backward pass is over."""
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            self._pass = number
            Variable._execution_engine.queue_callback(self._arrived)  # type: ignore[attr-defined]

    @torch.compiler.disable
    def _arrived(self) -> None:
        gradients = [None if one is None else one.parameter.grad for one in self._watched]
        if self._has_arrived:
            before = zip(self._arrivals, gradients, strict=True)
            self._taken_away |= any(old is not None and old() is not gradient for old, gradient in before)
        self._arrivals = [None if gradient is None else weakref.ref(gradient) for gradient in gradients]
        self._has_arrived = True
        self._keep(ARRIVED)

    @torch.no_grad()
    def _keep(self, when: int) -> None:
        into, pieces = [], []
        places = self._elements[self._row, when].split(self._widths) if self._widths else ()
        number = 0
        for position, one in enumerate(self._watched):
            if one is None:
                continue
            place, number = places[number], number + 1
            if when in (LEFT, FOUND) and position < DENSE:  # ranks that have these alike compare all bits of them
                continue
            gradient = one.parameter.detach() if when in (LEFT, FOUND) else one.parameter.grad
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if when in (ARRIVED, COMPLETE) and (is_sliced(gradient) or (position < DENSE and not self._average_dense)):
                continue
            here = local(gradient) if is_sliced(gradient) else gradient
            if not here.is_contiguous() or here.device != self._elements.device:
                continue
            into.append(place)
            pieces.append(here.as_strided((one.elements,), (here.numel() // one.elements,)))
        if into:
            torch._foreach_copy_(into, pieces)


def _weak(method: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """The same as a hook that keeps nothing alive. Python's collector does not see what such hooks of tensors hold on
    to: a model that was let go of without ``close`` would stay, with its groups and its memory."""
    reference = weakref.WeakMethod(method)

    @torch.compiler.disable
    def hook(parameter: Tensor) -> None:
        if (called := reference()) is not None:
            called(parameter)

    return hook
