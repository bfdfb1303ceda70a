"""Hooks, gradients, attributes and optimizer state of expert parameters: they go along with the experts, or are refused
in one line."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard
from test_rollout_phases import attached, step
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError

EXPERTS = 8


class Job:
    """A model in training, attached or not."""

    def __init__(self, rank: int, slots: int = 0) -> None:
        self.rank, self.slots = rank, slots
        self.model = make_model("olmoe", experts=EXPERTS)
        self.experts = self.model.model.layers[1].mlp.experts
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def attach(self) -> None:
        self.balancer = training.attach(
            self.model, self.optimizer, replica_slots=self.slots, interval=1000, gate="always"
        )
        self.model.train()

    def backward(self, step: int) -> None:
        ids = batch_of(self.rank, step)
        self.model(input_ids=ids, labels=ids).loss.backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()
        self.optimizer.zero_grad()


def halve(gradient: Tensor) -> Tensor:
    return gradient / 2


def hooked_before(job: Job) -> None:
    job.experts.down_proj.register_hook(halve)
    job.attach()


def with_gradients(job: Job) -> None:
    job.backward(0)
    job.attach()


def tied(job: Job) -> None:
    job.experts.down_proj = job.model.model.layers[0].mlp.experts.down_proj
    job.attach()


def hooked_with_copies(job: Job) -> None:
    job.slots = 1
    job.attach()
    job.experts.down_proj.register_hook(halve)
    job.step(0)


def state_of_before_a_migration(job: Job) -> None:
    job.attach()
    job.step(0)
    before = deepcopy(job.optimizer.state_dict())
    # All heavy experts are at home on one rank: some must move.
    job.balancer.declare([[100.0] * 4 + [1.0] * 4] * 2)
    assert job.balancer.rebalance()
    job.optimizer.load_state_dict(before)


def state_of_the_whole_model(job: Job) -> None:
    whole = Job(job.rank)
    whole.step(0)
    job.attach()
    job.optimizer.load_state_dict(whole.optimizer.state_dict())


def gradient_penalty(job: Job) -> None:
    job.attach()
    ids = batch_of(job.rank, 0)
    embedded = job.model.get_input_embeddings()(ids)
    loss = job.model(inputs_embeds=embedded, labels=ids).loss
    (gradient,) = torch.autograd.grad(loss, embedded, create_graph=True)
    (loss + gradient.square().sum()).backward()


def step_in_backward(job: Job) -> None:
    job.attach()
    job.experts.down_proj.register_post_accumulate_grad_hook(lambda _: job.optimizer.step())
    job.backward(0)


def registered_after_ddp(job: Job) -> None:
    job.attach()
    average = {name: job.model.get_parameter(name).detach().clone() for name in job.balancer.layer_of_parameter}
    job.model.register_buffer("average", average[next(iter(average))])
    wrapped = nn.parallel.DistributedDataParallel(job.model)
    job.balancer.register_all("average", average)
    wrapped(batch_of(job.rank, 0))
    job.step(0)


REFUSED: dict[str, tuple[Callable[[Job], None], str]] = {
    "hook": (hooked_before, "layers.1.mlp.experts.down_proj has gradient hooks, and attach puts"),
    "gradients": (with_gradients, "has a gradient from a backward pass before attach"),
    "tied": (tied, "down_proj is the same tensor as model.layers.1.mlp.experts.down_proj: tied"),
    "hook with copies": (hooked_with_copies, "layers.1.mlp.experts.down_proj has gradient hooks, and with replica"),
    "an average that DDP broadcasts": (registered_after_ddp, "and call balancer.register before"),
    "gradient penalty": (gradient_penalty, "create_graph=True through MoE layers"),
    "step in a backward pass": (step_in_backward, "optimizer.step() inside a backward pass"),
    "state of before a migration": (state_of_before_a_migration, "the optimizer's state dict holds experts ["),
    "state of the whole model": (state_of_the_whole_model, "the optimizer's state dict holds experts [0, 1, 2, 3, 4"),
}


def all_refused(rank: int) -> dict[str, str]:
    said = {}
    for name, (case, _) in REFUSED.items():
        try:
            case(Job(rank))
        except (AttachError, RuntimeError) as error:
            said[name] = str(error)
    return said


def right_use(rank: int) -> dict[str, bool]:
    seen: dict[str, bool] = {}
    plain, hooked = Job(rank), Job(rank)
    hooked.experts.down_proj.no_weight_decay = True
    for job in (plain, hooked):
        job.rank = 0  # whole models learn the same on every rank
        job.step(0)
        job.rank = rank
        job.backward(1)
        job.optimizer.zero_grad(set_to_none=False)
        job.attach()
    seen["attributes stay"] = hooked.experts.down_proj.no_weight_decay
    hooked.experts.down_proj.register_hook(halve)
    for job in (plain, hooked):
        job.backward(1)
    whole, half = plain.experts.down_proj.grad, hooked.experts.down_proj.grad
    seen["a hook without copies changes gradients"] = bool(whole.any()) and torch.equal(whole / 2, half)
    plain.optimizer.step()
    state, weights = deepcopy(plain.optimizer.state_dict()), deepcopy(list(tensors(plain.model)))
    plain.optimizer.zero_grad()
    plain.step(2)
    plain.optimizer.load_state_dict(state)
    with torch.no_grad():
        for parameter, before in zip(tensors(plain.model), weights, strict=True):
            parameter.copy_(before)
    first = plain.experts.down_proj.clone()
    plain.step(2)
    seen["a state goes back where it fits"] = not torch.equal(first, plain.experts.down_proj)
    later = Job(rank)
    later.attach()
    later.step(0)
    scale = nn.Parameter(torch.ones(()))
    later.optimizer.add_param_group({"params": [scale], "lr": 0.1})
    (scale * rank).backward()
    later.optimizer.step()
    seen["what is added to the optimizer later is averaged"] = scale.grad is not None and scale.grad.item() == 0.5
    shared = Job(rank)
    shared.model.model.layers[1].mlp.experts = shared.model.model.layers[0].mlp.experts
    shared.optimizer = torch.optim.SGD(shared.model.parameters(), lr=0.1)
    shared.attach()
    seen["layers may share a module"] = len(set(shared.balancer.layer_of_parameter.values())) == 1
    shared.step(0)
    own = {name: later.model.get_parameter(name).detach() for name in later.balancer.layer_of_parameter}
    buffers = {name: weights.clone() for name, weights in own.items()}
    for number, buffer in enumerate(buffers.values()):
        later.model.register_buffer(f"average_{number}", buffer)
    later.balancer.register_all("average", buffers)
    nn.parallel.DistributedDataParallel(later.model)(batch_of(rank, 0))
    seen["DDP leaves registered buffers alone"] = all(map(torch.equal, buffers.values(), own.values()))
    return seen


def tensors(model: nn.Module) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


@pytest.fixture(scope="module")
def refused() -> list[dict[str, str]]:
    return run_ranks(2, all_refused)


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_would_be_lost_is_refused_in_one_line(refused: list[dict[str, str]], name: str) -> None:
    for said in refused:
        assert REFUSED[name][1] in said[name] and "\n" not in said[name]


def test_right_use_is_silent() -> None:
    for seen in run_ranks(2, right_use):
        assert all(seen.values()), seen


# -- A job takes optimizer state out of its optimizer between steps, and puts it back later. Experts that moved meanwh


STEPS, KEYS = 4, ("exp_avg", "exp_avg_sq")


def popped(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Take two tensors of each parameter out; what is returned puts copies back."""
    taken = [(state, {key: state.pop(key).clone() for key in KEYS}) for state in optimizer.state.values()]
    return lambda: [state.update(own) for state, own in taken] and None


def cleared(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """As `popped`; nothing of any parameter stays."""
    taken = dict(optimizer.state)
    optimizer.state.clear()
    return lambda: optimizer.state.update(taken)


WAYS: dict[str, Callable[[torch.optim.Optimizer], Callable[[], None]]] = {"popped": popped, "cleared": cleared}


def trained(kind: str, take: Callable[..., Callable[[], None]] | None, **options: Any) -> dict[str, Any]:
    """Between any two steps state is taken out, experts may move, and it is put back; ``take`` None: it stays."""
    with heard() as lines:
        return {**trained_so(kind, take, **options), "lines": lines}


def trained_so(kind: str, take: Callable[..., Callable[[], None]] | None, **options: Any) -> dict[str, Any]:
    model, optimizer, balancer = attached(kind, guard="off", **options)
    losses = []
    for number in range(STEPS):
        losses.append(step(model, optimizer, number))
        back = take(optimizer) if take is not None else lambda: None
        if kind == "overlapped":
            balancer.suspend()
        elif options.get("policy") != "static":
            balancer.rebalance()
        back()
        if kind == "overlapped":
            balancer.resume()
    state, epoch = eplb.logical_state_dict(model, optimizer), balancer.placement.epoch
    if take is not None and kind != "overlapped":  # it is there again
        step(model, optimizer, STEPS)
        balancer.rebalance()
    found = {"losses": losses, "state": state, "epoch": epoch, "later": balancer.placement.epoch}
    balancer.close()
    return found


def everything(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {"static": trained("between steps", None, policy="static")}
    found["stays"] = trained("between steps", None, interval=None)
    found["suspended"] = trained("overlapped", popped)
    for name, take in WAYS.items():
        found[name] = trained("between steps", take, interval=None)
    return found


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(2, everything)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    assert one["state"].keys() == other["state"].keys()
    equal = all(torch.equal(tensor, other["state"][key]) for key, tensor in one["state"].items())
    return equal and one["losses"] == other["losses"]


@pytest.mark.parametrize("way", ["suspended", *WAYS])
def test_experts_stay_while_their_state_is_elsewhere(results: list[dict[str, Any]], way: str) -> None:
    for found in results:
        assert same(found[way], found["static"]) and found[way]["epoch"] == 0
        line = found[way]["lines"][0]
        assert "is not in the optimizer's state any more: load it first" in line and "\n" not in line
        assert way == "suspended" or found[way]["later"] == 1, "they move once it is there again"


def test_experts_move_while_their_state_is_there(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["stays"]["epoch"] == STEPS and same(found["stays"], found["static"])
