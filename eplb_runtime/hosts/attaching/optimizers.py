"""Optimizers and the balancer: gradients are ready before each steps, and a training step ends when all have.

Who steps the model's parameters must be known here, since gradients are reduced ahead of it. Another optimizer that
holds one of them is refused at its first step, wherever and whenever it was made.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet, finalize

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...balancer.balancer import Balancer
from ...balancer.loop_state import LoopHooks, LoopState
from ...moe.experts.optimizer_state import OptimizerStateError, check_elementwise
from .description import AnyOptimizer, AttachError, unwrapped
from .state_hooks import mark_optimizer, order_optimizer


def why_not_stepped(
    optimizer: torch.optim.Optimizer, experts: Collection[int] | None, *, each: bool, known: bool
) -> str:
    """Return why an optimizer cannot step the experts of a model, or "": it can. Parameters are those of
    `check_elementwise`, which may try it on small tensors. An optimizer that steps another attached model cannot."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    if any(isinstance(getattr(getattr(hook, "func", None), "__self__", None), Optimizers) for hook in hooks):
        kind = type(optimizer).__name__  # it would take that model's experts for dense
        return f"this {kind} steps an attached model already: adopt each once, and give each model one of its own"
    try:
        check_elementwise(optimizer, experts, each=each, known=known)
    except OptimizerStateError as error:
        return str(error)
    return ""


def held_by(optimizers: Iterable[AnyOptimizer]) -> Counter[int]:
    """Return how often each parameter is in a parameter group of these optimizers, by the parameter's ``id()``."""
    return Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])


@dataclass(eq=False)
class _Stepper:
    """An optimizer of the model, or what steps several in one step of its own. ``held``: its number of parameters.
    ``outside``: those outside the model, by a name for messages. ``depth``: of its steps that run now: one may call
    that of its base, for which torch calls hooks, too. ``turns``: how often it has stepped, or was passed over.
    ``stepped``: whether it has, in this training step; None: neither yet."""

    optimizer: AnyOptimizer
    held: int
    outside: dict[str, Tensor] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    depth: int = 0
    turns: int = 0
    stepped: bool | None = None


class Optimizers(LoopHooks):
    """Those that step one attached model, whose parameters are given by name, experts as they are here. Where
    gradients are averaged, others are refused after `close`, too, until this is gone or ``let_strangers_step()``."""

    def __init__(self, balancer: Balancer, parameters: Mapping[str, Tensor]) -> None:
        self._balancer = balancer
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        layers = balancer.layer_of_parameter
        self._experts = {number: name for number, name in self._names.items() if name in layers}
        self._known: list[_Stepper] = []
        self._let_alone: WeakSet[torch.optim.Optimizer] = WeakSet()
        ask = WeakMethod(self._refuse_strangers)  # torch's table lives as long as the process; a model need not

        def before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (refuse := ask()) is not None:
                refuse(optimizer)

        self.let_strangers_step = finalize(self, register_optimizer_step_pre_hook(before_any_step).remove)
        balancer.loop.hooks.append(self)

    # -- which optimizers ----------------------------------------------------------------------------------------------

    def add(self, optimizers: Sequence[AnyOptimizer], container: torch.optim.Optimizer | None = None) -> None:
        """Hook optimizers that were checked: gradients are reduced before a step, and the balancer steps when all have
        stepped. Their state of experts moves along, and their state dicts name it. With ``container``, which steps them
        all in one step of its own, only its steps are hooked."""
        for optimizer in optimizers:
            if container is None:
                self._hook(optimizer)
            elif isinstance(optimizer, torch.optim.Optimizer):
                self._let_alone.add(optimizer)
                self._balancer.tensors.train(optimizer, {})
                if self._balancer.runtime.job.divided_rows:  # the framework saves it
                    order_optimizer(optimizer, self._experts, self._balancer)
        if container is not None:
            self._balancer.tensors.train_outside(self._outside(self._know(container)))

    def adopt(self, optimizer: torch.optim.Optimizer, instead_of: torch.optim.Optimizer | None = None) -> None:
        """Check and hook an optimizer; unhook ``instead_of`` and drop a pending plan. AttachError: it is refused."""
        config, tensors, why = self._balancer.config, self._balancer.tensors, ""
        optimizer, instead_of = unwrapped(optimizer), unwrapped(instead_of)
        old = next((one for one in self._known if one.optimizer is instead_of), None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            why = (
                f"a {type(optimizer).__name__} is no torch.optim.Optimizer, and only those are taken over: call attach "
                "after it was made, with the model as it is trained (Megatron: wrapped in DistributedDataParallel)"
            )
        elif config.replica_slots and not self._known:
            why = (
                "the model was attached without an optimizer and with replica slots, which gather no gradients then: "
                "give the optimizer to attach, or use replica_slots=0"
            )
        elif instead_of is not None and (old is None or not old.hooks or instead_of not in tensors.optimizers):
            why = (
                f"instead_of is a {type(instead_of).__name__} that was not given to attach or adopt by itself: give "
                "the optimizer that was; to replace a framework's own, call balancer.close() and attach again"
            )
        elif old is not None and any(one.stepped is not None for one in self._known):
            why = (
                "adopt(..., instead_of=...) in the middle of a training step, in which some optimizers have stepped "
                "and others not: call it when all have"
            )
        else:
            each = self._balancer.runtime.registry.has_slots
            why = why_not_stepped(optimizer, self._experts, each=each, known=config.elementwise)
            held = held_by([*(one.optimizer for one in self._known if one is not old), optimizer])
            if not why and (twice := [name for key, name in self._names.items() if held[key] > 1]):
                why = (
                    f"{twice[0]} is in several optimizers: give each parameter to one, and let go the one that "
                    "this replaces: balancer.adopt(optimizer, instead_of=old)"
                )
        if why:
            raise AttachError(why)
        if old is not None:
            self._balancer.rebalancer.cancel_pending()  # it has the state of the old one
            for handle in old.hooks:  # its step is refused from here on
                handle.remove()
            tensors.forget(old.optimizer, old.outside)
        self._hook(optimizer, old)

    def _know(self, optimizer: AnyOptimizer, old: _Stepper | None = None) -> _Stepper:
        """Under the number of the one that was let go, or a new one."""
        number, one = self._known.index(old) if old else len(self._known), _Stepper(optimizer, _count(optimizer))
        if isinstance(optimizer, torch.optim.Optimizer):
            after = optimizer.register_step_post_hook(partial(self._after_step, one))
            # A user's own of before may evaluate, save or move: the training step is over then.
            optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
            one.hooks = [optimizer.register_step_pre_hook(partial(self._before_step, one)), after]
        self._known[number : number + 1] = [one]
        return one

    def _hook(self, optimizer: AnyOptimizer, old: _Stepper | None = None) -> None:
        balancer, one = self._balancer, self._know(optimizer, old)
        balancer.tensors.train(optimizer, self._outside(one))
        if isinstance(optimizer, torch.optim.Optimizer):
            saves = order_optimizer if balancer.runtime.job.divided_rows else mark_optimizer  # or the framework does
            one.hooks += saves(optimizer, self._experts, balancer)
            return

        def before() -> None:
            balancer.loop.before_step()
            one.depth = 1

        began, layers = balancer.placement.digest(), balancer.layer_of_parameter
        undo = optimizer.join(
            before,
            partial(self._after_step, one),
            balancer.gradients.square_of_experts,
            lambda: balancer.placement.with_epoch(0).digest() != began,
            lambda parameter: balancer.logical_expert_ids(layers[self._experts[id(parameter)]]),
        )
        balancer.closing.callback(undo.remove)

    def _outside(self, one: _Stepper) -> dict[str, Tensor]:
        one.outside = {
            f"parameter {index} of group {group_number} of optimizer {self._known.index(one)}": parameter
            for group_number, group in enumerate(one.optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in self._names
        }
        return one.outside

    def register_added(self) -> None:
        """If ``add_param_group`` was called since the last time, wait for all ranks, and register new parameters that
        are in no attached model as equal on all ranks."""
        for one in self._known:
            if (held := _count(one.optimizer)) != one.held:
                # On one rank alone the average of gradients would be over other tensors than on the others.
                self._balancer.runtime.barrier(f"add_param_group of a {type(one.optimizer).__name__}")
                one.held = held
                self._balancer.tensors.train_outside(self._outside(one))

    before_reduce = register_added

    @torch.compiler.disable
    def _refuse_strangers(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before any optimizer of the process steps."""
        # An optimizer may step others inside, as wrappers of optimizers do.
        if optimizer in self._let_alone or any(one.depth or one.optimizer is optimizer for one in self._known):
            return
        if self._balancer.closed and not self._balancer.gradients.averaged:
            return  # all that is left to do is done in the backward pass
        held = held_by([optimizer])
        for name in (name for key, name in self._names.items() if held[key]):
            raise RuntimeError(
                f"a {type(optimizer).__name__} that the balancer does not know steps {name} of the attached model, "
                "with gradients that are not reduced: give all optimizers to attach(model, [first, second]), or one "
                "that is made later to balancer.adopt(optimizer), with instead_of=old where it replaces one"
            )
        self._let_alone.add(optimizer)

    # -- their steps ---------------------------------------------------------------------------------------------------

    @torch.compiler.disable
    def _before_step(
        self, one: _Stepper, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reduce gradients before the step, or, where a closure makes them inside it, after each call of that."""
        if one.depth:
            one.depth += 1
            return None
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "optimizer.step() inside a backward pass (from a gradient hook), where gradients of other parameters "
                "are still to come and none are reduced: step after backward()"
            )
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._balancer.loop.before_step()
            one.depth = 1
            return None

        def reduced() -> Any:
            depth, loss = one.depth, closure()
            one.depth = depth  # its forward is inside of this step
            self._balancer.gradients.on_step_end()
            self._balancer.loop.before_step()
            return loss

        one.depth = 1
        if "closure" in kwargs:
            return args, {**kwargs, "closure": reduced}
        return (args[0], reduced, *args[2:]), kwargs

    def on_forward_begin(self, trains: bool) -> None:
        """Forget optimizer steps that raised, if the forward ``trains``: none is running any more."""
        for one in self._known if trains else ():
            one.depth = 0

    @contextmanager
    def around_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Enclose a step that a gradient scaler may skip on all ranks. If the optimizer does not step inside, the loop
        is told that it was skipped. The training step ends when all optimizers have stepped or were skipped."""
        one = next((one for one in self._known if one.optimizer is optimizer), None)
        before = one.turns if one is not None else 0
        yield
        if one is not None and one.turns == before:
            self._balancer.loop.skip_step(optimizer)
            self._end_of_turn(one, stepped=False)

    @torch.compiler.disable
    def _after_step(self, one: _Stepper, *_: Any) -> None:
        one.depth = max(0, one.depth - 1)
        if not one.depth:
            self._end_of_turn(one, stepped=True)

    def _end_of_turn(self, one: _Stepper, *, stepped: bool) -> None:
        """A training step ends when each optimizer has had its turn; if all were passed over, it was none."""
        one.turns += 1
        if one.stepped is not None:
            others = [str(number) for number, other in enumerate(self._known) if other.stepped is None]
            raise RuntimeError(
                f"optimizer {self._known.index(one)} of the attached ones has stepped twice, number "
                f"{', '.join(others)} not at all: step each once in a training step, on every rank"
            )
        one.stepped = stepped
        if all(other.stepped is not None for other in self._known):
            was_step = any(other.stepped for other in self._known)
            for other in self._known:
                other.stepped = None
            if was_step:
                self._balancer.step()
            else:
                self._balancer.loop.pass_over_step()


def _count(optimizer: AnyOptimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def follow_forwards(model: nn.Module, loop: LoopState, layers: frozenset[int]) -> None:
    """Hook a model with these MoE layers: ``loop`` is told when a forward begins, and when it ends or fails."""
    model.register_forward_pre_hook(lambda *_: loop.begin_forward(layers))
    model.register_forward_hook(lambda *_: loop.end_forward(layers), always_call=True)
