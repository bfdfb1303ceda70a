"""Whether an optimizer updates each expert by itself: asked of a twin of it on small tensors, not of its name.

An optimizer whose update of one expert depends on the others in its tensor (a norm over the tensor, a factored second
moment, a line search over all parameters) would make training depend on which experts share a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...utils.errors import one_line
from .lone_step import differ, rounding_of
from .made_anew import Made, made_anew, needs_more_than_a_closure, step_of, unnoticed
from .optimizer_state import OptimizerStateError, expert_state
from .unmoved import unmoved

logger = logging.getLogger("eplb_runtime")

_EXPERTS, _SHAPE, _STEPS = 3, (4, 6), 3
_CPU = torch.device("cpu")


def check_element_wise(
    optimizer: torch.optim.Optimizer, experts: Collection[int] | None = None, *, each: bool = False
) -> None:
    """Refuse an optimizer that mixes experts.

    A twin with the options of a param group that has experts steps three experts, three others step one each; both must
    give the same. An optimizer whose twin cannot be made is let pass with a warning.

    Args:
        experts: ids of the parameters that are experts; None: any may be.
        each: whether each expert is a parameter ``[a, b]`` of its own; else all of a rank are in one, ``[E/R, ...]``.

    Raises:
        OptimizerStateError: it mixes experts, or cannot step tensors of experts at all, or what it keeps for them could
            not move with them.
    """
    checked: list[Mapping[str, Any]] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        if experts is not None and not any(id(parameter) in experts for parameter in group["params"]):
            continue
        if not any(_equal(options, other) for other in checked):
            mine = [one for one in group["params"] if experts is None or id(one) in experts]
            flat = not each and bool(mine) and all(one.ndim == 2 for one in mine)
            _check_group(optimizer, options, _device_of_trial(optimizer, mine), _Shapes(each, flat))
            checked.append(options)


def _equal(options: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = options.keys() == other.keys()
    return same and all(type(v) in (bool, int, float, str) and v == other[key] for key, v in options.items())


@dataclass(frozen=True)
class _Shapes:
    """How experts are given to an optimizer.

    Args:
        each: one tensor for each; else one for all.
        flat: experts are vectors, as biases are.
    """

    each: bool
    flat: bool


@dataclass(frozen=True)
class _Trial:
    """One twin for three experts, and one for each of them, after some steps.

    Args:
        tensor: that the first has stepped, or the first of them.
    """

    twin: torch.optim.Optimizer
    tensor: Tensor
    mixes: bool


class _CannotTryError(Exception):
    """No whole twin can be made."""


def _device_of_trial(optimizer: torch.optim.Optimizer, experts: Sequence[Tensor]) -> torch.device:
    """Return the parameters' device, since another library's kernels may know no other; the CPU for torch's own."""
    if type(optimizer).__module__.startswith("torch.optim"):
        return _CPU
    devices = [one.device for one in experts]
    return devices[0] if devices and devices[0].type != "meta" else _CPU


def _check_group(
    optimizer: torch.optim.Optimizer, options: Mapping[str, Any], device: torch.device, shapes: _Shapes
) -> None:
    kind = type(optimizer).__name__
    try:
        with unnoticed([device.index or 0] if device.type == "cuda" else []):
            try:
                trial = _tried(optimizer, options, torch.float64, device, shapes)
            except Exception:
                trial = _tried(optimizer, options, torch.float32, device, shapes)
    except _CannotTryError as error:
        logger.warning(
            "%s cannot be tried on small tensors (%s): make sure that it updates each expert by itself, or placement "
            "changes the result",
            kind,
            error,
        )
        return
    except Exception as error:
        raise OptimizerStateError(
            f"{kind} cannot update tensors of experts ({one_line(error)}): use an element-wise optimizer (SGD, "
            "Adam, AdamW, ...)"
        ) from None
    if trial.mixes:
        raise OptimizerStateError(
            f"{kind} mixes the experts of {'a rank' if shapes.each else 'a tensor'} in its update, so placement would "
            "change the result; use an element-wise optimizer (SGD, Adam, AdamW, ...)"
        )
    if not shapes.each:
        expert_state(trial.twin, trial.tensor)  # what it keeps can move with experts
    for one in unmoved(trial.twin, {"a tensor of experts": trial.tensor}):
        if not one.may_be_registered:
            raise OptimizerStateError(one.said)


def _tried(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shapes: _Shapes,
) -> _Trial:
    if needs_more_than_a_closure(optimizer):
        raise _CannotTryError("its step asks for more than a closure")
    generator = torch.Generator().manual_seed(0)
    shape = _SHAPE[1:] if shapes.flat else _SHAPE
    start = torch.randn(_EXPERTS, *shape, generator=generator).to(device, dtype)
    gradients = torch.randn(_STEPS, _EXPERTS, *shape, generator=generator).to(device, dtype)
    # Experts differ in size, so that whatever is taken over all of them shows.
    gradients *= torch.logspace(-2, 2, _EXPERTS, device=device).view(1, -1, *[1] * len(shape))

    def cut(tensor: Tensor) -> list[Tensor]:
        return [one.clone() for one in tensor] if shapes.each else list(tensor.clone().split(1))

    def given(tensor: Tensor) -> list[Tensor]:
        return cut(tensor) if shapes.each else [tensor.clone()]

    together, repeated, apart = given(start), given(start), cut(start)
    made: list[Made] = []
    try:
        made += [_twin(optimizer, options, tensors) for tensors in (together, repeated, *([one] for one in apart))]
        twin, again, *singles = [one.optimizer for one in made]
        for step in gradients:
            _step(twin, together, given(step))
            _step(again, repeated, given(step))
            for single, tensor, gradient in zip(singles, apart, cut(step), strict=True):
                _step(single, [tensor], [gradient])
    except Exception as error:
        why = one_line(error) if not made else made[0].why_not_whole
        if why:
            raise _CannotTryError(why) from None
        raise
    joined = torch.stack if shapes.each else torch.cat
    results = [(joined(together), joined(apart), start)]
    for key, kept in twin.state.get(together[0], {}).items():
        of_all = [twin.state.get(tensor, {}).get(key) for tensor in together]
        of_each = [one.state.get(tensor, {}).get(key) for one, tensor in zip(singles, apart, strict=True)]
        pairs = zip([*of_all, *of_each], [*together, *apart], strict=True)
        if all(_is_like(one, tensor) for one, tensor in pairs):
            kept = joined(of_all)
            results.append((kept, joined(of_each), torch.zeros_like(kept)))
    rounding = rounding_of(dtype)
    if _any_differs(joined(together), joined(repeated), start, rounding):
        raise _CannotTryError("its step gives something else when it is repeated: it draws random numbers")
    return _Trial(twin, together[0], any(_any_differs(*result, rounding) for result in results))


def _any_differs(one: Tensor, other: Tensor, before: Tensor, rounding: tuple[float, float]) -> bool:
    """Whether any expert does."""
    tensors = (one, other, before)
    return any(
        differ(rows[0], rows[1], rows[2], rounding)
        for rows in zip(*(tensor.detach().double().cpu().numpy() for tensor in tensors), strict=True)
    )


def _is_like(kept: Any, tensor: Tensor) -> bool:
    return isinstance(kept, Tensor) and kept.shape == tensor.shape and kept.is_floating_point()


def _twin(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], tensors: Sequence[Tensor]) -> Made:
    """An optimizer of the same class and options for other tensors, without options of how to compute on a device."""
    made = made_anew(optimizer, [(options, [one.requires_grad_() for one in tensors])], tensors[0].device)
    twin = made.optimizer
    if callable(train := getattr(twin, "train", None)):
        train()  # it may have been left in evaluation
    for group in twin.param_groups:
        if group.get("lr") is not None and not float(group["lr"]):
            group["lr"] = 0.1  # a schedule that warms up starts from nothing, and nothing would show
    return made


def _step(twin: torch.optim.Optimizer, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    def closure() -> float:
        total = 0.0
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient.clone()
            total += float((tensor.detach() * gradient).sum())
        return total

    closure()
    step = step_of(twin)
    try:
        step(closure)
    except (TypeError, ValueError):  # some refuse a closure, or what they are given
        step()
