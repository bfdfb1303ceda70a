"""Expert work of a model that is only watched: the calls of its experts are marked, and nothing else changes."""

from collections.abc import Callable, Collection
from copy import deepcopy
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.examples import load_example
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eplb_runtime.balancer.loop_state import LoopHooks, LoopState
from eplb_runtime.config import BalancerConfig, DispatchConfig
from eplb_runtime.hosts.attaching import state_hooks
from eplb_runtime.hosts.attaching.checks import AttachError, _initial_placement, _of_device, _of_models
from eplb_runtime.hosts.attaching.expert_spans import watch_calls
from eplb_runtime.hosts.attaching.optimizers import Optimizers, _Stepper, follow_forwards
from eplb_runtime.hosts.attaching.trial import _name_of, holder_of, unregistered
from eplb_runtime.hosts.transformers.describe import _Padding
from eplb_runtime.hosts.transformers.folders import _cut_by, _specs
from eplb_runtime.load import counter as load_counter
from eplb_runtime.load.clock import ExpertClock
from eplb_runtime.moe.experts.registry import ExpertTensors


class FakeClock(ExpertClock):
    now = 0.0

    def mark(self) -> float:
        return self.now


class Slow(torch.autograd.Function):
    """Takes 1 s of the clock forward and 2 s backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: FakeClock, forward: float, backward: float) -> Tensor:
        ctx.clock, ctx.seconds = clock, backward
        clock.now += forward
        return x * 1.5

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.now += ctx.seconds
        return gradient * 1.5, None, None, None


class Experts(nn.Module):
    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return Slow.apply(hidden_states, self.clock, 1.0, 2.0)


class Block(nn.Module):
    """Attention of 10 s and 20 s, and experts."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock, self.experts = clock, Experts(clock)
        self.by_name = False

    def forward(self, x: Tensor) -> Tensor:
        x = Slow.apply(x, self.clock, 10.0, 20.0)
        return x + (self.experts(x, weights=x, ids=x) if self.by_name else self.experts(x, x, x))


def gradient(block: Block, checkpointing: bool = False) -> Tensor:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    out = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
    out.square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("checkpointing, seconds", [(False, 3.0), (True, 4.0)])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_call_and_its_backward_pass_count_and_nothing_around_them(
    checkpointing: bool, seconds: float, by_name: bool
) -> None:
    clock = FakeClock()
    block = Block(clock)
    block.by_name = by_name
    undo = watch_calls(block.experts, "forward", lambda ids, weights: ids, lambda *shown: None, clock)
    assert (copy := deepcopy(block.experts)).forward.__self__ is copy, "it computes with its own weights"
    plain = gradient(block, checkpointing)
    assert clock.take() == (), "off: nothing is recorded"
    before = clock.now
    clock.begin_step()
    marked = gradient(block, checkpointing)
    clock.end_step()
    assert torch.equal(plain, marked)
    (step,) = clock.take()
    assert step.time() == (clock.now - before, seconds)
    for end in (block.eval, block.train, undo):
        end()
        clock.begin_step()
        gradient(block)
        clock.end_step()
        assert bool(clock.take()) == (end == block.train), "evaluation is not measured, and nothing once it is undone"


# -- What `eplb-runtime verify` looks for at the end of a run: tensors that may be experts, and who holds them


SHAPE = (2, 7, 13)


class Average:
    """Keeps something in a list."""

    def __init__(self, kept: object) -> None:
        self.shadow = [kept]


def found(thing: Any) -> list[str]:
    """What is found in a loop that keeps this."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(SHAPE))
    registry = ExpertTensors(1, SHAPE[0], [])
    registry.add(0, "weight", model.weight)
    average = {"averages": [Average(thing)]}
    assert average
    listed = unregistered([model], registry, [])  # of other tests there may be such things
    assert all(one is not model.weight for one in listed)
    return [holder_of(one, listed) for one in listed if one is thing]


@pytest.mark.parametrize(
    "make", [lambda: torch.ones(SHAPE, dtype=torch.int16), lambda: torch.ones(182), lambda: torch.ones(7, 13).half()]
)
def test_an_average_is_found_in_any_number_format_and_its_owner_is_named(make: Callable[[], Any]) -> None:
    (holder,) = found(make())
    assert holder == "an object of Average" or holder.startswith("variable ")


def test_what_is_no_expert_or_the_models_own_is_not_listed() -> None:
    assert not found(torch.ones(3, 7)) and not found(torch.ones(12))


def test_a_module_is_named_but_for_those_of_frameworks() -> None:
    names = [_name_of(ModuleType(name), {}) for name in ("averages", "numba.tables")]
    assert names == ["module averages", ""]


# -- A walk hands out copies of experts that are elsewhere, and notices what is written to them, however it is written


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda tensor: tensor.add_(1),
    "through data": lambda tensor: tensor.data.add_(1),
    "replaced": lambda tensor: setattr(tensor, "data", tensor.data + 1),
}


def walked(write: Callable[[Tensor], object], *, is_elsewhere: bool) -> list[str]:
    """Names that a walk over two experts has handed out; ``write`` is called with each."""
    walk = object.__new__(load_example("rl_weights").Walk)
    walk._at_launch = lambda name, tensor: tensor.clone() if is_elsewhere else tensor
    seen = []
    for name, tensor in walk.pairs([("first", torch.zeros(8, 100)), ("second", torch.zeros(8, 100))], str):
        write(tensor)
        seen.append(name)
    return seen


@pytest.mark.parametrize("way", WRITES)
def test_what_is_written_to_a_copy_raises(way: str) -> None:
    with pytest.raises(RuntimeError, match=r"^first was written to, and it is a copy of an expert"):
        walked(WRITES[way], is_elsewhere=True)
    assert walked(WRITES[way], is_elsewhere=False) == ["first", "second"], "the model's own may be written to"


def test_what_is_read_does_not_raise() -> None:
    assert walked(lambda tensor: tensor.sum(), is_elsewhere=True) == ["first", "second"]
    with torch.inference_mode():
        assert walked(lambda tensor: tensor.sum(), is_elsewhere=True) == ["first", "second"]


def test_a_conversion_that_regroups_pairs_of_experts_is_no_cut() -> None:
    def convert(state: dict[str, Tensor]) -> dict[str, Tensor]:
        pairs = [*range(0, len(state["w"]), 2), *range(1, len(state["w"]), 2)]
        return {f"{number}.w": state["w"][expert] for number, expert in enumerate(pairs)}

    whole = torch.empty(6, 2, 3, device="meta")
    assert _cut_by("w", whole, _specs(convert({"w": whole})), 6, convert, {}) is None


# -- Steps that raise or come twice, and a state that another rank refuses


def test_a_step_that_raised_is_forgotten_and_one_that_comes_twice_is_refused() -> None:
    steps, optimizer = Optimizers.__new__(Optimizers), Mock()
    steps._balancer = balancer = Mock()
    steps._known = known = [_Stepper(optimizer, 1) for _ in range(2)]
    steps._before_step(known[0], optimizer, (), {})  # and it raised
    steps.on_forward_begin(True)
    for one in known:
        steps._before_step(one, optimizer, (), {})
        steps._after_step(one)
    balancer.step.assert_called_once()
    steps._after_step(known[0])
    with pytest.raises(RuntimeError, match="optimizer 0 of the attached ones has stepped twice, number 1 not at all"):
        steps._after_step(known[0])


def test_a_state_that_another_rank_refuses_is_refused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_hooks, "barrier", lambda *_, **__: "rank 1: other experts")
    balancer = Mock(closed=False, runtime=Mock(job=Mock(ep_ranks=(0, 1))))
    with pytest.raises(RuntimeError, match="rank 1: other experts"):
        state_hooks._refuse_on_all(balancer, "a model", "")


# -- A process that works on another GPU than its model's: what that may not change, and what is refused


def test_the_model_is_on_the_gpu_that_the_process_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    asked = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:1", "cpu", "cuda:0")]
    (refused,) = (line for one in asked for line in _of_device(one))
    assert "on cuda:0, and this process works on GPU 1: call torch.cuda.set_device(0)" in refused


def test_models_that_cannot_be_spread_are_refused_in_a_line() -> None:
    stage = SimpleNamespace(model=nn.ModuleDict({"words": nn.Embedding(2, 2, sparse=True)}), prefix="stage.")
    config = BalancerConfig(replica_slots=1, rank_speed=(1.0, 0.5, 1.0), dispatch=DispatchConfig("hierarchical"))
    job, of_cpu = SimpleNamespace(ep_size=2, num_layers=1), {"device": torch.device("cpu"), "layers": ()}
    asked: Any = SimpleNamespace(config=config, job=job, host_dispatches=True, stages=[stage], **of_cpu)
    assert [line.partition(":")[0] for line in _of_models(asked)] == [
        "replica_slots=1",
        "dispatch",
        "stage.words has sparse gradients",
    ]
    with pytest.raises(AttachError, match="rank_speed has 3 numbers for 2 ranks: give one for each"):
        _initial_placement(asked, [8], None)


def test_a_copy_to_the_host_ends_on_the_stream_that_it_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: an event that is recorded without a stream would be on the current GPU's."""
    recorded: list[object] = []
    event = SimpleNamespace(record=lambda stream=None: recorded.append(stream), synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: SimpleNamespace(copy_=lambda *source, **how: None))
    on_gpu = SimpleNamespace(device=torch.device("cuda", 3), shape=torch.Size([2]), dtype=torch.int64)
    load_counter.HostCopy(on_gpu).wait()  # type: ignore[arg-type]
    assert recorded == ["stream of cuda:3"]


# -- A model's forwards, as the balancer is told of them, and which of their tokens are real


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.padding = _Padding(self)
        self.seen: Tensor | None = None

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, fails: bool = False) -> None:
        self.seen = self.padding.real_tokens(input_ids.numel())
        if fails:
            raise ValueError("a layer fails")


IDS, MASK = torch.zeros(2, 2, dtype=torch.int64), torch.tensor([[1, 0], [1, 1]])


def test_a_forward_that_fails_has_ended_when_the_next_begins() -> None:
    told: list[object] = []

    class Told(LoopHooks):
        def on_forward_begin(self, trains: bool) -> None:
            told.append("begins")

        def on_forward_end(self, layers: Collection[int]) -> None:
            told.append(layers)

    loop = LoopState(SimpleNamespace(optimizers=[]))  # type: ignore[arg-type]
    loop.hooks.append(Told())
    model = Model()
    follow_forwards(model, loop, frozenset({1}))
    model(IDS)
    with pytest.raises(ValueError, match="a layer fails"):
        model(IDS, fails=True)
    model(IDS)
    assert told == ["begins", {1}] * 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_mask_is_that_of_its_own_forward_and_of_nothing_after_it(fails: bool) -> None:
    model = Model()
    padding = model.padding
    padding.watch()
    try:
        model(IDS, attention_mask=MASK, fails=fails)
    except ValueError:
        assert fails
    assert model.seen is not None and model.seen.tolist() == [True, False, True, True]
    assert padding.real_tokens(4) is None, "a part of the model that is called by itself has no mask"
    model(IDS)
    assert model.seen is None
