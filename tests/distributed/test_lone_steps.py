"""Optimizers that mix experts, or keep something for them: found when it begins, and experts stay where they are."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from test_averages_of_weights import heard
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.events import GuardFinding
from eplb_runtime.planner.shuffle import plan_shuffle

EXPERTS, STEPS = 8, 8


class OwnStep(torch.optim.Optimizer):
    """Gradient descent; ``change`` is what it adds to a parameter, ``begins`` from which step on it does more."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, begins: int | str = 4) -> None:
        super().__init__(params, {"lr": lr, "begins": begins})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    late = self.steps >= int(group["begins"]) and parameter.ndim == 3
                    parameter.sub_(self.change(parameter, late), alpha=group["lr"])

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return parameter.grad


class LateTrustRatio(OwnStep):
    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return parameter.grad * (parameter.norm() / parameter.grad.norm().clamp(min=1e-6)) if late else parameter.grad


class TrustRatioBetweenDecisions(LateTrustRatio):
    """In no step that ends in one."""

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return super().change(parameter, late and self.steps % 2 == 1)


class LateClipping(OwnStep):
    """By the norm of each tensor, inside."""

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return parameter.grad * (1e-3 / parameter.grad.norm()).clamp(max=1.0) if late else parameter.grad


class PerExpertNorm(OwnStep):
    """Of each expert by itself: nothing is mixed."""

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        if parameter.ndim < 3:
            return parameter.grad
        return parameter.grad / parameter.grad.flatten(1).norm(dim=1).add(1e-6).view(-1, 1, 1)


class Rounds(OwnStep):
    """Experts with noise from torch's generator, from a late step on."""

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return parameter.grad + 1e-3 * torch.randn_like(parameter) if late else parameter.grad


class HiddenInClosure(OwnStep):
    """Momentum that nobody sees: a function keeps it."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, begins: int = 1) -> None:
        super().__init__(params, lr, begins)
        kept: dict[Tensor, Tensor] = {}

        def momentum(parameter: Tensor) -> Tensor:
            kept[parameter] = kept.get(parameter, torch.zeros_like(parameter)) * 0.9 + parameter.grad
            return kept[parameter]

        self.momentum = momentum

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        return self.momentum(parameter)


class InAttribute(OwnStep):
    """Momentum in an attribute, from a late step on."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, begins: int = 4) -> None:
        super().__init__(params, lr, begins)
        self.momenta: dict[Tensor, Tensor] = {}

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        if not late:
            return parameter.grad
        kept = self.momenta.setdefault(parameter, torch.zeros_like(parameter))
        kept.mul_(0.9).add_(parameter.grad)
        return kept


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class LateState(OwnStep):
    """Keeps something odd in its state from a late step on."""

    odd: Callable[[Tensor], Any] = Holder

    def change(self, parameter: Tensor, late: bool) -> Tensor:
        if late:
            self.state[parameter].setdefault("odd", type(self).odd(parameter.grad.clone()))
        return parameter.grad


class LateList(LateState):
    odd = staticmethod(lambda gradient: [gradient])


class LateNumbers(LateState):
    odd = staticmethod(lambda gradient: [1.0] * len(gradient))


class LateArray(LateState):
    odd = staticmethod(lambda gradient: gradient.numpy())


class LateObject(LateState):
    odd = Holder


class OnAList(OwnStep):
    """Each that is made stays on a list."""

    made: ClassVar[list[OnAList]] = []

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        super().__init__(params, **options)
        self.made.append(self)

    def rows(self) -> int:
        """How many single experts it holds."""
        return sum(
            parameter.ndim == 3 and len(parameter) == 1 for group in self.param_groups for parameter in group["params"]
        )


class NeedsMore(OwnStep):
    """Its constructor needs what no default says."""

    def __init__(self, params: Iterable[Any], *, needed: str, lr: float = 1e-2) -> None:
        assert needed
        super().__init__(params, lr)

    change = LateTrustRatio.change


class NeedsMoreAndMixesNothing(NeedsMore):
    change = OwnStep.change


def of(kind: type[torch.optim.Optimizer], **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: kind(model.parameters(), **options)


def late_group(model: nn.Module) -> torch.optim.Optimizer:
    """One param group of experts alone mixes, of the second layer."""
    second = [p for name, p in model.named_parameters() if "layers.1.mlp.experts.down_proj" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in second)]
    return LateTrustRatio([{"params": rest, "begins": 10**6}, {"params": second}])


MOVE: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW in one pass": of(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "Adam with a tensor for lr": of(torch.optim.Adam, lr=torch.tensor(1e-2)),
    "AdamW fused": of(torch.optim.AdamW, lr=1e-2, fused=True),
    "norm of each expert": of(PerExpertNorm),
    "constructor needs more": of(NeedsMoreAndMixesNothing, needed="this"),
}
STAY: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "late trust ratio": (of(LateTrustRatio), "LateTrustRatio does not update each expert of model.layers.0.mlp"),
    "late clipping": (of(LateClipping), "LateClipping does not update each expert"),
    "one group": (late_group, "LateTrustRatio does not update each expert of model.layers.1.mlp.experts.down_proj"),
    "constructor needs more": (of(NeedsMore, needed="this"), "NeedsMore does not update each expert"),
    "in a list": (of(LateList), "'odd' is a list that holds tensors"),
    "numbers": (of(LateNumbers), "keeps 'odd' of model.layers.0.mlp.experts.gate_up_proj as a number for each expert"),
    "in an array": (of(LateArray), "as an array, which would stay behind"),
    "in an object": (of(LateObject), "as a Holder that holds tensors, which would stay behind"),
    "in an attribute": (of(InAttribute), "InAttribute.momenta[...] goes by row, as model.layers.0.mlp.experts"),
}
"""What begins in step 4, and the line that says so."""


def trained(
    rank: int,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    *,
    move: bool = True,
    closures: bool = False,
    on_step: Callable[[int, eplb.Balancer, nn.Module, torch.optim.Optimizer], object] = lambda *_: None,
) -> dict[str, Any]:
    """Epochs after each step, what was said, and the weights at the end."""
    gc.collect()
    model = make_model("olmoe", experts=EXPERTS)
    optimizer = make(model)
    _, lines = heard()
    settings = {"policy": "incremental" if move else "static", "interval": 2, "gate": "always"}
    balancer = eplb.attach(model, optimizer, config=config_from_settings({"dense_gradients": "allreduce", **settings}))
    found: list[str] = []
    balancer.events.subscribe(lambda event: found.append(event.finding) if isinstance(event, GuardFinding) else None)
    balancer._wait_until_compiled()
    balancer._plan_with(plan_shuffle)
    epochs: list[int] = []
    torch.manual_seed(rank)
    for step in range(STEPS):
        ids = batch_of(rank, step)

        def passed() -> Tensor:
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss  # noqa: B023
            loss.backward()
            return loss

        on_step(step, balancer, model, optimizer)
        if closures:
            optimizer.step(passed)
        else:
            passed()
            optimizer.step()
        optimizer.zero_grad()
        epochs.append(balancer.placement.epoch)
    drawn = torch.rand(3).tolist(), random.random(), float(np.random.rand())  # noqa: NPY002
    state = {k: v for k, v in eplb.logical_state_dict(model).items() if isinstance(v, Tensor)}
    balancer.close()
    return {"epochs": epochs, "said": lines(), "found": found, "state": state, "drawn": drawn}


def those_that_move(rank: int) -> dict[str, Any]:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002
    made: dict[str, Any] = {}
    for name, make in MOVE.items():
        closures = name == "AdamW fused"
        made[name] = trained(rank, make, closures=closures), trained(rank, make, move=False)
    return made


def those_that_stay(rank: int) -> dict[str, Any]:
    return {name: trained(rank, make) for name, (make, _) in STAY.items()}


def the_rest(rank: int) -> dict[str, Any]:
    def clamped(step: int, balancer: eplb.Balancer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """By an optimizer's hook, from step 3 on, and weights after it."""
        if step == 3:

            def before(*_: Any) -> None:
                for parameter in model.parameters():
                    parameter.grad.clamp_(-1e-3, 1e-3)

            def after(*_: Any) -> None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-0.5, 0.5)

            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)

    def registers(step: int, balancer: eplb.Balancer, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 5:
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            for parameter, kept in optimizer.momenta.items():
                if names[id(parameter)] in balancer.layer_of_parameter:
                    balancer.register(names[id(parameter)], "momentum", kept)

    listed: list[tuple[int, int]] = []

    def lists(step: int, *_: Any) -> None:
        listed.append((len(OnAList.made), sum(one.rows() for one in OnAList.made)))

    return {
        "noise": trained(rank, of(Rounds)),
        "closures": trained(rank, of(LateTrustRatio), closures=True),
        "hidden": trained(rank, of(HiddenInClosure)),
        "between decisions": trained(rank, of(TrustRatioBetweenDecisions)),
        "hooks": (trained(rank, of(OwnStep), on_step=clamped), trained(rank, of(OwnStep), on_step=clamped, move=False)),
        "registered": (
            trained(rank, of(InAttribute), on_step=registers),
            trained(rank, of(InAttribute), on_step=registers, move=False),
        ),
        # Text: numbers in a group must be the same on all ranks.
        "one rank alone": trained(rank, of(LateTrustRatio, begins="4" if rank else "1000000")),
        "on a list": (trained(rank, of(OnAList), on_step=lists)["epochs"][-1], listed),
    }


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_optimizers_that_step_each_expert_by_itself_move_without_a_word_and_draw_the_same_numbers() -> None:
    for result in run_ranks(2, those_that_move):
        for name, (moved, static) in result.items():
            assert moved["epochs"][-1] >= 3, name
            assert [line for line in moved["said"] if "expert" in line and "cannot be tried" not in line] == [], name
            assert same(moved["state"], static["state"]), name
            assert moved["drawn"][0] == static["drawn"][0], name


def test_what_begins_late_to_mix_experts_or_to_keep_something_is_said_at_the_next_decision_and_nothing_moves() -> None:
    results = run_ranks(2, those_that_stay)
    for name, (_, line) in STAY.items():
        for result in (one[name] for one in results):
            said = [one for one in result["said"] if "experts stay where they are" in one]
            assert len(said) == 1 and line in said[0], (name, result["said"])
            assert said[0] in result["found"], name
            # Moments of the run before may be there yet, and be taken for the user's in the first decision.
            assert result["epochs"][3] <= 1 and len(set(result["epochs"][3:])) == 1, (name, result["epochs"])
    assert sum(one[name]["epochs"][3] for one in results for name in STAY) > len(STAY)


@pytest.fixture(scope="module")
def rest() -> list[dict[str, Any]]:
    return run_ranks(2, the_rest)


def test_an_optimizer_that_draws_random_numbers_is_told_from_one_that_mixes(rest: list[dict[str, Any]]) -> None:
    for result in (one["noise"] for one in rest):
        assert len([line for line in result["said"] if "gives something else when it is repeated" in line]) == 1
        assert result["epochs"][-1] >= 3
        assert not any("experts stay" in line for line in result["said"])


def test_steps_with_a_closure_are_looked_at_too(rest: list[dict[str, Any]]) -> None:
    for result in (one["closures"] for one in rest):
        assert any("LateTrustRatio does not update each expert" in line for line in result["said"])
        assert result["epochs"][3:] == [1] * (STEPS - 3)


def test_mixing_in_steps_that_end_in_no_decision_is_said(rest: list[dict[str, Any]]) -> None:
    for result in (one["between decisions"] for one in rest):
        assert any("TrustRatioBetweenDecisions does not update each expert" in line for line in result["said"])
        assert result["epochs"][3] >= 1 and len(set(result["epochs"][5:])) == 1


def test_what_nobody_sees_shows_in_the_step_of_one_expert(rest: list[dict[str, Any]]) -> None:
    for result in (one["hidden"] for one in rest):
        assert any("HiddenInClosure does not update each expert" in line for line in result["said"])
        assert result["epochs"][-1] == 0


def test_hooks_of_the_users_that_change_gradients_or_weights_are_no_mixing(rest: list[dict[str, Any]]) -> None:
    for moved, static in (one["hooks"] for one in rest):
        assert moved["epochs"][-1] >= 3
        assert not any("experts stay" in line for line in moved["said"])
        assert same(moved["state"], static["state"])


def test_state_in_an_attribute_moves_once_it_is_registered(rest: list[dict[str, Any]]) -> None:
    for moved, static in (one["registered"] for one in rest):
        assert len([line for line in moved["said"] if "momenta[...] goes by row" in line]) == 1
        assert moved["epochs"][3:5] == [1, 1] and moved["epochs"][-1] > 1
        assert same(moved["state"], static["state"])


def test_what_one_rank_finds_holds_for_all(rest: list[dict[str, Any]]) -> None:
    said = [[line for line in one["one rank alone"]["said"] if "experts stay" in line] for one in rest]
    assert said[0] == said[1] and said[0][0].startswith("rank 1: LateTrustRatio")
    assert all(one["one rank alone"]["epochs"][3:] == [1] * (STEPS - 3) for one in rest)


def test_nothing_is_left_in_optimizers_that_were_made_for_single_experts(rest: list[dict[str, Any]]) -> None:
    for epoch, listed in (one["on a list"] for one in rest):
        made, rows = zip(*listed[2:], strict=True)
        assert epoch > 1 and made[-1] > made[0] and rows[-1] == rows[0]
