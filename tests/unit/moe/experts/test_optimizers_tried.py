"""Optimizers as they are tried at attach: of their own groups, with what they keep, and made anew without a trace."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from eplb_runtime.moe.experts import element_wise
from eplb_runtime.moe.experts.element_wise import check_element_wise
from eplb_runtime.moe.experts.lone_step import LoneSteps, is_due
from eplb_runtime.moe.experts.made_anew import Arguments, copied, is_plain, made_anew, unnoticed
from eplb_runtime.moe.experts.optimizer_state import OptimizerStateError
from eplb_runtime.moe.experts.unmoved import unmoved


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


class InTraining(Steps):
    """As schedule-free ones: steps in a mode of its own alone."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr, train_mode=False)

    def train(self) -> None:
        for group in self.param_groups:
            group["train_mode"] = True

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        assert group["train_mode"]
        return parameter.grad


class KeepsArray(Steps):
    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter].setdefault("history", np.zeros(tuple(parameter.shape)))
        return parameter.grad


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value


class KeepsObject(Steps):
    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        self.state[parameter].setdefault("history", Holder(torch.zeros_like(parameter)))
        return parameter.grad


class KeepsNumbers(Steps):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.scales: defaultdict[Tensor, list[float]] = defaultdict(list)

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        self.scales[parameter] = [1.0] * len(parameter)
        return parameter.grad


class Inside(Steps):
    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, lr)
        self.inner = torch.optim.Adam(self.param_groups)


class Rounds(Steps):
    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad + 1e-3 * torch.randn_like(parameter)


def experts() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (KeepsArray, "keeps 'history' of a tensor of experts as an array, which would stay behind"),
        (KeepsObject, "as a Holder that holds tensors, which would stay behind"),
        (KeepsNumbers, r"KeepsNumbers.scales\[...\] has a number for each expert"),
        (Inside, "Inside.inner is a Adam with a state of its own for a tensor of experts"),
    ],
)
def test_what_would_stay_behind_is_refused_in_one_line(kind: type[torch.optim.Optimizer], said: str) -> None:
    with pytest.raises(OptimizerStateError, match=said):
        check_element_wise(kind([experts()]))


def test_an_optimizer_is_tried_with_the_options_of_the_groups_that_hold_experts() -> None:
    dense, one = nn.Parameter(torch.randn(4, 3)), experts()
    apart = MixesIn([{"params": [dense], "mixes": True}, {"params": [one]}])
    check_element_wise(apart, {id(one)})
    for mixing in (MixesIn([{"params": [dense]}, {"params": [one], "mixes": True}]), MixesIn([one], mixes=True)):
        with pytest.raises(OptimizerStateError, match="MixesIn mixes the experts"):
            check_element_wise(mixing, {id(one)})
    check_element_wise(torch.optim.Adafactor([dense]), {id(one)})


def test_another_librarys_optimizer_is_tried_where_its_parameters_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may know no tensors on a CPU, as TransformerEngine's and Apex's; torch's own know them."""
    tried: list[torch.device] = []

    def note(optimizer: Any, options: Any, dtype: torch.dtype, device: torch.device, *rest: Any) -> Any:
        tried.append(device)
        return own(optimizer, options, dtype, torch.device("cpu"), *rest)

    own = element_wise._tried
    monkeypatch.setattr(element_wise, "_tried", note)
    monkeypatch.setattr(element_wise, "unnoticed", lambda devices: nullcontext(tried.append(devices)))
    dense, one = nn.Parameter(torch.randn(4, 3)), experts()
    there = torch.device("cuda", 1)
    for kind in (InTraining, torch.optim.AdamW):
        optimizer = kind([dense, one])
        on_gpu = SimpleNamespace(ndim=3, device=there)
        optimizer.param_groups[0]["params"] = [dense, on_gpu]
        check_element_wise(optimizer, {id(on_gpu)})
    assert tried == [[1], there, [], torch.device("cpu")]


def test_an_optimizer_that_draws_random_numbers_is_warned_of_and_not_called_mixing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_element_wise(Rounds([experts()]))
    assert ["it draws random numbers" in record.getMessage() for record in caplog.records] == [True]


def test_an_optimizer_with_a_mode_of_its_own_is_tried_in_training() -> None:
    check_element_wise(InTraining([experts()]))


@pytest.mark.parametrize("name", ["Adafactor", "AdamW"])
def test_small_steps_hide_no_mixing(name: str) -> None:
    optimizer = getattr(torch.optim, name)([experts()], lr=1e-9)
    if name == "AdamW":
        check_element_wise(optimizer)
    else:
        with pytest.raises(OptimizerStateError, match="mixes the experts"):
            check_element_wise(optimizer)


def test_what_is_made_anew_shares_nothing_and_has_the_numbers_of_now() -> None:
    one = experts()
    optimizer = torch.optim.AdamW([{"params": [one], "lr": torch.tensor(0.5)}], betas=(0.8, 0.9), amsgrad=True)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    optimizer.extra = {"numbers": [1, 2], "tensor": torch.tensor(3.0)}  # type: ignore[attr-defined]
    optimizer.held = [one]  # type: ignore[attr-defined]
    other = torch.zeros(1, 3, 5, requires_grad=True)
    made = made_anew(optimizer, [(optimizer.param_groups[0], [other])])
    group, twin = made.optimizer.param_groups[0], made.optimizer
    assert made.why_not_whole == "" and group["params"] == [other] and not twin.state
    assert group["betas"] == (0.8, 0.9) and group["weight_decay"] == 0.25 and group["amsgrad"]
    assert group["lr"] == 0.5 and group["lr"] is not optimizer.param_groups[0]["lr"]
    assert twin.extra["numbers"] == [1, 2] and twin.extra["tensor"] is not optimizer.extra["tensor"]  # type: ignore
    assert not hasattr(twin, "held"), "it could write the weights that the first one steps"


def test_random_numbers_and_what_is_printed_are_as_if_nothing_had_run(capsys: pytest.CaptureFixture[str]) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.rand())  # noqa: NPY002

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    expected = draw()
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])  # noqa: NPY002
    with unnoticed([]):
        draw()
        print("inside")
    print("outside")
    assert draw() == expected and capsys.readouterr().out == "outside\n"


def judged(
    optimizer: torch.optim.Optimizer,
    parameters: dict[str, nn.Parameter],
    steps: int = 3,
    call: Arguments = Arguments(),  # noqa: B008
) -> list[str]:
    """What is said after each step."""
    lone = LoneSteps(parameters, set, lambda: True)
    said = []
    for step in range(steps):
        for parameter in parameters.values():
            generator = torch.Generator().manual_seed(step)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        lone.before(optimizer, call)
        optimizer.step(*call.positional, **call.named)
        lone.after(optimizer)
        said.append(lone.judge(lone.take()))
    return said


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Rprop", "ASGD", "NAdam", "RAdam"])
def test_a_step_of_one_expert_is_that_of_all_to_rounding(name: str, dtype: torch.dtype) -> None:
    parameters = {f"layer {n}": nn.Parameter(torch.randn(4, 37, 29).to(dtype)) for n in range(2)}
    assert judged(getattr(torch.optim, name)(parameters.values(), lr=1e-3), parameters, 5) == [""] * 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_step_that_mixes_experts_is_told_from_rounding(dtype: torch.dtype) -> None:
    parameters = {f"layer {n}": nn.Parameter(torch.randn(4, 37, 29).to(dtype)) for n in range(2)}
    said = judged(MixesIn(parameters.values(), lr=1.0, mixes=True), parameters, 1)
    assert said[0].startswith("MixesIn does not update each expert of layer 0 by itself")


def test_rows_are_stepped_in_portions_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_runtime.moe.experts.lone_step._AT_ONCE_BYTES", 1)
    parameters = {f"layer {n}": nn.Parameter(torch.randn(4, 3, 5)) for n in range(3)}
    assert judged(torch.optim.AdamW(parameters.values()), parameters) == [""] * 3
    last = [{"params": list(parameters.values())[:2]}, {"params": [parameters["layer 2"]], "mixes": True}]
    assert "layer 2" in judged(MixesIn(last), parameters)[0]


def test_what_is_registered_is_not_refused() -> None:
    one = experts()
    optimizer = Steps([one])
    optimizer.kept = Holder([torch.zeros_like(one)])  # type: ignore[attr-defined]
    assert [seen.may_be_registered for seen in unmoved(optimizer, {"w": one})] == [True]
    registered = {optimizer.kept.value[0].data_ptr()}  # type: ignore[attr-defined]
    assert [seen.said for seen in unmoved(optimizer, {"w": one}, registered)] == [""]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS, torch.optim.SGD])
def test_optimizers_of_torchs_hold_nothing_out_of_sight(kind: type[torch.optim.Optimizer]) -> None:
    one = experts()
    optimizer = kind([one], lr=0.1)
    one.grad = torch.ones_like(one)
    optimizer.step(lambda: 1.0)
    assert kind is torch.optim.LBFGS or list(unmoved(optimizer, {"w": one})) == []


class Scaled(Steps):
    """A step that asks for a number, and takes another."""

    @torch.no_grad()
    def step(self, scale: float, *, times: float = 1.0) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(self.change(parameter, group), alpha=group["lr"] * scale * times)


class ScaledAndMixed(Scaled):
    change = MixesIn.change


def test_a_step_that_asks_for_more_than_a_closure_is_stepped_alone_with_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameters = {"w": experts()}
    scaled = Scaled(parameters.values())
    check_element_wise(scaled)
    assert ["asks for more than a closure" in record.getMessage() for record in caplog.records] == [True]
    assert judged(scaled, parameters, call=Arguments((3.0,), {"times": 2.0})) == [""] * 3
    mixing = ScaledAndMixed(parameters.values(), mixes=True)
    assert "by itself" in judged(mixing, parameters, call=Arguments((3.0,), {"times": 2.0}))[0]
    assert len(caplog.records) == 1


def test_a_step_that_is_given_an_object_is_not_stepped_alone(caplog: pytest.LogCaptureFixture) -> None:
    parameters = {"w": experts()}
    call = Arguments(named={"closure": None, "other": torch.zeros(2)})
    lone = LoneSteps(parameters, set, lambda: True)
    parameters["w"].grad = torch.ones_like(parameters["w"])
    lone.before(Steps(parameters.values()), call)
    assert "its step is given a Tensor" in caplog.text and not lone.take()


def test_experts_are_stepped_alone_in_two_steps_of_an_interval_at_most_and_at_each_place_of_it_in_time() -> None:
    for interval in (1, 2, 7, 50):
        due = np.array([is_due(step, interval) for step in range(interval * 3 * interval)]).reshape(-1, interval)
        assert due[:, -1].all() and due.sum(axis=1).max() <= 2
        assert due.any(axis=0).all()


class Schedule:
    """Numbers, and a method."""

    def __init__(self, scale: float) -> None:
        self.scales = {"first": [scale]}

    def __call__(self) -> float:
        return self.scales["first"][0]


class Scheduled(Steps):
    """By what its user gives, or nothing."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, schedule: Any = None) -> None:
        super().__init__(params, lr)
        self.schedule = schedule or (lambda: 1.0)

    def change(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        return parameter.grad * self.schedule()


def constant(scale: float) -> Callable[[], float]:
    return lambda: scale


def counting(scale: float) -> Callable[[], float]:
    def more() -> float:
        nonlocal scale
        scale += 1.0
        return scale

    return more


@pytest.mark.parametrize(
    "schedule", [Schedule(3.0), constant(3.0), partial(pow, 3.0, 2.0)], ids=lambda one: str(type(one))
)
def test_schedules_in_objects_and_closures_of_numbers_are_no_mixing(schedule: Any) -> None:
    parameters = {"w": experts()}
    assert judged(Scheduled(parameters.values(), schedule=schedule), parameters) == [""] * 3


def test_what_is_handed_over_shares_no_memory_and_what_writes_is_not_handed_over() -> None:
    first = Schedule(3.0)
    assert is_plain(first)
    copied(first).scales["first"][0] = 4.0
    assert first() == 3.0
    first.scales["first"].append(torch.zeros(2))  # type: ignore[arg-type]
    itself = Schedule(1.0)
    itself.scales["first"].append(itself)  # type: ignore[arg-type]
    kept: dict[Tensor, Tensor] = {}
    cannot = [first, itself, counting(1.0), lambda: kept, partial(kept.get, 1), experts()]
    assert [is_plain(one) for one in cannot] == [False] * len(cannot)
