"""Optimizers and the balancer: gradients are ready before each steps, and a training step ends when all have.

Who steps the model's parameters must be known here, since gradients are reduced ahead of it. Another optimizer that
holds one of them is refused at its first step, wherever and whenever it was made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ...balancer.balancer import Balancer
from ...balancer.loop_state import LoopHooks, LoopState
from ...distributed.consensus import barrier
from ...moe.experts.optimizer_state import OptimizerStateError, check_elementwise
from .description import AnyOptimizer, AttachError, HostOptimizer
from .state_hooks import Homes, mark_optimizer, order_optimizer


def why_shared(optimizer: torch.optim.Optimizer) -> str:
    """Say that an optimizer steps another attached model, whose experts it would take for dense."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    if any(isinstance(getattr(hook, "__self__", None), Optimizers) for hook in hooks):
        kind = type(optimizer).__name__
        return f"this {kind} steps another attached model already: give each attached model an optimizer of its own"
    return ""


class Optimizers(LoopHooks):
    """Those that step one attached model, whose parameters are given by name, experts as they are here."""

    def __init__(self, balancer: Balancer, parameters: Mapping[str, Tensor]) -> None:
        self._balancer = balancer
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        layers = balancer.layer_of_parameter
        self._experts = {number: name for number, name in self._names.items() if name in layers}
        self._known: list[AnyOptimizer] = []
        self._contained: list[torch.optim.Optimizer] = []
        self._hooks: dict[int, list[RemovableHandle]] = {}
        self._held: list[int] = []
        self._done: dict[int, bool] = {}
        self._step_count: dict[int, int] = {}
        self._depth: Counter[int] = Counter()
        self._in_closure = False
        self._strangers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._stepping = False
        ask = WeakMethod(self._refuse_strangers)  # torch's table lives as long as the process; a model need not

        def before_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (refuse := ask()) is not None:
                refuse(optimizer)

        balancer.closing.callback(register_optimizer_step_pre_hook(before_any_step).remove)
        balancer.loop.hooks.append(self)

    def adopt(self, optimizer: torch.optim.Optimizer, instead_of: torch.optim.Optimizer | None = None) -> None:
        """`Balancer.adopt`."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise AttachError(
                f"a {type(optimizer).__name__} is no torch.optim.Optimizer, and only those are taken over: call attach "
                "after it was made, with the model as it is trained (Megatron: wrapped in DistributedDataParallel)"
            )
        if any(optimizer is known for known in self._known):
            raise AttachError("the balancer has this optimizer already: adopt each once")
        if why := why_shared(optimizer) or self._why_replaced(optimizer):
            raise AttachError(why)
        number = self._replaceable(instead_of) if instead_of is not None else -1
        if self._balancer.config.replica_slots and not self._known:
            raise AttachError(
                "the model was attached without an optimizer and with replica slots, which gather no gradients then: "
                "give the optimizer to attach, or use replica_slots=0"
            )
        kept = [known for known in self._known if known is not instead_of]
        held = Counter(id(p) for one in [*kept, optimizer] for group in one.param_groups for p in group["params"])
        twice = [name for key, name in self._names.items() if held[key] > 1]
        if twice:
            raise AttachError(
                f"{twice[0]} is in several optimizers: give each parameter to one, and let go the one that this "
                "replaces: balancer.adopt(optimizer, instead_of=old)"
            )
        try:
            each, known = self._balancer.runtime.registry.has_slots, self._balancer.config.elementwise
            check_elementwise(optimizer, self._experts, each=each, known=known)
        except OptimizerStateError as error:
            raise AttachError(str(error)) from None
        if instead_of is not None:  # its step is refused from here on
            for handle in self._hooks.pop(number):
                handle.remove()
            self._balancer.tensors.forget(self._known[number], self._outside(number))
            self._step_count.pop(number, None)
        self._hook(optimizer, number if instead_of is not None else len(self._known))

    def _replaceable(self, optimizer: torch.optim.Optimizer) -> int:
        """The number of an optimizer that may be let go now."""
        number = next((number for number, known in enumerate(self._known) if known is optimizer), None)
        if number is None:
            raise AttachError(
                f"instead_of is a {type(optimizer).__name__} that the balancer does not have: give the very one that "
                "attach or adopt was given"
            )
        if number not in self._hooks:
            raise AttachError(
                f"a {type(optimizer).__name__} of the framework's own cannot be let go: close the balancer, and attach "
                "with the new optimizer"
            )
        if self._done:
            raise AttachError(
                "adopt(..., instead_of=...) in the middle of a training step, in which some optimizers have stepped "
                "and others not: call it when all have"
            )
        return number

    def add(self, optimizers: Sequence[AnyOptimizer], container: torch.optim.Optimizer | None = None) -> None:
        """Hook optimizers that were checked, or what steps them in one step of its own, which lets them alone; first
        the balancer learns what they hold outside the model."""
        for optimizer in optimizers:
            if container is None:
                self._hook(optimizer, len(self._known))
            elif isinstance(optimizer, torch.optim.Optimizer):
                self._contained.append(optimizer)
                self._balancer.tensors.train(optimizer, {})
                if self._balancer.runtime.job.divided_rows:  # the framework saves it
                    order_optimizer(optimizer, self._experts, self._balancer)
        if container is not None:
            number = len(self._known)
            self._known.append(container)
            self._held.append(_count(container))
            self._balancer.tensors.train_outside(self._outside(number))
            container.register_step_pre_hook(self._before_step)
            after = container.register_step_post_hook(partial(self._after_step, number))
            self._balancer.closing.callback(after.remove)

    def _hook(self, optimizer: AnyOptimizer, number: int) -> None:
        """Under this number, where none is or the one before was let go."""
        self._known[number : number + 1] = [optimizer]
        self._held[number : number + 1] = [_count(optimizer)]
        self._balancer.tensors.train(optimizer, self._outside(number))
        if not isinstance(optimizer, torch.optim.Optimizer):
            self._join(number, optimizer)
            return
        after = optimizer.register_step_post_hook(partial(self._after_step, number))
        # Hooks that a user has registered by now may write weights.
        optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]
        self._balancer.closing.callback(after.remove)
        before = optimizer.register_step_pre_hook(self._before_step)
        if self._balancer.runtime.job.divided_rows:  # the framework saves it
            marks = order_optimizer(optimizer, self._experts, self._balancer)
        else:
            refuse = partial(refuse_on_all, self._balancer, "load_state_dict of the optimizer")
            marks = mark_optimizer(optimizer, self._experts, self._homes_of, refuse)
        self._hooks[number] = [*marks, before, after]

    def _join(self, number: int, optimizer: HostOptimizer) -> None:
        balancer = self._balancer

        def before() -> None:
            self._stepping = True
            balancer.loop.before_step()

        began = balancer.placement.digest()
        undo = optimizer.join(
            before,
            partial(self._after_step, number),
            balancer.gradients.square_of_experts,
            lambda: balancer.placement.with_epoch(0).digest() != began,
            lambda parameter: self._homes_of(self._experts[id(parameter)]).here,
        )
        balancer.closing.callback(undo.remove)

    def _outside(self, number: int) -> dict[str, Tensor]:
        """Return what an optimizer holds outside the model."""
        return {
            f"parameter {index} of group {group_number} of optimizer {number}": parameter
            for group_number, group in enumerate(self._known[number].param_groups)
            for index, parameter in enumerate(group["params"])
            if id(parameter) not in self._names
        }

    def follow(self) -> None:
        """Take over what ``add_param_group`` has added since."""
        for number, optimizer in enumerate(self._known):
            if _count(optimizer) != self._held[number]:
                if why := self._why_replaced(optimizer):
                    raise RuntimeError(why)
                self._held[number] = _count(optimizer)
                # On one rank alone the average of gradients would be over other tensors than on the others.
                self._balancer.runtime.barrier(f"add_param_group of a {type(optimizer).__name__}")
                self._balancer.tensors.train_outside(self._outside(number))

    def _why_replaced(self, optimizer: AnyOptimizer) -> str:
        """Say that an optimizer has a parameter that attach has replaced; empty: it has none."""
        replaced = {id(parameter): name for name, parameter in self._balancer.runtime.model_check.replaced().items()}
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        if (name := next((replaced[key] for key in held if key in replaced), "")) == "":
            return ""
        return (
            f"the optimizer was given {name} as it was before attach, of all experts, with which the model no longer "
            "computes: take parameters from model.parameters() after attach"
        )

    def _homes_of(self, name: str) -> Homes:
        return homes_of(self._balancer, self._balancer.layer_of_parameter[name])

    @torch.compiler.disable
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Reduce gradients before the step, or, where a closure makes them inside it, after each call of that."""
        if self._depth[id(optimizer)] > 0:  # its step calls that of its base, for which torch calls hooks, too
            self._depth[id(optimizer)] += 1
            return None
        if torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                "optimizer.step() inside a backward pass (from a gradient hook), where gradients of other parameters "
                "are still to come and none are reduced: step after backward()"
            )
        self._stepping = True
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._balancer.loop.before_step()
            self._depth[id(optimizer)] = 1
            return None

        def reduced() -> Any:
            self._in_closure = True
            try:
                loss = closure()
            finally:
                self._in_closure = False
            self._balancer.gradients.begin()
            self._balancer.loop.before_step()
            return loss

        self._depth[id(optimizer)] = 1
        if "closure" in kwargs:
            return args, {**kwargs, "closure": reduced}
        return (args[0], reduced, *args[2:]), kwargs

    def on_forward_begin(self, trains: bool) -> None:
        """Forget steps that have raised: a forward between steps begins a new one."""
        if trains and not self._in_closure:
            self._depth.clear()

    def before_reduce(self) -> None:
        self.follow()

    @contextmanager
    def around_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, an optimizer steps, or is passed over by who decides that for all ranks (a scaler at an overflow)."""
        number = next((number for number, known in enumerate(self._known) if known is optimizer), -1)
        before = self._step_count.get(number, 0)
        yield
        if number >= 0 and self._step_count.get(number, 0) == before and not self._balancer.closed:
            self._balancer.loop.skip_step(optimizer)
            self._end_of_step(number, stepped=False)

    @torch.compiler.disable
    def _after_step(self, number: int, optimizer: torch.optim.Optimizer | None = None, *_: Any) -> None:
        if optimizer is not None:
            self._depth[id(optimizer)] = max(0, self._depth[id(optimizer)] - 1)
            if self._depth[id(optimizer)]:
                return
        self._stepping = False
        self._end_of_step(number, stepped=True)

    def _end_of_step(self, number: int, *, stepped: bool) -> None:
        """A training step ends when each optimizer has had its turn; if all were passed over, it was none."""
        self._step_count[number] = self._step_count.get(number, 0) + 1
        if number in self._done:
            others = sorted(set(range(len(self._known))) - set(self._done))
            raise RuntimeError(
                f"optimizer {number} of the attached ones has stepped twice, number {', '.join(map(str, others))} not "
                "at all: step each once in a training step, on every rank"
            )
        self._done[number] = stepped
        if len(self._done) == len(self._known):
            was_step = any(self._done.values())
            self._done.clear()
            if was_step:
                self._balancer.step()

    @torch.compiler.disable
    def _refuse_strangers(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Runs before any optimizer of the process steps."""
        # An optimizer may step others inside, as wrappers of optimizers do.
        known = (*self._known, *self._contained)
        if self._stepping or optimizer in self._strangers or any(optimizer is one for one in known):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in self._names:
                    name = self._names[id(parameter)]
                    raise RuntimeError(
                        f"a {type(optimizer).__name__} that the balancer does not know steps {name} of the attached "
                        "model, with gradients that are not reduced: give all optimizers to attach(model, [first, "
                        "second]), or one that is made later to balancer.adopt(optimizer), with instead_of=old where "
                        "it replaces one"
                    )
        self._strangers.add(optimizer)


def follow_forwards(model: nn.Module, loop: LoopState, layers: frozenset[int]) -> None:
    """Tell a loop of each forward of a model with these layers that begins, and that ends or fails."""
    model.register_forward_pre_hook(lambda *_: loop.begin_forward(layers))
    model.register_forward_hook(lambda *_: loop.end_forward(layers), always_call=True)


def homes_of(balancer: Balancer, layer: int) -> Homes:
    """Where the experts of a layer stand now."""
    homes_RH, has_moved = balancer.placement.homes_LRH[layer], balancer.rebalancer.has_moved(layer)
    return Homes(homes_RH.ravel().tolist(), balancer.runtime.job.ep_rank, len(homes_RH), has_moved)


def refuse_on_all(balancer: Balancer, what: str, why: str) -> None:
    """Raise on every rank of an EP group if one of them has a reason. Collective over it until ``close``."""
    ranks, problem = balancer.runtime.job.ep_ranks, RuntimeError(why) if why else None
    if len(ranks) > 1 and not balancer.closed:
        why = barrier(ranks, what, balancer.config.timeout_seconds, problem, patient=True)
    if why:
        raise RuntimeError(why)


def _count(optimizer: AnyOptimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
