"""Whether an optimizer updates each expert by itself: known of its class, or tried once on small tensors.

An optimizer whose update of one expert depends on the others in its tensor (a norm over the tensor, a factored second
moment, a line search over all parameters) would make training depend on which experts share a rank.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import one_line
from .optimizer_state import OptimizerStateError, expert_state

logger = logging.getLogger("eplb_runtime")

ELEMENT_WISE = {
    "torch": "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD",
    "apex": "FusedAdagrad FusedAdam FusedSGD",
    "schedulefree": "AdamWScheduleFree AdamWScheduleFreeClosure RAdamScheduleFree RAdamScheduleFreeClosure "
    "SGDScheduleFree SGDScheduleFreeClosure",
}
"""Classes by package that are element-wise whatever their options are. Others, which have options that mix (timm's
``caution``, bitsandbytes' ``percentile_clipping``, TransformerEngine's scaled states), are tried as they are set."""
_EXPERTS, _SHAPE, _STEPS = 3, (4, 32), 3
"""Rows of 128 bytes: a CPU rounds them alike wherever they are in a tensor."""
_LEARNING_RATE = 0.1


def check_elementwise(
    optimizer: torch.optim.Optimizer, experts: Collection[int] | None = None, *, each: bool = False, known: bool = False
) -> None:
    """Refuse an optimizer that mixes experts, or keeps their state in another optimizer.

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
            if isinstance(inner, torch.optim.Optimizer) and inner.state is not optimizer.state:
                raise OptimizerStateError(
                    f"{kind}.{name} is a {type(inner).__name__} with a state of its own, which would not move with "
                    "experts: use an optimizer that keeps all in its own state"
                )
        if known or kind in listed:
            continue
        shape = _SHAPE[1:] if not each and all(one.ndim == 2 for one in mine) else _SHAPE
        try:
            mixes = _mixes(optimizer, options, each, shape, mine[0].device)
        except OptimizerStateError:
            raise
        except Exception as error:
            logger.warning(
                "%s cannot be tried on small tensors (%s): if it updates each expert by itself, say so by "
                "BalancerConfig(elementwise=True); else placement changes the result",
                *(kind, one_line(error)),
            )
            continue
        if mixes:
            raise OptimizerStateError(
                f"{kind} mixes the experts of {'a rank' if each else 'a tensor'} in its update, so placement would "
                "change the result; use an element-wise optimizer (SGD, Adam, AdamW, ...), or say "
                "BalancerConfig(elementwise=True) if you know that it is one"
            )


def _mixes(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], each: bool, shape: Sequence[int], of: torch.device
) -> bool:
    """Whether three experts become something else together than each with an optimizer of its own, in any bit."""
    device, generator = of if of.type != "meta" else torch.device("cpu"), torch.Generator().manual_seed(0)
    start_E = torch.randn(_EXPERTS, *shape, generator=generator).to(device)
    # Experts differ in size, so that whatever is taken over all of them shows.
    sizes_E = torch.logspace(-2, 2, _EXPERTS).view(-1, 1, *[1] * len(shape))
    gradients_ET = (torch.randn(_EXPERTS, _STEPS, *shape, generator=generator) * sizes_E).to(device)

    def cut(tensor: Tensor) -> list[Tensor]:
        return [one.clone() for one in tensor] if each else [tensor.clone()]

    def stepped(*experts: int) -> tuple[dict[str, Tensor], torch.optim.Optimizer, Tensor]:
        tensors = cut(start_E[list(experts)])
        twin = _made(optimizer, options, [tensor.requires_grad_() for tensor in tensors])
        for number in range(_STEPS):
            _step(twin, tensors, cut(gradients_ET[list(experts), number]))
        of_each = [{"": tensor.detach(), **twin.state.get(tensor, {})} for tensor in tensors]
        kept = [key for key, one in of_each[0].items() if isinstance(one, Tensor) and one.shape == tensors[0].shape]
        rows = {key: torch.stack([one[key] for one in of_each]) if each else of_each[0][key] for key in kept}
        return rows, twin, tensors[0]

    def same(one: Tensor, other: Tensor) -> bool:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)

    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        (together, twin, tensor), (again, _, _) = (stepped(*range(_EXPERTS)) for _ in range(2))
        apart = [stepped(expert)[0] for expert in range(_EXPERTS)]
    if not all(same(rows, again[key]) for key, rows in together.items()):
        raise RuntimeError("its step gives something else when it is repeated: it draws random numbers")
    if not all(same(rows, torch.cat([one[key] for one in apart])) for key, rows in together.items()):
        return True
    if not each:
        expert_state(twin, tensor)  # refuses what cannot move with experts
    return False


def _step(twin: torch.optim.Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """One step, with a closure where the class takes one."""

    def closure() -> float:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.clone()
        return float(sum((one.detach() * gradient).sum() for one, gradient in zip(tensors, gradients, strict=True)))

    step: Any = type(twin).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # torch's hooks are for whoever trains
    closure()
    try:
        step(twin, closure)
    except (TypeError, ValueError):  # some refuse a closure
        step(twin)


def _made(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], tensors: Sequence[Tensor]
) -> torch.optim.Optimizer:
    def own(given: Mapping[str, Any]) -> dict[str, Any]:  # without those that are checked against a device
        return copy.deepcopy({key: one for key, one in given.items() if key not in ("fused", "capturable", "foreach")})

    why = Exception()
    # Some constructors ask their groups for options, others refuse any that they do not know.
    for in_group, named in ((options, optimizer.defaults), ({}, optimizer.defaults), (options, {}), ({}, {})):
        try:
            twin = type(optimizer)([{**own(in_group), "params": list(tensors)}], **own(named))
            break
        except Exception as error:
            why = error
    else:
        raise why
    twin.param_groups[0].update(own(options))
    if options.get("lr") is not None:
        twin.param_groups[0]["lr"] = _LEARNING_RATE  # a schedule may begin at 0, where nothing shows
    getattr(twin, "train", lambda: None)()
    return twin
