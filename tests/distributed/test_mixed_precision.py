"""Mixed precision and what people keep beside the weights: saved and loaded as it is, or refused. That it moves with
the experts bit for bit: `test_bits`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run
from support.moe_models import batch_of, make_model
from support.optimizer_table import Outcome, optimizers_of, outcomes
from support.ranks import run_ranks
from support.seen import said_by
from torch import nn

import eplb_runtime as eplb


def clipped_where_one_rank_has_no_gradients(rank: int) -> None:
    """Each rank in turn: clipping returns the norm of all gradients."""
    for missing in range(2):
        job = Run(rank, Job(experts=16, top_k=4)).attach()
        model, balancer = job.model, job.balancer
        job.backward(job.forward())
        balancer.reduce_gradients()
        if rank == missing:
            model.get_parameter(next(iter(balancer.layer_of_parameter))).grad = None
        squares = {True: torch.zeros((), dtype=torch.float64), False: torch.zeros((), dtype=torch.float64)}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                squares[name in balancer.layer_of_parameter] += parameter.grad.double().square().sum()
        dist.all_reduce(squares[True])
        norm = float(balancer.clip_grad_norm_(0.5))
        assert norm == pytest.approx(float(sum(squares.values()).sqrt()), rel=1e-9)
        balancer.close()


@pytest.mark.long
def test_the_norm_is_that_of_all_experts_though_one_rank_has_no_gradient() -> None:
    run_ranks(2, clipped_where_one_rank_has_no_gradients)


def of_two_one_overflows(rank: int) -> dict[str, Any]:
    """Experts have an optimizer of their own; by step, what was overflowing, and what was written."""
    model = make_model("olmoe", experts=8)
    parts: dict[str, list[nn.Parameter]] = {"experts": [], "others": []}
    for name, parameter in model.named_parameters():
        parts["experts" if ".experts." in name else "others"].append(parameter)
    optimizers = {part: torch.optim.AdamW(parameters, lr=1e-2) for part, parameters in parts.items()}
    balancer = training.attach(model, list(optimizers.values()), policy="static")
    scaler = eplb.GradScaler(balancer, init_scale=1024.0)
    model.train()
    watched = {"experts": model.model.layers[0].mlp.experts.down_proj, "others": model.lm_head.weight}
    written: list[list[str]] = []
    for step, overflow in enumerate([(), ("experts",), ("others",), ("experts", "others"), (), ("experts",), ()]):
        ids = batch_of(rank, step)
        scaler.scale(model(input_ids=ids, labels=ids).loss).backward()
        for part in overflow if rank == 1 else ():
            watched[part].grad.view(-1)[0] = torch.inf
        written.append([])
        for part, optimizer in optimizers.items():
            before = watched[part].detach().clone()
            scaler.step(optimizer)
            written[-1] += [] if torch.equal(before, watched[part]) else [part]
        scaler.update()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    balancer.close()
    return {"written": written, "steps": balancer.rebalancer.step, "scale": scaler.get_scale()}


@pytest.mark.long
def test_of_two_optimizers_one_overflows_and_training_goes_on() -> None:
    both = ["experts", "others"]
    for found in run_ranks(2, of_two_one_overflows):
        assert found["written"] == [both, ["others"], ["experts"], [], both, ["others"], both]
        assert found["steps"] == 6, "one was none"
        assert found["scale"] == 1024.0 / 2**4


# -- refused ---------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """As PEFT wraps an experts module whose parameters it targets."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def wrap(model: Any) -> None:
    model.model.layers[1].mlp.experts = Wrapper(model.model.layers[1].mlp.experts)


def parametrize(model: Any) -> None:
    nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.experts, "down_proj", Half())


def quantise(model: Any) -> None:
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)


def divide(model: Any) -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)


def masters_instead(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p.detach().float().requires_grad_() for p in model.parameters()])


AT_ATTACH: dict[Callable[[nn.Module], Any], str] = {
    wrap: "model.layers.1.mlp.experts has a Wrapper around the experts",
    parametrize: "has parametrizations.",
    quantise: "model.layers.0.mlp.experts.down_proj is a Tensor of torch.float8_e4m3fn: quantised",
    divide: "is a DTensor of all experts: call eplb_runtime.shard_experts(model) first",
    masters_instead: "with float32 masters in its state, not in the place of parameters",
}


def refusals(rank: int) -> None:
    said = {}
    for prepare, words in AT_ATTACH.items():
        model = make_model("olmoe", experts=8)
        optimizer = prepare(model)
        said[words] = said_by(lambda model=model, optimizer=optimizer: eplb.attach(model, optimizer))
    model = make_model("olmoe", experts=8)
    balancer = eplb.attach(model)
    name = next(iter(balancer.layer_of_parameter))
    rows = model.get_parameter(name).detach()
    balancer.register(name, "average", rows.clone())
    for parameter, key, tensor, words in [
        ("lm_head.weight", "ema", rows.clone(), "'lm_head.weight' is no key of balancer.layer_of_parameter"),
        (name, "ema", rows[:1].clone(), "its first dimension must be the 4 experts of this rank"),
        (name, "ema", rows.clone().requires_grad_(), "requires_grad=True"),
        (name, "ema", rows.to("meta"), "give a tensor on cpu"),
        (name, "average", rows.clone(), "is registered already"),
    ]:
        said[words] = said_by(lambda parameter=parameter, key=key, of=tensor: balancer.register(parameter, key, of))
    for words, line in said.items():
        assert words in line and "\n" not in line, line


def test_what_is_not_supported_is_refused_with_one_line() -> None:
    run_ranks(2, refusals)


# -- Real optimizers, of torch and of packages that are installed: moved experts train as static ones, or one line say


MIXING = {"Adafactor": "mixes the experts", "LBFGS": "mixes the experts", "SparseAdam": "does not support dense"}
SCHEDULE_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure")


def found(package: str, names: tuple[str, ...]) -> dict[str, Outcome]:
    first, second = run_ranks(2, outcomes, package, names)
    assert {name: one.way for name, one in first.items()} == {name: one.way for name, one in second.items()}
    return first


def test_optimizers_of_torchs_move_to_the_bit_or_are_refused_in_a_line() -> None:
    for name, one in found("torch.optim", tuple(optimizers_of("torch.optim"))).items():
        if name in MIXING:
            way = "not run" if name == "SparseAdam" else "refused"  # which refuses experts in its first step itself
            assert one.way == way and MIXING[name] in one.line, (name, one)
        else:
            assert one == Outcome("to the bit"), (name, one)


@pytest.mark.skipif(not optimizers_of("schedulefree"), reason="schedulefree is not installed")
def test_schedule_free_optimizers_move_to_the_bit() -> None:
    assert found("schedulefree", SCHEDULE_FREE) == dict.fromkeys(SCHEDULE_FREE, Outcome("to the bit"))


def test_a_step_that_calls_the_step_of_its_base_is_one_step() -> None:
    assert found("support.optimizer_table", ("AroundAdamW",)) == {"AroundAdamW": Outcome("to the bit")}
