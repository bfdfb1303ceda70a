"""What graphs of torch.compile call: each time, in the program's order, with gradients, and never twice for one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from eplb_runtime.hosts.attaching.forwards import Forwards
from eplb_runtime.moe import custom_ops
from eplb_runtime.moe.custom_ops import GraphLayer, OutsideGraphs, experts


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(GraphLayer):
    """Stands for a layer: multiplies by a parameter, and writes down that it was called."""

    def __init__(self, name: str, calls: list[str]) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.tensor([3.0]))
        self._name = name
        self._calls = calls

    def __call__(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return experts(self.number, hidden, ids, weights, [self.parameter])

    def forward(self, hidden: Tensor, ids: Tensor, weights: Tensor, learns: Sequence[bool]) -> tuple[Tensor, Any]:
        self._calls.append(f"{self._name}{'' if any(learns) else ' without gradients'}")
        return hidden * weights * self.parameter.detach(), (hidden.clone(), weights.clone(), learns)

    def backward(self, kept: Any, grad: Tensor) -> Sequence[Tensor]:
        self._calls.append(f"{self._name} back")
        hidden, weights, learns = kept
        scale = self.parameter.detach()
        of = (grad * weights * scale, grad * hidden * scale, (grad * hidden * weights).sum().reshape(1))
        return [gradient for gradient, need in zip(of, learns, strict=True) if need]


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weights = (torch.rand(4, 2, generator=generator).requires_grad_() for _ in range(2))
    return hidden, torch.zeros(4, 2, dtype=torch.int64), weights


def in_order(first: Scaled, second: Scaled) -> Callable[..., Tensor]:
    """Two that need nothing of each other: only the program says which is first."""
    return lambda *given: first(*given).relu() + second(*given)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_calls_that_need_nothing_of_each_other_come_in_the_programs_order_with_gradients(backend: str) -> None:
    calls: list[str] = []
    first, second = Scaled("first", calls), Scaled("second", calls)
    given = inputs()
    compiled = torch.compile(in_order(first, second), backend=backend, fullgraph=True)
    compiled(*given).sum().backward()
    assert calls == ["first", "second", "second back", "first back"]
    hidden, _, weights = given
    assert torch.equal(hidden.grad, 6 * weights.detach()) and torch.equal(weights.grad, 6 * hidden.detach())
    assert torch.allclose(first.parameter.grad, (hidden * weights).sum().detach())


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_call_is_neither_dropped_nor_taken_for_one_like_it(backend: str) -> None:
    calls: list[str] = []
    layer = Scaled("layer", calls)

    def thrice(*given: Any) -> Tensor:
        layer(*given)  # nobody looks at what it gives
        return layer(*given) + layer(*given)

    with torch.no_grad():
        torch.compile(thrice, backend=backend, fullgraph=True)(*inputs())
    assert calls == ["layer without gradients"] * 3


def test_other_layers_share_one_graph_and_each_batch_has_a_backward_of_its_own() -> None:
    calls: list[str] = []
    layers = [Scaled(f"{number}", calls) for number in range(4)]
    given = inputs()
    compiled = torch.compile(lambda layer, *given: layer(*given), backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    results = [compiled(layer, *given).sum() for layer in layers]
    for result in results:  # not the one that came last
        result.backward()
    assert calls == ["0", "1", "2", "3", "0 back", "1 back", "2 back", "3 back"]
    assert all(torch.equal(layer.parameter.grad, layers[0].parameter.grad) for layer in layers)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2


def test_what_a_forward_keeps_is_let_go_with_its_backward_or_without_one() -> None:
    layer, given = Scaled("layer", []), inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    before = len(custom_ops._saved)
    compiled(*given).sum().backward()
    loss = compiled(*given).sum()
    loss.backward()
    assert torch.allclose(layer.parameter.grad, 2 * (given[0] * given[2]).sum().detach())
    unused = compiled(*given)
    assert len(custom_ops._saved) > before, "the control: something is kept"
    del loss, unused
    gc.collect()
    assert len(custom_ops._saved) == before


@pytest.mark.parametrize("inside", [False, True])
def test_recompute_in_a_graph_and_around_one(inside: bool) -> None:
    calls: list[str] = []
    layers = [Scaled("first", calls), Scaled("second", calls)]
    given = inputs()

    def forward(run: Callable[..., Any]) -> Tensor:
        hidden, ids, weights = given
        for layer in layers:
            hidden = checkpoint(run(layer), hidden.sin(), ids, weights, use_reentrant=False)
        return hidden.sum()

    def compiled(work: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(work, backend="aot_eager", fullgraph=True)

    loss = compiled(lambda: forward(lambda layer: layer))() if inside else forward(compiled)
    loss.backward()
    assert calls[:2] == ["first", "second"] and calls[-1] == "first back"
    found = [tensor.grad.clone() for tensor in (given[0], given[2], layers[0].parameter)]
    for tensor in (given[0], given[2], layers[0].parameter):
        tensor.grad = None
    hidden, _, weights = given
    for layer in layers:
        hidden = hidden.sin() * weights * layer.parameter
    hidden.sum().backward()
    for one, tensor in zip(found, (given[0], given[2], layers[0].parameter), strict=True):
        torch.testing.assert_close(one, tensor.grad)


def test_a_graph_that_keeps_little_repeats_no_layer() -> None:
    calls: list[str] = []
    layers = [Scaled(name, calls) for name in ("one", "two")]

    def run(hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        for layer in layers:
            hidden = layer((hidden * 1.1).sin().exp().tanh(), ids, weights.sigmoid()).sin()
        return hidden

    kept, little = inputs(), inputs()
    with functorch_config.patch(aggressive_recomputation=True):
        torch.compile(run, backend="aot_eager")(*little).sum().backward()
    assert calls == ["one", "two", "two back", "one back"]
    torch._dynamo.reset()
    torch.compile(run, backend="aot_eager")(*kept).sum().backward()
    torch.testing.assert_close(little[0].grad, kept[0].grad)


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_a_graph_that_may_repeat_a_layer_is_refused(budget: float) -> None:
    layer = Scaled("one", [])
    run = torch.compile(lambda *given: layer(*given).sin(), backend="aot_eager")
    with (
        functorch_config.patch(activation_memory_budget=budget),
        pytest.raises(Exception, match="activation_memory_budget below 1"),
    ):
        run(*inputs())


def test_saved_tensors_that_are_copied_are_refused() -> None:
    layer, given = Scaled("layer", []), inputs()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        loss = compiled(*given).sum()
    gc.collect()
    with pytest.raises(RuntimeError, match="saved_tensors_hooks"):
        loss.backward()


def test_a_layer_that_is_gone_is_named() -> None:
    layer, given = Scaled("layer", []), inputs()
    number, parameter = layer.number, layer.parameter
    compiled = torch.compile(lambda *given: experts(number, *given, [parameter]), backend="aot_eager", fullgraph=True)
    compiled(*given)
    del layer
    gc.collect()
    with pytest.raises(RuntimeError, match="compile the model again"):
        compiled(*given)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_call_outside_is_made_each_time_in_its_mode_with_a_copy(backend: str) -> None:
    seen: list[Any] = []
    outside = OutsideGraphs(lambda tensor: seen.append((torch.is_grad_enabled(), tensor)))

    def program(tensor: Tensor) -> Tensor:
        double = tensor * 2
        outside(double)
        outside()
        return double.add_(1)

    compiled = torch.compile(program, backend=backend, fullgraph=True)
    compiled(torch.ones(2))
    with torch.no_grad():
        compiled(torch.ones(2))
    assert [(grad, tensor is None) for grad, tensor in seen] == [
        (True, False),
        (True, True),
        (False, False),
        (False, True),
    ]
    assert torch.equal(seen[0][1], torch.tensor([2.0, 2.0]))


def test_a_call_comes_between_what_inductor_fuses() -> None:
    outside = OutsideGraphs(lambda _: None)
    weights = torch.linspace(0, 1, 96 * 32).reshape(96, 32).requires_grad_()

    def program(tensor: Tensor, labels: Tensor) -> Tensor:
        outside()
        logits = (tensor * 2) @ weights.t()
        labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
        loss = torch.nn.functional.cross_entropy(logits, labels.reshape(-1))
        outside()
        return loss

    given = torch.ones(24, 32), torch.arange(24).reshape(2, 12)
    compiled = torch.compile(program, backend="inductor", fullgraph=True)
    torch.testing.assert_close(compiled(*given), program(*given))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_forward_that_fails_has_ended_when_the_next_begins(compiled: bool) -> None:
    told: list[str] = []

    def fail(tensor: Tensor | None) -> None:
        if tensor is not None and tensor[0] < 0:
            raise ValueError("a layer fails")

    layer = OutsideGraphs(fail)

    class Model(torch.nn.Module):
        def forward(self, tensor: Tensor) -> Tensor:
            layer(tensor)
            return tensor * 2

    balancer = SimpleNamespace(_before_forward=lambda: told.append("begins"), _after_forward=told.append)
    model = Model()
    Forwards(balancer, SimpleNamespace(model=model), frozenset({1}))  # type: ignore[arg-type]
    run = torch.compile(lambda tensor: model(tensor), backend="aot_eager", fullgraph=True) if compiled else model
    run(torch.ones(1))
    with pytest.raises(ValueError, match="a layer fails"):
        run(-torch.ones(1))
    run(torch.ones(1))
    assert told == ["begins", {1}] * 3
