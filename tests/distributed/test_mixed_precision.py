"""Mixed precision and what people keep beside the weights: saved and loaded as it is, or refused. That it moves with
the experts bit for bit: `test_bits`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from optimizer_table import Outcome, optimizers_of, outcomes
from ranks import run_ranks
from support import training
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.hosts import AttachError
from eplb_runtime.moe.experts.registry import RegistryError

EXPERTS = 16
SUMMED = eplb.BalancerConfig(dense_gradients="allreduce")


def clipped_where_one_rank_has_no_gradients(rank: int, missing: int) -> tuple[float, float]:
    """The norm that clipping returns, and that of all gradients."""
    model = make_model("olmoe", experts=EXPERTS, top_k=4)
    balancer = eplb.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config=SUMMED)
    ids = batch_of(rank, 0)
    model(input_ids=ids, labels=ids).loss.backward()
    balancer.reduce_gradients()
    experts = [model.get_parameter(name) for name in balancer.layer_of_parameter]
    if rank == missing:
        experts[0].grad = None
    squares = [float(one.grad.double().square().sum()) for one in experts if one.grad is not None]
    of_experts = torch.tensor(sum(squares), dtype=torch.float64)
    dist.all_reduce(of_experts)
    dense = [one for one in model.parameters() if all(one is not expert for expert in experts)]
    whole = of_experts + sum(one.grad.double().square().sum() for one in dense if one.grad is not None)
    return float(balancer.clip_grad_norm_(0.5)), float(whole.sqrt())


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
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            before = [parameter.detach().clone() for parameter in stepped]
            scaler.step(optimizer)
            if not all(map(torch.equal, before, stepped)):
                written[-1].append(part)
        scaler.update()
        for optimizer in optimizers.values():
            optimizer.zero_grad()
    steps = balancer.rebalancer.step
    balancer.close()
    return {"written": written, "steps": steps, "scale": scaler.get_scale()}


def test_of_two_optimizers_one_overflows_and_training_goes_on() -> None:
    both = ["experts", "others"]
    for found in run_ranks(2, of_two_one_overflows):
        assert found["written"] == [both, ["others"], ["experts"], [], both, ["others"], both]
        assert found["steps"] == 6, "one was none"
        assert found["scale"] == 1024.0 / 2**4


# -- masters and averages in a checkpoint ----------------------------------------------------------------------------


# -- refused ---------------------------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """As PEFT wraps an experts module whose parameters it targets."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


class Half(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def refusals(rank: int) -> dict[str, str]:
    said = {}

    def refused(case: str, prepare: Callable[[nn.Module], Any]) -> None:
        model = make_model("olmoe", experts=8)
        try:
            optimizer = prepare(model)
            eplb.attach(model, optimizer)
            said[case] = "nothing was refused"
        except AttachError as error:
            said[case] = str(error)

    def wrap(model: nn.Module) -> None:
        model.model.layers[1].mlp.experts = Wrapper(model.model.layers[1].mlp.experts)

    def parametrize(model: nn.Module) -> None:
        nn.utils.parametrize.register_parametrization(model.model.layers[0].mlp.experts, "down_proj", Half())

    def quantise(model: nn.Module) -> None:
        experts = model.model.layers[0].mlp.experts
        experts.down_proj = nn.Parameter(experts.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)

    def shard(model: nn.Module) -> None:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh)

    def masters_instead(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p.detach().float().requires_grad_() for p in model.parameters()])

    refused("adapters around", wrap)
    refused("parametrized", parametrize)
    refused("float8", quantise)
    refused("sharded", shard)
    refused("masters instead of parameters", masters_instead)
    model = make_model("olmoe", experts=8)
    balancer = eplb.attach(model)
    name = next(iter(balancer.layer_of_parameter))
    rows = dict(model.named_parameters())[name].detach()
    for case, parameter, tensor in [
        ("no expert parameter", "lm_head.weight", rows.clone()),
        ("wrong rows", name, rows[:1].clone()),
        ("with gradients", name, rows.clone().requires_grad_()),
        ("on meta", name, rows.to("meta")),
    ]:
        try:
            balancer.register(parameter, "ema", tensor)
            said[case] = "nothing was refused"
        except RegistryError as error:
            said[case] = str(error)
    balancer.register(name, "ema", rows.clone())
    try:
        balancer.register(name, "ema", rows.clone())
    except RegistryError as error:
        said["twice"] = str(error)
    return said


def test_what_is_not_supported_is_refused_with_one_line() -> None:
    expected = {
        "adapters around": "model.layers.1.mlp.experts has a Wrapper around the experts",
        "parametrized": "the weights of model.layers.0.mlp.experts are parametrized",
        "float8": "model.layers.0.mlp.experts.down_proj is a Tensor of torch.float8_e4m3fn: quantised",
        "sharded": "is a DTensor of all experts: call eplb_runtime.shard_experts(model) first",
        "masters instead of parameters": "with float32 masters in its state, not in the place of parameters",
        "no expert parameter": "'lm_head.weight' is no expert parameter",
        "wrong rows": "its first dimension must be the 4 experts of this rank",
        "with gradients": "requires_grad=True",
        "on meta": "give a tensor on cpu",
        "twice": "is registered already",
    }
    for said in run_ranks(2, refusals):
        assert said.keys() == expected.keys()
        for case, text in said.items():
            assert expected[case] in text, f"{case}: {text}"
            assert "\n" not in text


@pytest.mark.parametrize("missing", [0, 1])
def test_the_norm_is_that_of_all_experts_though_one_rank_has_no_gradient(missing: int) -> None:
    norms = run_ranks(2, clipped_where_one_rank_has_no_gradients, missing)
    assert norms[0] == norms[1] and norms[0][0] == pytest.approx(norms[0][1], rel=1e-9)


# -- Real optimizers, of torch and of packages that are installed: moved experts train as static ones, or one line say


MIXING = {"Adafactor": "mixes the experts", "LBFGS": "mixes the experts", "SparseAdam": "does not support dense"}
SCHEDULE_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree", "AdamWScheduleFreeClosure")


@cache
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
@pytest.mark.parametrize("name", SCHEDULE_FREE)
def test_schedule_free_optimizers_move_to_the_bit(name: str) -> None:
    assert found("schedulefree", SCHEDULE_FREE)[name] == Outcome("to the bit")


def test_a_step_that_calls_the_step_of_its_base_is_one_step() -> None:
    assert found("optimizer_table", ("AroundAdamW",)) == {"AroundAdamW": Outcome("to the bit")}
