"""Optimizers as they are tried at attach: those of their own groups that hold experts, with their options."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.moe.experts.elementwise import check_elementwise
from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError


class Steps(torch.optim.Optimizer):
    """Gradient descent by ``change``."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.change(parameter, group), alpha=group["lr"])

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad


class MixesIn(Steps):
    """A group that says so."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, mixes: bool = False) -> None:
        super().__init__(params, lr, mixes=mixes)

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad / parameter.grad.norm() if group["mixes"] else parameter.grad


class Inside(Steps):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.Adam(self.param_groups)


class Rounds(Steps):
    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad + 1e-3 * torch.randn_like(parameter)


def experts() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)))


def test_an_optimizer_is_tried_with_the_options_of_the_groups_that_hold_experts() -> None:
    dense, one = nn.Parameter(torch.randn(4, 3)), experts()
    apart = MixesIn([{"params": [dense], "mixes": True}, {"params": [one]}])
    check_elementwise(apart, {id(one)})
    for mixing in (MixesIn([{"params": [dense]}, {"params": [one], "mixes": True}]), MixesIn([one], mixes=True)):
        with pytest.raises(OptimizerStateError, match="MixesIn mixes the experts"):
            check_elementwise(mixing, {id(one)})
    check_elementwise(torch.optim.Adafactor([dense]), {id(one)})


def test_an_optimizer_that_draws_random_numbers_is_warned_of_and_not_called_mixing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_elementwise(Rounds([experts()]))
    assert ["it draws random numbers" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize("name", ["Adafactor", "AdamW"])
def test_small_steps_hide_no_mixing(name: str) -> None:
    optimizer = getattr(torch.optim, name)([experts()], lr=1e-9)
    if name == "AdamW":
        check_elementwise(optimizer)
    else:
        with pytest.raises(OptimizerStateError, match="mixes the experts"):
            check_elementwise(optimizer)


def test_an_optimizer_around_another_is_refused_unless_they_share_their_state() -> None:
    with pytest.raises(OptimizerStateError, match=r"Inside\.inner is a Adam with a state of its own"):
        check_elementwise(Inside([experts()]))
    shared = Inside([experts()])
    shared.inner.state = shared.state
    check_elementwise(shared)


def test_a_trial_leaves_random_numbers_as_they_were() -> None:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1]  # noqa: NPY002
    check_elementwise(Rounds([experts()]))
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])  # noqa: NPY002
