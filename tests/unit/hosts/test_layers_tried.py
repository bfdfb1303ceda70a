"""What `attach` finds out of a layer by a few rows, before its experts are spread."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.moe_models import make_model
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.hosts import module as own
from eplb_runtime.hosts.attaching.checks import try_layers
from eplb_runtime.hosts.attaching.description import MoELayer
from eplb_runtime.hosts.module import MoE, _users
from eplb_runtime.hosts.transformers.describe import describe
from eplb_runtime.moe.experts.compute import SlotCounts

EXPERTS, WIDTH = 6, 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)


class Layer(nn.Module):
    """A sum over choices, and what a case adds."""

    def __init__(self, more: Callable[[Layer, Tensor, Tensor], Tensor] = lambda layer, out, hidden: out) -> None:
        super().__init__()
        self.experts = Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self._more = more

    def run_experts(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.calls += 1
        self.seen += len(hidden)
        out = torch.zeros_like(hidden)
        for expert, matrix in enumerate(self.experts.weight):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            out = out.index_add(0, token, hidden[token] @ matrix * weights[token, choice, None])
        return self._more(self, out, hidden)


def rows_through(rows: Tensor, counts: SlotCounts, tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat(
        [part @ matrix for part, matrix in zip(rows.split(counts.known()), tensors["weight"], strict=True)]
    )


def said(layer: nn.Module, compute: Any = rows_through, **config: Any) -> tuple[str, list[str]]:
    host = own.describe(layer, [eplb.MoE("experts", run="run_experts", compute=compute)])
    return tried(host.layers, **{"guard": "auto", **config})


def tried(layers: Sequence[MoELayer], guard: str = "auto") -> tuple[str, list[str]]:
    tests = try_layers(layers, guard)
    drawing = [layer.name for layer, test in zip(layers, tests, strict=True) if test.draws]
    return next((test.problem for test in tests if test.problem), ""), drawing


def capped(layer: Layer, out: Tensor, hidden: Tensor) -> Tensor:
    return torch.cat([out[:8], torch.zeros_like(out[8:])])


def first_doubled(rows: Tensor, counts: SlotCounts, tensors: Mapping[str, Tensor]) -> Tensor:
    out = rows_through(rows, counts, tensors)
    return torch.cat([2 * out[: counts.known()[0]], out[counts.known()[0] :]])


def centred(rows: Tensor, counts: SlotCounts, tensors: Mapping[str, Tensor]) -> Tensor:
    out = rows_through(rows, counts, tensors)
    return out - out.mean(dim=0)


RUNS = {
    "a shared expert": lambda layer, out, hidden: out + layer.shared(hidden),
    "a factor": lambda layer, out, hidden: 2.5 * out,
    "a capacity": capped,
}


@pytest.mark.parametrize("more", RUNS)
def test_a_run_that_does_more_than_its_experts_is_said(more: str) -> None:
    problem, _ = said(Layer(RUNS[more]))
    assert problem.startswith("the method that attach replaces must return the sum of") and "\n" not in problem
    assert said(Layer(RUNS[more]), guard="off") == ("", [])


@pytest.mark.parametrize(("compute", "words"), [(first_doubled, "the slot's number"), (centred, "that row alone")])
def test_a_compute_that_goes_by_slots_or_by_other_rows_is_said(compute: Any, words: str) -> None:
    assert words in said(Layer(), compute)[0]


def test_dropout_in_experts_is_said_and_is_no_problem() -> None:
    layer = Layer()

    def dropped(rows: Tensor, counts: SlotCounts, tensors: Mapping[str, Tensor]) -> Tensor:
        return functional.dropout(rows_through(rows, counts, tensors), 0.5, layer.training)

    for training in (True, False):
        assert said(layer.train(training), dropped) == ("", ["experts"])
        assert layer.training == layer.experts.training == training


def test_right_layers_are_silent_and_stay_as_they_were() -> None:
    layer = Layer()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]  # noqa: NPY002
    assert said(layer) == ("", [])
    assert layer.calls == 0 and layer.seen == 0
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert states[2] == np.random.get_state()[2]  # noqa: NPY002


def test_a_run_that_cannot_be_called_by_itself_is_left_out() -> None:
    def refuses(layer: Layer, out: Tensor, hidden: Tensor) -> Tensor:
        raise RuntimeError("not now")

    assert said(Layer(refuses)) == ("", [])


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_of_the_library_are_silent(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, experts=8).to(dtype)
    layers = describe(model).layers
    assert layers and tried(layers) == ("", [])


def test_weights_that_a_module_of_the_library_changes_itself_are_said() -> None:
    model = make_model("olmoe", experts=8)
    experts = model.model.layers[0].mlp.experts
    forward = experts.forward
    experts.forward = lambda *given: 1.5 * forward(*given)
    # Its rows go through the forward that it has, too: weights in the router's place tell them apart.
    assert tried(describe(model).layers) == ("", [])
    experts.forward = lambda hidden, ids, weights: forward(hidden, ids, weights / weights.sum(-1, keepdim=True))
    assert "the sum of router weight times expert output" in tried(describe(model).layers)[0]


# -- Experts of a list that do not compute alike are not stacked, wherever the difference is kept


LISTED, LISTED_WIDTH = 4, 16
ODD = 2
LAYERS = [eplb.MoE("experts", run="run_experts")]


class Expert(nn.Module):
    """Multiplies by what a function makes of its attribute ``way``."""

    def __init__(self, way: Any, slope_of: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.up = nn.Linear(LISTED_WIDTH, 2 * LISTED_WIDTH)
        self.down = nn.Linear(2 * LISTED_WIDTH, LISTED_WIDTH)
        self._way = way
        self._slope_of = slope_of

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.up(rows)
        return self.down(functional.leaky_relu(hidden, 0.1) * self._slope_of(self._way, hidden))


def model_of(*ways: Any, slope_of: Callable[[Any, Tensor], Any] = lambda way, hidden: way) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Module()
    model.experts = nn.ModuleList(Expert(way, slope_of) for way in ways)
    return model


def odd_one(way: Callable[[float], Any], slope_of: Callable[[Any, Tensor], Any]) -> nn.Module:
    return model_of(*(way(0.5 if number == ODD else 1.0) for number in range(LISTED)), slope_of=slope_of)


WAYS: dict[str, tuple[Callable[[float], Any], Callable[[Any, Tensor], Any]]] = {
    "a number": (lambda slope: slope, lambda way, hidden: way),
    "a dict": (lambda slope: {"slope": slope}, lambda way, hidden: way["slope"]),
    "a tensor": (torch.tensor, lambda way, hidden: way),
}


def refusal(model: nn.Module) -> str:
    """What is said; the model is as it was."""
    before, random = dict(model.named_parameters()), torch.get_rng_state()
    with pytest.raises(AttachError) as raised:
        eplb.stack_experts(model, LAYERS)
    assert isinstance(model.experts, nn.ModuleList)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(now is before[name] and now.grad is None for name, now in model.named_parameters())
    said = str(raised.value)
    assert "\n" not in said and len(said) < 420
    return said


@pytest.mark.parametrize("kept_as", WAYS)
def test_an_expert_with_another_setting_is_named(kept_as: str) -> None:
    way, slope_of = WAYS[kept_as]
    said = refusal(odd_one(way, slope_of))
    assert f"experts.{ODD} gives other results" in said
    eplb.stack_experts(model_of(*[way(1.0)] * LISTED, slope_of=slope_of), LAYERS)


def test_a_rebound_forward_computes_with_another_experts_weights() -> None:
    model = model_of(*[1.0] * LISTED)
    model.experts[ODD].forward = model.experts[0].forward
    assert f"experts.{ODD} gives other results" in refusal(model)


def test_what_a_compute_sorts_it_sorts_stably() -> None:
    keys, asked = torch.arange(1000) % 3, []

    class Asked(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((kwargs or {}).get("stable"))
            return func(*args, **(kwargs or {}))

    def compute(rows: torch.Tensor, *_: object) -> torch.Tensor:
        return rows[torch.argsort(keys)] + rows[keys.sort(0).indices]

    rows = torch.arange(1000)
    with Asked():
        found = _users(MoE("experts", "run_experts", compute), ())(rows, (), ())
    assert torch.equal(found, 2 * rows[keys.argsort(stable=True)]) and asked.count(True) >= 2
