"""Optimizers that keep something where no migration finds it, or that mix experts; and one that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Own(torch.optim.Optimizer):
    """Gradient descent with what `change` makes of a gradient.

    Args:
        begins: the step, counted from 1, from which on the experts' gradients are changed.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1, begins: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps, self.begins = 0, begins

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    changed = parameter.ndim == 3 and self.steps >= self.begins
                    update = self.change(parameter) if changed else parameter.grad
                    parameter.sub_(update, alpha=group["lr"])

    def change(self, parameter: Tensor) -> Tensor:
        """The update of one parameter of experts."""
        return parameter.grad


class TrustRatio(Own):
    """Scales by norms over all experts that a rank holds, as LARS does for a layer."""

    def change(self, parameter: Tensor) -> Tensor:
        return parameter.grad * (parameter.norm() / parameter.grad.norm().clamp(min=1e-6)).clamp(max=10.0)


class MomentumInClosure(Own):
    """Keeps momentum where a function alone has it."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        kept: dict[Tensor, Tensor] = {}
        self.change = lambda p: kept.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)  # type: ignore[method-assign]


class WritesNothing(Own):
    """Keeps master weights of its own, and steps those alone."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("master", parameter.clone()).sub_(parameter.grad, alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, by five steps of Newton and Schulz, in float32 and times 0.1."""
    tall = matrix.float() if len(matrix) >= matrix.shape[1] else matrix.float().mT
    near = tall / (tall.norm() + 1e-7)
    for _ in range(5):
        gram = near.mT @ near
        near = 3.4445 * near + near @ (-4.775 * gram + 2.0315 * gram @ gram)
    near = near if len(matrix) >= matrix.shape[1] else near.mT
    return (0.1 * near).to(matrix.dtype)
