"""State that an optimizer keeps for each expert, found through ``optimizer.state`` and never by name; and whether it
updates each expert by itself, known of its class or tried once on small tensors.

A state tensor belongs to the experts when its leading dimension is the parameter's; single numbers (Adam's ``step``)
belong to the whole parameter and are equal on every rank. All else is refused. If the update of one expert depends on
others in its tensor (a norm, a factored second moment, a line search), training would depend on the placement.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...utils.text import one_line

logger = logging.getLogger("eplb_runtime")


class OptimizerStateError(ValueError):
    """An optimizer, or its state, that cannot be split by expert."""


Ranges = tuple[tuple[int, int], ...]
"""For each of the ranks that hold the same experts, in order, the first element and the end of what it keeps."""


class StateOwner(Protocol):
    """An optimizer of a framework's own, which may step other tensors than the model's."""

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """Return what is kept here for a parameter of the model, by key: live memory, not the parameter's own."""

    def copies_of(self, parameter: Tensor) -> Mapping[str, tuple[Tensor, ...]]:
        """Return other live memory with the same numbers as that state, by its keys, and as the parameter itself, under
        the key `PARAMETER`; empty if there is none."""

    def ranges_of(self, parameter: Tensor) -> Ranges:
        """Return (first, end) for each rank that holds a flat parameter, in order: the elements whose state it keeps;
        empty: each keeps all. With ranges ``state_of`` has flat tensors of this rank's range, or single numbers."""


PARAMETER = ""
"""Key under which `StateOwner.copies_of` has copies of the parameter itself."""


def state_of(optimizer: Optimizer | StateOwner, parameter: Tensor) -> Mapping[str, Any]:
    """Return what an optimizer keeps for a parameter, by key: live memory; empty if there is nothing yet."""
    return optimizer.state.get(parameter, {}) if isinstance(optimizer, Optimizer) else optimizer.state_of(parameter)


def state_of_each(
    optimizer: Optimizer | StateOwner, parameters: Sequence[Tensor], *, divided: bool = False
) -> list[tuple[str, tuple[Tensor, ...]]]:
    """Return (key, tensors) pairs, sorted by key: the state of experts that are parameters of their own, a tensor for
    each. ``divided``: an expert without state here has an empty tensor. Raises OptimizerStateError if keys differ
    between experts, or a value is no tensor."""
    of_each = [state_of(optimizer, parameter) for parameter in parameters]
    kept = [state for state in of_each if state or not divided]
    for state in kept:
        if list(state) != list(kept[0]):
            raise OptimizerStateError(
                f"an optimizer keeps {sorted(map(str, kept[0]))} for one expert of a layer and "
                f"{sorted(map(str, state))} for another: step all experts together"
            )
        if odd := [key for key, value in state.items() if value is not None and not isinstance(value, Tensor)]:
            raise OptimizerStateError(
                f"an optimizer keeps {odd[0]!r} of each expert as a {type(state[odd[0]]).__name__}: only tensors move"
            )
    first = kept[0] if kept else {}
    keys = [key for key in sorted(first, key=str) if isinstance(first[key], Tensor)]
    return [(str(key), tuple(state[key] if state else first[key].new_empty(0) for state in of_each)) for key in keys]


def copies_of_each(
    optimizer: Optimizer | StateOwner, parameters: Sequence[Tensor]
) -> dict[str, tuple[tuple[Tensor, ...], ...]]:
    """Return by key (`StateOwner.copies_of`), for each expert that is a parameter of its own, a tuple of the other
    tensors with the same numbers, which may be empty. An optimizer of torch has no keys."""
    of_each = [] if isinstance(optimizer, Optimizer) else [optimizer.copies_of(parameter) for parameter in parameters]
    return {key: tuple(copies.get(key, ()) for copies in of_each) for key in {key for one in of_each for key in one}}


def expert_state(
    optimizer: Optimizer | StateOwner, parameter: Tensor, registered: Collection[int] = ()
) -> list[tuple[str, Tensor]]:
    """Return (key, tensor) pairs, sorted by key: the state whose rows are the experts of ``parameter``. Raises as
    `is_per_expert` does. ``registered``: addresses of memory that is registered itself, and so moves anyway."""
    state = sorted(((str(key), value) for key, value in state_of(optimizer, parameter).items()), key=itemgetter(0))
    return [(key, value) for key, value in state if is_per_expert(key, value, parameter, registered)]


def is_per_expert(key: str, value: Any, parameter: Tensor, registered: Collection[int] = ()) -> bool:
    """Return whether a value of optimizer state has a row for each expert of ``parameter``; False for one number or no
    tensor. Raises OptimizerStateError for other shapes, and containers of tensors not in ``registered`` (addresses)."""
    if not isinstance(value, Tensor):
        inside = (one for one in arrays_in(value) if isinstance(one, Tensor) and one.numel() > 1)
        if any(one.data_ptr() not in registered for one in inside):
            raise OptimizerStateError(
                f"optimizer state {key!r} is a {type(value).__name__} that holds tensors, which would stay behind when "
                "experts move: keep each of them under a key of its own"
            )
        return False
    if value.ndim == parameter.ndim and value.shape[0] == parameter.shape[0]:
        return True
    if value.numel() == 1:
        return False
    raise OptimizerStateError(
        f"optimizer state {key!r} has shape {tuple(value.shape)} for an expert parameter of shape "
        f"{tuple(parameter.shape)}: it cannot be split by expert; give it as many dimensions, a row an expert"
    )


def arrays_in(thing: Any) -> Iterator[Any]:
    """Yield the tensors and arrays in a module or collection, also in collections inside; else nothing."""
    if isinstance(thing, Tensor | np.ndarray):
        yield thing
    elif isinstance(thing, nn.Module):
        yield from nn.Module.parameters(thing)  # a wrapper may call something else so
        yield from nn.Module.buffers(thing)
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from arrays_in(value)
    elif isinstance(thing, list | tuple | set | deque):
        for value in thing:
            yield from arrays_in(value)


def replace_parameter(
    optimizer: Optimizer, old: torch.nn.Parameter, new: torch.nn.Parameter, take_rows: Callable[[Tensor], Tensor]
) -> None:
    """Put ``new`` in the place of ``old`` in the optimizer, with its options. State of ``old`` moves to ``new``;
    tensors with a row for each expert go through ``take_rows``. Raises OptimizerStateError if ``old`` is not in it."""
    for group in optimizer.param_groups:
        for index, parameter in enumerate(group["params"]):
            if parameter is old:
                state = optimizer.state.get(old, {})
                cut = {key: take_rows(one) if is_per_expert(str(key), one, old) else one for key, one in state.items()}
                group["params"][index] = new
                if optimizer.state.pop(old, None) is not None:
                    optimizer.state[new] = cut
                return
    raise OptimizerStateError("the optimizer does not hold this parameter")


ELEMENT_WISE = {
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "apex": "FusedAdagrad FusedAdam FusedSGD",
    "schedulefree": "AdamWScheduleFree RAdamScheduleFree SGDScheduleFree",
}
"""Classes by package that are element-wise whatever their options are. Others, which have options that mix (timm's
``caution``, bitsandbytes' ``percentile_clipping``, TransformerEngine's scaled states), are tried as they are set."""
_EXPERTS, _SHAPE, _STEPS, _LEARNING_RATE = 3, (4, 32), 3, 0.1
"""Rows of 128 bytes: a CPU rounds them alike wherever they are in a tensor."""


def check_elementwise(
    optimizer: Optimizer, experts: Collection[int] | None = None, *, each: bool = False, known: bool = False
) -> None:
    """Raise for an optimizer that mixes experts, or keeps their state in another optimizer. A class that is not in
    `ELEMENT_WISE` is tried: a new one steps small tensors. If it cannot be tried, a warning is logged.

    Args:
        experts: ids of the parameters that are experts; None: any may be.
        each: whether each expert is a parameter ``[a, b]`` of its own; else all of a rank are in one, ``[E/R, ...]``.
        known: the user says that it is element-wise: it is not tried.

    Raises:
        OptimizerStateError: it mixes experts, cannot step tensors of experts, or keeps for them what cannot move.
    """
    kind, tried = type(optimizer).__name__, set[str]()
    listed = ELEMENT_WISE.get(type(optimizer).__module__.partition(".")[0], "").split()
    for group in optimizer.param_groups:
        mine = [one for one in group["params"] if experts is None or id(one) in experts]
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if not mine or repr(options) in tried:
            continue
        tried.add(repr(options))
        for name, inner in vars(optimizer).items():
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                raise OptimizerStateError(
                    f"{kind}.{name} is a {type(inner).__name__} with a state of its own, which would not move with "
                    "experts: use an optimizer that keeps all in its own state"
                )
        if known or kind.removesuffix("Closure") in listed:
            continue
        try:
            _try(optimizer, options, each, mine)
        except OptimizerStateError:
            raise
        except Exception as error:
            why = "cannot be tried on small tensors (%s): if it updates each expert by itself, say so by "
            then = "BalancerConfig(elementwise=True); else placement changes the result"
            logger.warning(f"%s {why}{then}", kind, one_line(error))


def _try(optimizer: Optimizer, options: Mapping[str, Any], each: bool, experts: Sequence[Tensor]) -> None:
    """Refuse where three experts, with gradients of three sizes, become something else together than each alone."""
    shape = _SHAPE[1:] if not each and all(one.ndim == 2 for one in experts) else _SHAPE
    device = torch.device("cpu") if experts[0].is_meta else experts[0].device
    values_ET = torch.randn(_EXPERTS, 1 + _STEPS, *shape, generator=torch.Generator().manual_seed(0)).to(device)
    values_ET[:, 1:] *= torch.logspace(-2, 2, _EXPERTS, device=device).view(-1, *[1] * (1 + len(shape)))

    def stepped(*which: int) -> tuple[Tensor, Optimizer, Tensor]:
        """Step these experts in a new optimizer; return weights and state ``[experts, N]``, it, its first tensor."""
        start, *gradients_T = (one if each else one.unsqueeze(0) for one in values_ET[list(which)].unbind(1))
        tensors = [one.clone().requires_grad_() for one in start]
        twin = _made(optimizer, options, tensors)
        for gradients in gradients_T:
            _step(twin, tensors, gradients)
        kept = [[one.detach(), *twin.state.get(one, {}).values()] for one in tensors]
        alike = [[one for one in of if isinstance(one, Tensor) and one.shape == tensors[0].shape] for of in kept]
        whole = [torch.stack(of) if each else of[0] for of in zip(*alike, strict=True)]
        return torch.cat([one.double().flatten(1) for one in whole], dim=1).nan_to_num(), twin, tensors[0]

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        (together, twin, tensor), (again, *_) = (stepped(*range(_EXPERTS)) for _ in range(2))
        apart = [stepped(expert)[0] for expert in range(_EXPERTS)]
    if not together.equal(again):
        raise RuntimeError("its step gives something else when it is repeated: it draws random numbers")
    if not together.equal(torch.cat(apart)):
        raise OptimizerStateError(
            f"{type(optimizer).__name__} mixes the experts of {'a rank' if each else 'a tensor'} in its update, so "
            "placement would change the result; use an element-wise optimizer (SGD, Adam, AdamW, ...), or say "
            "BalancerConfig(elementwise=True) if you know that it is one"
        )
    if not each:
        expert_state(twin, tensor)  # refuses what cannot move with experts


def _step(twin: Optimizer, tensors: Sequence[Tensor], gradients: Tensor) -> None:
    """One step without torch's hooks, which are for training; with a closure where the class takes one."""

    def closure() -> float:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.clone()
        return float(sum((one.detach() * gradient).sum() for one, gradient in zip(tensors, gradients, strict=True)))

    step: Any = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step
    closure()
    try:
        step(twin, closure)
    except (TypeError, ValueError):  # some refuse a closure
        step(twin)


def _made(optimizer: Optimizer, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> Optimizer:
    def own(given: Mapping[str, Any]) -> dict[str, Any]:  # without those that are checked against a device
        return copy.deepcopy({key: one for key, one in given.items() if key not in ("fused", "capturable", "foreach")})

    # Some constructors ask their groups for options, others refuse any that they do not know.
    for in_group, named in ((options, optimizer.defaults), ({}, optimizer.defaults), (options, {}), ({}, {})):
        try:
            twin = type(optimizer)([{**own(in_group), "params": list(tensors)}], **own(named))
            break
        except Exception:
            if not in_group and not named:
                raise
    twin.param_groups[0].update(own(options))
    if twin.param_groups[0].get("lr") is not None:
        twin.param_groups[0]["lr"] = _LEARNING_RATE  # a schedule may begin at 0, where nothing shows
    getattr(twin, "train", lambda: None)()
    return twin
