"""The loop of an attached model: its state, which calls are wrong in it (one table), and the parts of its steps."""

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from threading import RLock, get_ident
from typing import Self

import torch
from torch import Tensor

from ..utils.text import one_line
from .runtime import ModelTensors


class Wrong(Enum):
    """Why a call is refused; ``{what}`` is the call."""

    CLOSED = "{what} after close(): balancing has ended, and experts stay where they are; call it before close()"
    SUSPENDED = (
        "{what} while the balancer is suspended: load weights, gradients and optimizer state, then call "
        "balancer.resume() on every rank"
    )
    IN_SCHEDULE = (
        "{what} inside {schedule}: micro-batches are between their forward and their backward, for which experts must "
        "stay where they are; call it after optimizer.step() and before the next step"
    )
    IN_STEP = (
        "{what} between a backward pass and the optimizer's step, where experts have gradients: call it after "
        "optimizer.step() and before the next forward, or clear the gradients (zero_grad) first"
    )
    IN_LOGICAL_ORDER = "{what} inside logical_order(): experts stay in logical order until its end"


_MOVES = (Wrong.CLOSED, Wrong.IN_SCHEDULE, Wrong.IN_STEP, Wrong.IN_LOGICAL_ORDER)
STEP_ENDS = "the end of a training step (optimizer.step())"
CALLS: Mapping[str, tuple[Wrong, ...]] = {
    "a forward in training": (Wrong.SUSPENDED,),
    "optimizer.step()": (Wrong.SUSPENDED,),
    STEP_ENDS: (Wrong.IN_SCHEDULE, Wrong.SUSPENDED),
    "rebalance()": (Wrong.SUSPENDED, *_MOVES),
    "load_state_dict()": (Wrong.SUSPENDED, *_MOVES),
    "logical_order()": (Wrong.SUSPENDED, *_MOVES),
    "suspend()": _MOVES,
    "resume()": (),
    "plan_ahead()": (Wrong.CLOSED, Wrong.IN_SCHEDULE, Wrong.IN_LOGICAL_ORDER),
    "at_once()": (Wrong.CLOSED,),
    "gather_experts()": (Wrong.IN_SCHEDULE,),
    "adopt()": (Wrong.IN_SCHEDULE, Wrong.IN_STEP),
}
"""By the call, what it is refused in; the first is said. Others are exports and walks over the weights."""
_EXPORTS = (Wrong.CLOSED, Wrong.IN_SCHEDULE)


class LoopHooks:
    """Part of a loop. Each call comes on every rank at the same place; by itself it does nothing."""

    def refuse_if_broken(self) -> None:
        """Called ahead of each call and step, to raise if this rank failed after an agreement. Does nothing here."""

    def on_forward_begin(self, trains: bool) -> None:
        """Called when a forward of the model begins; ``trains``: for gradients of an optimizer. Does nothing here."""

    def on_forward_end(self, layers: Collection[int]) -> None:
        """Called when a forward of the model with these layers has ended, or failed. Does nothing here."""

    def before_reduce(self) -> None:
        """Called before an optimizer steps, while gradients are not reduced yet. Does nothing here."""

    def before_step(self) -> None:
        """Called before an optimizer steps, after `before_reduce`; `Gradients` reduces here. Does nothing by itself."""

    def on_step_skipped(self, optimizer: torch.optim.Optimizer) -> None:
        """Called when every rank has skipped this optimizer's step. Does nothing here."""

    def on_step_end(self) -> None:
        """Called when all optimizers have stepped, or were skipped. Does nothing here."""

    def on_moved(self) -> None:
        """Called when experts have moved, between steps. Does nothing here."""


class TensorStream(Iterator[tuple[str, Tensor]]):
    """Named tensors one after another, of which all ranks take all; as a context it ends with its block. ``experts``:
    MoE layer (of ``num_experts``) and logical expert of each tensor of experts, by name; None: all, stacked."""

    experts: Mapping[str, tuple[int, int | None]]
    num_experts: int

    def close(self, reason: str = "") -> None:
        """End the stream on this rank, without waiting for the other ranks, which learn it at their next bucket.
        ``reason``: a line for them; a loop on this rank that goes on with the stream then raises it. Abstract."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close("" if error is None else f"its consumer failed: {one_line(error, with_type=True)}")


class OpenStream(LoopHooks):
    """The stream of weights that is open on this rank; it ends when the rank goes on to something else."""

    stream: weakref.ref[TensorStream] | None = None

    def end(self, what: str) -> None:
        stream, self.stream = self.stream() if self.stream is not None else None, None
        if stream is not None:
            stream.close(f"it called {what} while its stream of weights was open")

    def before_reduce(self) -> None:
        self.end("optimizer.step()")

    def on_step_end(self) -> None:
        self.end("the end of a training step")


class LoopState:
    """The state of one loop, the same on every rank at the same place; an attribute for each kind of `Wrong`.

    Attributes:
        closed, suspended, in_logical_order: as the balancer is.
        in_schedule: the schedule of pipeline stages that runs now; empty: none.
        step: optimizer steps since attach, or as restored.
        hooks: what takes part, in this order.
    """

    def __init__(self, tensors: ModelTensors) -> None:
        self.tensors = tensors
        self.closed = self.suspended = self.in_logical_order = False
        self.in_schedule = ""
        self.step = 0
        self.hooks: list[LoopHooks] = []
        self._has_begun = False
        self._one_begins = RLock()
        self._running: set[tuple[int, frozenset[int]]] = set()

    @property
    def in_step(self) -> bool:
        return self._has_begun and self.tensors.have_gradients()

    @property
    def has_optimizer(self) -> bool:
        """Return whether an optimizer steps the model."""
        return bool(self.tensors.optimizers)

    def require(self, what: str) -> None:
        """Raise RuntimeError if this rank is broken, or the loop's state forbids the call ``what`` (`CALLS`)."""
        for hook in self.hooks:
            hook.refuse_if_broken()
        for wrong in CALLS.get(what, _EXPORTS):
            if getattr(self, wrong.name.lower()):
                raise RuntimeError(wrong.value.format(what=what, schedule=self.in_schedule))

    @torch.compiler.disable
    def begin_forward(self, layers: frozenset[int]) -> None:
        """Begin a forward, on this thread, of a model with these layers: end an earlier one that broke off, and call
        the hooks. A forward in training begins a step. RuntimeError: it trains, and the balancer is suspended."""
        self.end_broken_off(layers)
        self._running.add((get_ident(), layers))
        trains = torch.is_grad_enabled() and self.has_optimizer
        if trains:
            self.require("a forward in training")
        with self._one_begins:
            for hook in self.hooks:
                hook.on_forward_begin(trains)
            self._has_begun |= trains

    @torch.compiler.disable
    def end_forward(self, layers: frozenset[int]) -> None:
        """Call the hooks for a forward of these layers, on this thread, that has ended or failed."""
        self._running.discard((get_ident(), layers))
        for hook in self.hooks:
            hook.on_forward_end(layers)

    def end_broken_off(self, layers: frozenset[int] | None = None) -> None:
        """Call the hooks' ``on_forward_end`` for forwards of this thread that have not ended, of these layers or of
        all: a graph of torch.compile that fails calls no hook, nor does a forward that is interrupted (Ctrl-C). Ranks
        break off in different places, and must not differ in their commits."""
        for thread, of in [*self._running]:
            if thread == get_ident() and layers in (None, of):
                self.end_forward(of)

    @contextmanager
    def uninterrupted(self, schedule: str) -> Iterator[None]:
        """Set ``in_schedule`` to this name inside, so that calls which could move experts are refused: micro-batches
        are between their forward and their backward."""
        self.in_schedule = schedule
        try:
            yield
        finally:
            self.in_schedule = ""

    def before_step(self) -> None:
        """Call the hooks ahead of an optimizer's step; gradients are reduced. RuntimeError: suspended."""
        self.require("optimizer.step()")
        for hook in self.hooks:
            hook.before_reduce()
        for hook in self.hooks:
            hook.before_step()

    def end_step(self) -> None:
        """Close a training step, so that none has begun: end forwards that broke off, and call the hooks, which count,
        decide and move. RuntimeError: inside a schedule, or suspended."""
        self.require(STEP_ENDS)
        self.end_broken_off()
        self._has_begun = False
        for hook in self.hooks:
            hook.on_step_end()

    def skip_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the hooks that every rank skipped this optimizer's step."""
        for hook in self.hooks:
            hook.on_step_skipped(optimizer)

    def pass_over_step(self) -> None:
        """Forget the training step that has begun, without the hooks: it was skipped, or balancing has ended."""
        self._has_begun = False

    def on_moved(self) -> None:
        """Tell the hooks that experts have moved."""
        for hook in self.hooks:
            hook.on_moved()
