"""Steps one expert of each tensor alone, beside the optimizer's own step, and compares what comes of both.

An optimizer may mix experts late (a warm-up, a trust ratio, clipping inside of it that bites one day), for real shapes
alone, or by an option of one param group; or keep something for them where nobody sees it. So in a step that ends in a
decision, and in one more at a place that changes from interval to interval, one row of parameter, gradient and state is
stepped by an optimizer that is made anew for it, and some elements of the result are compared, to rounding, with what
became of that row among the others. The training thread does not wait for any of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...load.aggregate import HostCopy
from ...utils.errors import one_line
from .made_anew import Arguments, copied, is_plain, made_anew, step_of, unnoticed
from .optimizer_state import is_per_expert
from .slices import is_sliced
from .unmoved import unmoved

logger = logging.getLogger("eplb_runtime")

_ELEMENTS = 256
"""Of a row that are compared, from a place that moves on from time to time."""
_AT_ONCE_BYTES = 256 << 20
"""Rows, with their state, that are copied at once."""
_ULPS = 3
"""Of an element by which both may differ, beside a share of the largest change in the row."""
_CHANGE, _CHANGE_HALF = 2e-4, 2e-2
"""That share; for what is kept in 16 bits, or comes of it."""
_GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, come near every place."""
_MOST_DEVIATIONS = 8
"""Steps of single experts that are kept until a decision judges them."""
LONE_STEP_INTERVAL = 50
"""Steps between looks at single experts' steps where decisions have no interval."""


class SingleStepError(Exception):
    """No single row can be taken from this optimizer's state, or put back to it."""


@dataclass(frozen=True)
class Deviation:
    """Elements of rows, on their way to the host.

    Args:
        optimizer: its class.
        names: of the tensors, and of what of their state.
        sizes: how many elements of each.
        rounding: of each, in shares of an element and of the largest change.
        elements: ``[4, N]``: before the step, after a step alone, after its repetition, and among the other rows.
    """

    optimizer: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rounding: tuple[tuple[float, float], ...]
    elements: HostCopy = field(repr=False)

    def judged(self) -> tuple[str, bool]:
        """The first tensor that differs, empty if none does; whether the step alone repeats itself. Waits."""
        ends = np.cumsum(self.sizes)[:-1]
        parts = np.split(self.elements.wait().numpy().astype(np.float64), ends, axis=1)
        found = ""
        for name, (before, alone, again, among), rounding in zip(self.names, parts, self.rounding, strict=True):
            if differ(alone, again, before, rounding):
                return "", False
            if not found and differ(alone, among, before, rounding):
                found = name
        return found, True


def differ(
    one: NDArray[np.float64], other: NDArray[np.float64], before: NDArray[np.float64], rounding: tuple[float, float]
) -> bool:
    """Whether two results of one step differ by more than rounding.

    Args:
        rounding: shares of an element, and of the largest change, by which they may.
    """
    with np.errstate(all="ignore"):
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        change = np.abs(np.where(np.isfinite(one), one - before, 0.0)).max(initial=0.0)
        most = rounding[0] * np.maximum(np.abs(one), np.abs(other)) + rounding[1] * change
        return bool((~same & ~(np.abs(one - other) <= most)).any())


def rounding_of(*dtypes: torch.dtype) -> tuple[float, float]:
    """For `differ`: of what is kept in the first dtype, and comes of the others."""
    eps = torch.finfo(dtypes[0]).eps
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    return _ULPS * eps, _CHANGE if coarsest <= torch.finfo(torch.float32).eps else _CHANGE_HALF


def is_due(step: int, interval: int) -> bool:
    """Whether single experts are stepped in this step, the first of which is 0.

    An optimizer that mixes experts in each k-th step may never do so in one that ends in a decision.
    """
    number, place = divmod(step, interval)
    return place in (interval - 1, int(number * _GOLDEN % 1 * interval))


class LoneSteps:
    """Steps experts of one model on one rank alone.

    Args:
        parameters: this rank's experts ``[E/R, ...]`` by name.
        registered: addresses of memory that moves with experts by itself.
        is_due: whether the running step is one to look at; the first step of an optimizer is in any case.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        registered: Callable[[], Collection[int]],
        is_due: Callable[[], bool],
    ) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._registered = registered
        self._is_due = is_due
        self._step_number = 0
        self._begun: set[int] = set()
        self._cannot: set[int] = set()
        self._running: dict[int, _Step] = {}
        self._deviation: dict[int, list[Deviation]] = {}
        self._stays: dict[int, str] = {}

    def forget(self, optimizer: object) -> None:
        """It steps the model no longer."""
        key = id(optimizer)
        self._begun.discard(key)
        self._cannot.discard(key)
        for pop in (self._running.pop, self._deviation.pop, self._stays.pop):
            pop(key, None)

    def why_not_moved(self, optimizers: Sequence[object]) -> str:
        """What of their state, as far as it is seen, would stay behind; empty: nothing."""
        registered = self._registered()
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                said = next((one.said for one in unmoved(optimizer, self._of(optimizer), registered) if one.said), "")
                if said:
                    return f"{said}; experts stay where they are"
        return ""

    # -- around a step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, call: Arguments) -> None:
        """Its step begins; gradients are what it will see, unless a closure makes them."""
        key = id(optimizer)
        if self._running.pop(key, None) is not None:  # a step inside of a step: what becomes of which?
            self._cannot.add(key)
        if key in self._cannot or not (key not in self._begun or self._is_due()):
            return
        self._begun.add(key)
        # What moves by itself, in the optimizer's attributes, is not handed over to one that is made anew.
        if next(unmoved(optimizer, self._of(optimizer), self._registered()), None) is not None:
            return
        with self._or_never_again(optimizer):
            step = _Step(optimizer, self._rows(optimizer, call.closure is not None), self._step_number, call)
            if call.closure is not None:
                step.keep()
            else:
                step.run()
            self._running[key] = step

    @torch.no_grad()
    def gradients_are_there(self, optimizer: torch.optim.Optimizer, loss: Any) -> None:
        """A closure has made them, inside the step."""
        step = self._running.get(id(optimizer))
        if step is not None and not step.take_gradients(loss):
            del self._running[id(optimizer)]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """It has stepped."""
        step = self._running.pop(id(optimizer), None)
        if step is None:
            return
        self._step_number += 1
        with self._or_never_again(optimizer):
            apart = step.compared()
            if apart is not None:
                kept = self._deviation.setdefault(id(optimizer), [])
                kept.append(apart)
                del kept[:-_MOST_DEVIATIONS]  # decisions may be rare, or never come

    def take(self) -> dict[int, list[Deviation]]:
        """What was stepped since the last time, by the optimizer's id."""
        taken, self._deviation = self._deviation, {}
        return taken

    def judge(self, taken: Mapping[int, Sequence[Deviation]]) -> str:
        """Why experts must stay where they are; empty: they may move. Waits; on any thread."""
        for key, apart in ((key, apart) for key, several in taken.items() for apart in several):
            name, repeats = apart.judged()
            if not repeats and key not in self._cannot:
                self._cannot.add(key)
                logger.warning(
                    "a step of %s gives something else when it is repeated (random rounding, noise), so nobody can "
                    "tell whether it updates each expert by itself; experts move all the same",
                    apart.optimizer,
                )
            elif name:
                self._stays[key] = (
                    f"{apart.optimizer} does not update each expert of {name} by itself: alone it comes to something "
                    "else, by more than rounding (a norm over several, or something kept for them out of sight), so "
                    "placement would change the result: experts stay where they are; use an element-wise optimizer"
                )
        return next(iter(self._stays.values()), "")

    # -- choosing ------------------------------------------------------------------------------------------------------

    def _of(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {
            self._names[id(parameter)]: parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self._names
        }

    def _rows(self, optimizer: torch.optim.Optimizer, has_closure: bool) -> list[_Row]:
        """One of each tensor, another from time to time."""
        rows: list[_Row] = []
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                name, gradient = self._names.get(id(parameter)), parameter.grad
                if name is None or is_sliced(parameter) or not parameter.requires_grad or not parameter.numel():
                    continue
                if has_closure or (gradient is not None and gradient.layout is torch.strided):
                    rows.append(_Row(name, parameter, number, (self._step_number + len(rows)) % len(parameter)))
        return rows

    @contextmanager
    def _or_never_again(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A failure inside is no reason to end a training."""
        try:
            yield
        except Exception as error:
            self._cannot.add(id(optimizer))
            logger.warning(
                "%s cannot step one expert alone (%s): make sure that it updates each expert by itself, or placement "
                "changes the result",
                type(optimizer).__name__,
                one_line(error),
            )


@dataclass(frozen=True)
class _Row:
    """One expert of a tensor, and the param group that this is in."""

    name: str
    parameter: Tensor
    group: int
    number: int

    def of(self, tensor: Tensor) -> Tensor:
        """``[1, ...]``, the live memory."""
        return tensor.detach()[self.number : self.number + 1]

    def of_state(self, key: str, value: Any) -> Any:
        """A copy of what is kept for this row, of what is kept for the tensor."""
        if isinstance(value, dict | list):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            inner = {place: self.of_state(f"{key}[{place!r}]", one) for place, one in items}
            return inner if isinstance(value, dict) else list(inner.values())
        if isinstance(value, Tensor) and is_per_expert(key, value, self.parameter):
            return self.of(value).clone()
        if not is_plain(value):
            raise SingleStepError(f"it keeps {key!r} as a {type(value).__name__}")
        return copied(value)


@dataclass
class _Lone:
    """One of two optimizers that are made anew for the same rows."""

    optimizer: torch.optim.Optimizer
    tensors: Sequence[Tensor]

    def step(self, gradients: Sequence[Tensor | None], closure: Callable[[], Any] | None, call: Arguments) -> None:
        call = call.copied()

        def again() -> Any:
            for tensor, gradient in zip(self.tensors, gradients, strict=True):
                tensor.grad = None if gradient is None else gradient.clone()
            return closure() if closure is not None else None

        if closure is None:
            again()
        else:
            call = call.with_closure(again)
        step_of(self.optimizer)(*call.positional, **call.named)

    def found(self, number: int, key: str) -> Tensor | None:
        """A tensor, or what is kept for it."""
        tensor = self.tensors[number]
        found = self.optimizer.state.get(tensor, {}).get(key) if key else tensor
        return found if isinstance(found, Tensor) else None

    def let_go(self) -> None:
        """Leave nothing in the optimizer: its constructor may have put it on a list that lives on."""
        own = set(map(id, self.tensors))
        for group in self.optimizer.param_groups:
            group["params"] = [one for one in group["params"] if id(one) not in own]
        for tensor in self.tensors:
            self.optimizer.state.pop(tensor, None)

    def keys(self, number: int) -> list[str]:
        """Of what is kept by row, in numbers that may be compared."""
        tensor = self.tensors[number]
        return [
            key
            for key, value in self.optimizer.state.get(tensor, {}).items()
            if isinstance(value, Tensor) and value.shape == tensor.shape and value.is_floating_point()
        ]


class _Step:
    """One step of an optimizer, and of the same for single rows.

    Args:
        turn: where in a row elements are compared.
        call: of the optimizer's own step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, rows: Sequence[_Row], step_number: int, call: Arguments
    ) -> None:
        if odd := [value for value in call.others if not is_plain(value)]:
            raise SingleStepError(f"its step is given a {type(odd[0]).__name__}")
        self._optimizer = optimizer
        self._call = call
        self._rows = rows
        self._step_number = step_number
        self._places: list[tuple[_Row, str, int]] = []
        self._elements: list[tuple[Tensor, Tensor, Tensor]] = []
        self._copies: tuple[_Lone, _Lone] | None = None
        self._gradients: list[Tensor | None] | None = None
        self._loss: Any = None

    def run(self) -> None:
        """Step the rows alone, a portion at a time; their gradients are there."""
        for rows in self._portions():
            gradients = [row.of(row.parameter.grad).clone() for row in rows]  # type: ignore[arg-type]
            self._step(rows, self._made(rows), gradients, None)

    def keep(self) -> None:
        """Copy rows as they are; their gradients come inside the step, which may change them before."""
        self._rows = next(self._portions(), [])
        self._copies = self._made(self._rows) if self._rows else None

    def take_gradients(self, loss: Any) -> bool:
        """Copy those that a closure has made; False: not for the first time, and this cannot be repeated."""
        if self._gradients is not None:
            return False
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss
        all_grads = [(row, row.parameter.grad) for row in self._rows]
        self._gradients = [None if grad is None else row.of(grad).clone() for row, grad in all_grads]
        return True

    def compared(self) -> Deviation | None:
        """What has become of the rows; None: none was stepped."""
        if self._copies is not None and self._gradients is not None:
            self._step(self._rows, self._copies, self._gradients, lambda: self._loss)
        if not self._places:
            return None
        among = [self._some(row.of(self._now(row, key))) for row, key, _ in self._places]
        before, alone, again = (torch.cat(ones) for ones in zip(*self._elements, strict=True))
        dtypes = [
            (self._now(row, key).dtype, row.parameter.dtype, *self._of_state(row)) for row, key, _ in self._places
        ]
        return Deviation(
            type(self._optimizer).__name__,
            tuple(f"{row.name} ({key})" if key else row.name for row, key, _ in self._places),
            tuple(size for _, _, size in self._places),
            tuple(rounding_of(*of_one) for of_one in dtypes),
            HostCopy(torch.stack([before, alone, again, torch.cat(among).to(alone.dtype)])),
        )

    def _of_state(self, row: _Row) -> list[torch.dtype]:
        gradient = row.parameter.grad
        state = self._optimizer.state.get(row.parameter, {}).values()
        kept = [one.dtype for one in state if isinstance(one, Tensor) and one.is_floating_point()]
        return kept if gradient is None else [*kept, gradient.dtype]

    def _now(self, row: _Row, key: str) -> Tensor:
        found = self._optimizer.state[row.parameter].get(key) if key else row.parameter
        if not isinstance(found, Tensor) or found.shape != row.parameter.shape:
            raise SingleStepError(f"it keeps {key!r} for one expert alone, and not for several")
        return found

    def _portions(self) -> Iterator[list[_Row]]:
        portion: list[_Row] = []
        nbytes = 0
        for row in self._rows:
            state = self._optimizer.state.get(row.parameter, {}).values()
            tensors = [row.parameter, row.parameter, *(one for one in state if isinstance(one, Tensor) and one.ndim)]
            mine = 2 * sum(one.nbytes for one in tensors) // len(row.parameter)
            if portion and nbytes + mine > _AT_ONCE_BYTES:
                yield portion
                portion, nbytes = [], 0
            portion.append(row)
            nbytes += mine
        if portion:
            yield portion

    def _made(self, rows: Sequence[_Row]) -> tuple[_Lone, _Lone]:
        with unnoticed(_gpus(rows)):
            return self._one(rows), self._one(rows)

    def _one(self, rows: Sequence[_Row]) -> _Lone:
        tensors = [row.of(row.parameter).clone().requires_grad_() for row in rows]
        groups = [
            (
                self._optimizer.param_groups[number],
                [t for row, t in zip(rows, tensors, strict=True) if row.group == number],
            )
            for number in sorted({row.group for row in rows})
        ]
        made = made_anew(self._optimizer, groups).optimizer
        for row, tensor in zip(rows, tensors, strict=True):
            state = self._optimizer.state.get(row.parameter)
            if state:
                made.state[tensor] = {key: row.of_state(str(key), value) for key, value in state.items()}
        return _Lone(made, tensors)

    def _step(
        self,
        rows: Sequence[_Row],
        pair: tuple[_Lone, _Lone],
        gradients: Sequence[Tensor | None],
        closure: Callable[[], Any] | None,
    ) -> None:
        one, other = pair
        old = {
            (number, key): self._some(found).clone()
            for number in range(len(rows))
            for key in ("", *one.keys(number))
            if (found := one.found(number, key)) is not None
        }
        with unnoticed(_gpus(rows)):
            for lone in pair:
                lone.step(gradients, closure, self._call)
        before, alone, again = [], [], []
        for number, row in enumerate(rows):
            for key in ("", *one.keys(number)):
                first, second = one.found(number, key), other.found(number, key)
                if first is None or second is None or first.shape != second.shape:
                    raise SingleStepError(f"it keeps {key!r} at one time, and not at another")
                alone.append(self._some(first))
                again.append(self._some(second))
                before.append(old.get((number, key), torch.zeros_like(alone[-1])))
                self._places.append((row, key, len(alone[-1])))
        dtype = torch.float64 if any(some.dtype is torch.float64 for some in alone) else torch.float32
        self._elements.append(tuple(torch.cat(some).to(dtype) for some in (before, alone, again)))  # type: ignore[arg-type]
        for lone in pair:
            lone.let_go()

    def _some(self, row: Tensor) -> Tensor:
        """Elements of a row ``[1, ...]``, the same of all rows of a shape."""
        flat = row.detach().reshape(-1)
        stride = max(1, flat.numel() // _ELEMENTS)
        return flat[self._step_number % stride :: stride][:_ELEMENTS]


def _gpus(rows: Sequence[_Row]) -> list[int]:
    device = rows[0].parameter.device
    return [device.index] if device.type == "cuda" else []
