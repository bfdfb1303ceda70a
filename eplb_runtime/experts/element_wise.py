"""Whether an optimizer updates each expert by itself: asked of a twin of it on small tensors, not of its name.

An optimizer whose update of one expert depends on the others in its tensor (a norm over the tensor, a factored second
moment, a line search over all parameters) would make training depend on which experts share a rank.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from .optimizer_state import OptimizerStateError, expert_state

logger = logging.getLogger("eplb_runtime")

_EXPERTS, _SHAPE, _STEPS = 3, (4, 6), 3


def check_element_wise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that mixes the experts of a tensor.

    A twin with the same options steps a tensor of three experts, three others step one each; both must give the same.
    An optimizer whose twin cannot be made from its options is let pass with a warning.

    Raises:
        OptimizerStateError: it mixes experts, or cannot step tensors of experts at all, or what it keeps for them could
            not move with them.
    """
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(_EXPERTS, *_SHAPE, generator=generator)
    gradients = torch.randn(_STEPS, _EXPERTS, *_SHAPE, generator=generator)
    # Experts differ in size, so that whatever is taken over all of them shows.
    gradients *= torch.logspace(-2, 2, _EXPERTS).view(1, -1, 1, 1)
    kind = type(optimizer).__name__
    together, apart = [start.clone()], list(start.clone().split(1))
    try:
        twin, singles = _twin(optimizer, together), [_twin(optimizer, [tensor]) for tensor in apart]
    except Exception as error:
        logger.warning(
            "%s cannot be tried on small tensors (%s): make sure that it updates each expert by itself, or placement "
            "changes the result",
            kind,
            str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__,
        )
        return
    try:
        for step in gradients:
            _step(twin, together[0], step)
            for single, tensor, gradient in zip(singles, apart, step.split(1), strict=True):
                _step(single, tensor, gradient)
    except Exception as error:
        raise OptimizerStateError(
            f"{kind} cannot update tensors of experts ({type(error).__name__} on a small one): use an element-wise "
            "optimizer (SGD, Adam, AdamW, ...)"
        ) from None
    if not torch.allclose(together[0], torch.cat(apart), rtol=1e-5, atol=1e-7):
        raise OptimizerStateError(
            f"{kind} mixes the experts of a tensor in its update, so placement would change the result; use an "
            "element-wise optimizer (SGD, Adam, AdamW, ...)"
        )
    expert_state(twin, together[0])  # what it keeps can move with experts


def _twin(optimizer: torch.optim.Optimizer, tensors: Sequence[Tensor]) -> torch.optim.Optimizer:
    """An optimizer of the same class and options on other tensors; on the CPU, where fused kernels may be missing."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    anything = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in accepted.values())
    options = {
        name: value
        for name, value in optimizer.defaults.items()
        if (anything or name in accepted) and name not in ("fused", "capturable", "foreach")
    }
    if "lr" in options and options["lr"] is not None and not float(options["lr"]):
        options["lr"] = 0.1  # a schedule that warms up starts from nothing, and nothing would show
    made = type(optimizer)([tensor.requires_grad_() for tensor in tensors], **options)
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"{type(optimizer).__name__} makes a {type(made).__name__}")
    return made


def _step(twin: torch.optim.Optimizer, tensor: Tensor, gradient: Tensor) -> None:
    def closure() -> float:
        tensor.grad = gradient.clone()
        return float((tensor.detach() * gradient).sum())

    closure()
    twin.step(closure)
