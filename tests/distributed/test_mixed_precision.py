"""Mixed precision and what people keep beside the weights: it moves with the experts bit for bit, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import digests
from support.shuffle import plan_by, plan_shuffle
from torch import nn

import eplb_runtime as eplb
from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts import AttachError
from eplb_runtime.moe.experts.registry import RegistryError

EXPERTS = 16
SUMMED = eplb.BalancerConfig(dense_gradients="allreduce")


class MasterAdamW(torch.optim.Optimizer):
    """bfloat16 weights, float32 masters and moments in the optimizer's state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["master"] = parameter.detach().float()
                    state["exp_avg"] = torch.zeros_like(state["master"])
                    state["exp_avg_sq"] = torch.zeros_like(state["master"])
                gradient = parameter.grad.float()
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 0.1)
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                state["master"].mul_(1 - 0.1 * group["lr"])
                state["master"].addcdiv_(state["exp_avg"], state["exp_avg_sq"].sqrt().add_(1e-6), value=-group["lr"])
                parameter.copy_(state["master"])


@dataclass(frozen=True)
class Job:
    dtype: torch.dtype = torch.float32
    optimizer: str = "AdamW"
    autocast: bool = False
    scaler: str = ""
    overflow_at: int = -1
    averages: bool = False
    replica_slots: int = 0
    keep_back: bool = False
    steps: int = 8


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


def make_scaler(job: Job, balancer: Balancer) -> torch.amp.GradScaler | None:
    options = {"init_scale": 1024.0, "growth_interval": 1000}
    return eplb.GradScaler(balancer, **options) if job.scaler else None


def train(rank: int, policy: str, job: Job) -> dict[str, Any]:
    model = make_model("olmoe", experts=EXPERTS, top_k=4).to(job.dtype)
    makers = {"master": MasterAdamW, "fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)}
    optimizer = makers.get(job.optimizer, torch.optim.AdamW)(model.parameters(), lr=3e-3)
    balancer = training.attach(
        model, optimizer, interval=2, window=2, policy=policy, gate="always", replica_slots=job.replica_slots
    )
    if policy == "incremental" and not job.replica_slots:
        plan_by(balancer, plan_shuffle)  # all homes move, whatever the planner thinks of it
    averages = {name: p.detach().clone() for name, p in model.named_parameters()} if job.averages else {}
    for name in balancer.layer_of_parameter:
        if name in averages:
            balancer.register(name, "ema", averages[name])
    scaler = make_scaler(job, balancer)
    model.train()
    losses = []
    for step in range(job.steps):
        ids = batch_of(rank, step) % 12 + 12 * ((step // 8) % 7)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            loss = model(input_ids=ids, labels=ids).loss
        if scaler is None:
            loss.backward()
            if step != job.overflow_at:
                optimizer.step()
        else:
            with balancer.no_sync() if job.keep_back else nullcontext():
                scaler.scale(loss).backward()
            if step == job.overflow_at and rank == 1:
                model.model.layers[0].mlp.experts.down_proj.grad[0, 0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        for name, parameter in model.named_parameters():
            if name in averages:
                averages[name].lerp_(parameter.detach(), 0.1)
    result = {
        "losses": losses,
        "state": digests(eplb.logical_state_dict(model, optimizer)),
        "scale": scaler.get_scale() if scaler is not None else None,
        "migrations": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    found = []
    for a, b in zip(one, other, strict=True):
        found += ["losses"] if a["losses"] != b["losses"] else []
        assert a["state"].keys() == b["state"].keys()
        found += [name for name in a["state"] if a["state"][name] != b["state"][name]]
    return found


JOBS = {
    "float32 masters": Job(torch.bfloat16, "master"),
    "autocast": Job(autocast=True),
    "GradScaler, fused": Job(optimizer="fused", scaler="ours", overflow_at=5),
    "EMA": Job(averages=True),
}


def train_all(rank: int) -> dict[str, dict[str, Any]]:
    """Each job with experts that never move, and that move."""
    return {
        name: {policy: train(rank, policy, job) for policy in ("static", "incremental")} for name, job in JOBS.items()
    }


@pytest.fixture(scope="module")
def trained() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, train_all)


def compare(trained: list[dict[str, dict[str, Any]]], name: str, moving: str) -> list[str]:
    """What differs between training that never moves an expert and training that does."""
    static, moved = ([of_rank[name][way] for of_rank in trained] for way in ("static", moving))
    assert static[0]["migrations"] == 0
    assert moved[0]["migrations"] >= 2
    assert moved[0]["aborted"] == []
    return differences(static, moved)


@pytest.mark.parametrize("name", JOBS)
def test_migration_changes_no_bit_with(trained: list[dict[str, dict[str, Any]]], name: str) -> None:
    assert compare(trained, name, "incremental") == []


# -- GradScaler ------------------------------------------------------------------------------------------------------


OVERFLOWING = {
    "replicas": Job(overflow_at=3, replica_slots=1, steps=6),
    "fused": Job(optimizer="fused", overflow_at=3, steps=6),
}
KEEPING_BACK = Job(replica_slots=1, steps=6, keep_back=True)


def scale_all(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: {scaler: train(rank, "incremental", replace(job, scaler=scaler)) for scaler in ("", "ours")}
        for name, job in OVERFLOWING.items()
    }
    for scaler in ("", "ours"):
        found[f"kept back, {scaler}"] = train(rank, "incremental", replace(KEEPING_BACK, scaler=scaler))
    return found


@pytest.fixture(scope="module")
def scaled() -> list[dict[str, Any]]:
    return run_ranks(2, scale_all)


@pytest.mark.parametrize("name", OVERFLOWING)
def test_a_scaled_run_is_the_unscaled_run_and_skips_a_step_on_every_rank(
    scaled: list[dict[str, Any]], name: str
) -> None:
    """The scale is a power of two, so that scaling is exact; one rank alone overflows, in an expert."""
    without, ours = ([of_rank[name][scaler] for of_rank in scaled] for scaler in ("", "ours"))
    assert differences(without, ours) == []
    assert [result["scale"] for result in ours] == [512.0, 512.0]
    assert ours[0]["aborted"] == [] and ours[0]["migrations"] >= 1


def test_gradients_that_copies_kept_back_are_unscaled(scaled: list[dict[str, Any]]) -> None:
    without, ours = ([of_rank[f"kept back, {scaler}"] for of_rank in scaled] for scaler in ("", "ours"))
    assert differences(without, ours) == []


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
    steps = balancer._rebalancer.step
    balancer.close()
    return {"written": written, "steps": steps, "scale": scaler.get_scale()}


def test_of_two_optimizers_one_overflows_and_training_goes_on() -> None:
    both = ["experts", "others"]
    for found in run_ranks(2, of_two_one_overflows):
        assert found["written"] == [both, ["others"], ["experts"], [], both, ["others"], both]
        assert found["steps"] == 6, "one was none"
        assert found["scale"] == 1024.0 / 2**4


# -- masters and averages in a checkpoint ----------------------------------------------------------------------------


def save_all(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer, _ = with_averages()
    for step in range(3):
        training.step(model, optimizer, batch_of(rank, step))
    eplb.checkpoint.save(folder, model, optimizer)
    return eplb.logical_state_dict(model, optimizer)


def load_all(rank: int, folder: str) -> dict[str, torch.Tensor]:
    model, optimizer, averages = with_averages()
    for average in averages:
        average.zero_()
    eplb.checkpoint.load(folder, model, optimizer)
    return eplb.logical_state_dict(model, optimizer)


def with_averages() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    ranks = dist.get_world_size()
    initial = eplb.Placement.initial(2, EXPERTS, ranks)
    backwards = eplb.Placement(initial.physical_to_logical[:, ::-1], EXPERTS, ranks, initial.home[:, ::-1])
    model = make_model("olmoe", experts=EXPERTS).to(torch.bfloat16)
    optimizer = MasterAdamW(model.parameters(), lr=1e-2)
    balancer = training.attach(model, optimizer, initial_placement=backwards)
    averages = [dict(model.named_parameters())[name].detach().float() for name in balancer.layer_of_parameter]
    for name, average in zip(balancer.layer_of_parameter, averages, strict=True):
        balancer.register(name, "ema", average)
    return model, optimizer, averages


def test_masters_and_averages_are_saved_and_loaded_in_float32(tmp_path: Any) -> None:
    saved = run_ranks(4, save_all, str(tmp_path / "checkpoint"))[0]
    for loaded in run_ranks(2, load_all, str(tmp_path / "checkpoint")):
        assert saved.keys() == loaded.keys()
        for name, tensor in saved.items():
            assert tensor.dtype == loaded[name].dtype
            assert torch.equal(tensor, loaded[name]), name
    name = "model.layers.0.mlp.experts.down_proj"
    assert saved[f"optimizer.{name}.master"].dtype == saved[f"extra.{name}/ema"].dtype == torch.float32
    assert saved[f"extra.{name}/ema"].shape[0] == EXPERTS


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
