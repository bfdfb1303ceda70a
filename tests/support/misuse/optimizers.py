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


class TrustRatioInOddSteps(TrustRatio):
    """In no step that ends in a decision."""

    def change(self, parameter: Tensor) -> Tensor:
        return super().change(parameter) if self.steps % 2 else parameter.grad


class ClipsInside(Own):
    """Clips each tensor by its norm."""

    def change(self, parameter: Tensor) -> Tensor:
        return parameter.grad * (1e-3 / parameter.grad.norm()).clamp(max=1.0)


class StepSizes(Own):
    """Keeps a number for each expert in its state, as a list of plain numbers: it falls with the expert's gradient."""

    def change(self, parameter: Tensor) -> Tensor:
        numbers = self.state[parameter].setdefault("sizes", [1.0] * len(parameter))
        for row, gradient in enumerate(parameter.grad):
            numbers[row] = 0.7 * numbers[row] + 0.3 / (1.0 + 100.0 * float(gradient.norm()))
        return parameter.grad * torch.tensor(numbers, dtype=parameter.dtype).view(-1, 1, 1)


class Holder:
    """An object with a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class MomentumInObject(Own):
    """Keeps momentum in an object in its state."""

    def change(self, parameter: Tensor) -> Tensor:
        kept: Holder = self.state[parameter].setdefault("momentum", Holder(torch.zeros_like(parameter)))
        return kept.value.mul_(0.9).add_(parameter.grad)


class MomentumInList(Own):
    """Keeps momentum in a list in its state."""

    def change(self, parameter: Tensor) -> Tensor:
        kept: list[Tensor] = self.state[parameter].setdefault("momentum", [torch.zeros_like(parameter)])
        return kept[0].mul_(0.9).add_(parameter.grad)


class MomentumInArray(Own):
    """Keeps momentum in an array of numpy in its state."""

    def change(self, parameter: Tensor) -> Tensor:
        array = self.state[parameter].setdefault("momentum", parameter.grad.new_zeros(parameter.shape).numpy())
        array *= 0.9
        array += parameter.grad.numpy()
        return torch.from_numpy(array)


class MomentumInAttribute(Own):
    """Keeps momentum in an attribute of its own."""

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.momenta: dict[Tensor, Tensor] = {}

    def change(self, parameter: Tensor) -> Tensor:
        return self.momenta.setdefault(parameter, torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)


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


class Muon(torch.optim.Optimizer):
    """Makes the momentum of each matrix orthogonal, each expert's by itself; vectors and tables take plain steps."""

    def __init__(self, params: Iterable[Any], lr: float = 0.02, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                kept = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                kept.mul_(group["momentum"]).add_(parameter.grad)
                update = kept
                if parameter.ndim == 3:
                    update = torch.stack([orthogonal(matrix) for matrix in kept])
                elif parameter.ndim == 2 and len(parameter) != 96:
                    update = orthogonal(kept)
                parameter.sub_(update, alpha=group["lr"])


def orthogonal(matrix: Tensor) -> Tensor:
    """About the nearest orthogonal matrix, by five steps of Newton and Schulz, in float32 and times 0.1."""
    tall = matrix.float() if len(matrix) >= matrix.shape[1] else matrix.float().mT
    near = tall / (tall.norm() + 1e-7)
    for _ in range(5):
        gram = near.mT @ near
        near = 3.4445 * near + near @ (-4.775 * gram + 2.0315 * gram @ gram)
    near = near if len(matrix) >= matrix.shape[1] else near.mT
    return (0.1 * near).to(matrix.dtype)
