"""Training whose experts move has the very bits of training whose experts stay: losses, norms, every parameter, every
optimizer tensor. What it is equal to in one process: `test_loops`; with each optimizer: `test_mixed_precision`."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import differing, digests, said_by
from support.shuffle import plan_by, plan_newest, plan_shuffle, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.engine import Phase
from eplb_runtime.planner.policies import shuffled

EXPERTS = 16


class MasterSGD(torch.optim.Optimizer):
    """bfloat16 weights, float32 masters and momentum in the optimizer's state."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.detach().float()
                    state["momentum"] = torch.zeros_like(state["master"])
                if parameter.grad is not None:
                    state["momentum"].mul_(0.9).add_(parameter.grad.float())
                    state["master"].add_(state["momentum"], alpha=-group["lr"])
                    parameter.copy_(state["master"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=3e-3, momentum=0.9),
    "masters": lambda parameters: MasterSGD(parameters, lr=0.1),
}


def nothing(rank: int, balancer: eplb.Balancer) -> None:
    pass


@dataclass(frozen=True)
class Job:
    """Experts move after each interval, all of them: ``planner`` says where to; without one they stay.

    Args:
        overflow: the step in which one rank's gradients overflow; without a scaler nobody takes it.
        begin: done once a rank has attached.
    """

    planner: Callable[..., eplb.Plan] | None = None
    steps: int = 3
    interval: int = 1
    optimizer: str = "AdamW"
    dtype: torch.dtype = torch.float32
    implementation: str = "grouped_mm"
    recompute: bool = False
    compiled: bool = False
    autocast: bool = False
    averages: bool = False
    scaled: bool = False
    overflow: int = -1
    hold_back: bool = False
    sliced: bool = False
    settings: tuple[tuple[str, Any], ...] = ()
    begin: Callable[[int, eplb.Balancer], None] = nothing


def ep_group() -> dist.ProcessGroup:
    """EP 2: ranks 0 and 1 are one EP group, 2 and 3 the next."""
    return training.meshes(2, dist.get_world_size() // 2)[0]["ep"].get_group()


def train(rank: int, job: Job) -> dict[str, Any]:
    model = make_model("olmoe", experts=EXPERTS, top_k=4).to(job.dtype).train()
    model.set_experts_implementation(job.implementation)
    if job.recompute:
        model.gradient_checkpointing_enable()
    settings = {"interval": job.interval, "lag": 0, "gate": "always", **dict(job.settings)}
    settings["policy"] = "incremental" if job.planner else "static"
    if job.sliced:
        settings["dense_gradients"] = "host"
        training.shard(model, 2, dist.get_world_size() // 2, **settings)
    optimizer = OPTIMIZERS[job.optimizer](model.parameters())
    balancer = training.attach(model, optimizer, ep_group=ep_group(), **settings)
    if job.planner:
        plan_by(balancer, job.planner)
        wait_until_compiled(balancer)
    job.begin(rank, balancer)
    averages = {name: model.get_parameter(name).detach().clone() for name in balancer.layer_of_parameter}
    if job.averages:
        balancer.register_all("ema", averages)
    scaler = eplb.GradScaler(balancer, init_scale=1024.0, growth_interval=1000) if job.scaled else None

    def step(number: int) -> torch.Tensor:
        # The text changes every two steps, and with it the experts that it calls for.
        ids = batch_of(rank, number) % 12 + 12 * ((number // 2) % 7)
        with torch.autocast("cpu", torch.bfloat16, enabled=job.autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with balancer.no_sync() if job.hold_back else nullcontext():
            (scaler.scale(loss) if scaler else loss).backward()
        overflows = number == job.overflow
        if scaler:
            if overflows and rank == 1:
                model.model.layers[0].mlp.experts.down_proj.grad[0, 0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        elif not overflows:
            if job.overflow < 0:
                norms.append(float(balancer.clip_grad_norm_(0.5)))
            optimizer.step()
        optimizer.zero_grad()
        for name, average in averages.items() if job.averages else ():
            average.lerp_(model.get_parameter(name).detach(), 0.1)
        return loss

    norms: list[float] = []
    run = torch.compile(step, backend="aot_eager") if job.compiled else step
    losses = [run(number).item() for number in range(job.steps)]
    result = {
        "seen": {"losses": losses, "norms": norms, **digests(eplb.logical_state_dict(model, optimizer))},
        "scale": scaler.get_scale() if scaler else None,
        "moved": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
        "placement": balancer.placement.digest(),
    }
    balancer.close()
    return result


REPLICAS = (("replica_slots", 1), ("interval", 2))
MOVED = {
    "eager": Job(implementation="eager"),
    "batched_mm": Job(implementation="batched_mm"),
    "recomputed": Job(recompute=True),
    "float32 masters": Job(dtype=torch.bfloat16, optimizer="masters"),
    "autocast": Job(autocast=True),
    "averages": Job(averages=True),
    "scaled": Job(optimizer="fused", scaled=True, overflow=2, steps=4),
}
"""Against the same with experts that stay."""
SCALED = {
    "with replicas": Job(plan_newest, overflow=3, steps=6, settings=REPLICAS),
    "with replicas, held back": Job(plan_newest, overflow=9, steps=6, settings=REPLICAS, hold_back=True),
}
"""Against the same with a scaler, whose scale is a power of two: exact."""
EDP = Job(interval=2, steps=7)


def pairs() -> dict[str, tuple[Job, Job]]:
    found = {name: (job, replace(job, planner=plan_shuffle)) for name, job in MOVED.items()}
    found["by the planner"] = Job(steps=8, interval=2), Job(plan_newest, steps=8, interval=2)
    return found | {f"scaled, {name}": (job, replace(job, scaled=True)) for name, job in SCALED.items()}


def train_pairs(rank: int) -> dict[str, list[dict[str, Any]]]:
    return {name: [train(rank, job) for job in pair] for name, pair in pairs().items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(2, train_pairs)


@pytest.mark.parametrize("name", pairs())
def test_no_bit_changes(trained: list[dict[str, list[dict[str, Any]]]], name: str) -> None:
    for found in trained:
        one, other = found[name]
        assert differing(one["seen"], other["seen"]) == []
        assert other["aborted"] == [] and other["moved"] >= 2
        assert one["moved"] == (other["moved"] if name.startswith("scaled, ") else 0)
        assert other["placement"] == trained[0][name][1]["placement"]
        overflows = pairs()[name][1].overflow < pairs()[name][1].steps
        assert other["scale"] in ((None, 512.0) if overflows else (1024.0,))


def train_all(rank: int, *jobs: Job) -> list[dict[str, Any]]:
    return [train(rank, job) for job in jobs]


@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.long)])
def test_no_bit_changes_where_several_ranks_hold_an_expert(ranks: int) -> None:
    """Whole, or a slice of it by `fully_shard`."""
    moving, sliced = replace(EDP, planner=plan_shuffle), replace(EDP, sliced=True, steps=5)
    overlapping, sliced_moving = replace(moving, settings=(("overlap", True),)), replace(sliced, planner=plan_shuffle)
    results = run_ranks(ranks, train_all, EDP, sliced, moving, overlapping, sliced_moving)
    for whole, slices, *moved in results:
        for static, found, first in zip((whole, whole, slices), moved, results[0][2:], strict=True):
            assert differing(static["seen"], found["seen"]) == []
            assert found["moved"] >= 2 and found["placement"] == first["placement"]


# -- EP groups that hold the same experts keep one placement, and whoever strays is noticed in time --------------------


def another_plan_for_the_second_group(rank: int, balancer: eplb.Balancer) -> None:
    """Both its ranks receive the first plan that moves anything with experts elsewhere."""
    done = []

    def alter(message: bytearray) -> None:
        fields = json.loads(bytes(message))
        if not done and fields.get("placement"):
            done.append(True)
            placement = eplb.Placement.from_json(fields["placement"])
            fields["placement"] = shuffled(placement, np.ones((2, EXPERTS))).to_json()
            message[:] = json.dumps(fields).encode()

    if rank >= 2:
        balancer.rebalancer._engine.probe = lambda phase, subject: alter(subject) if phase is Phase.PLANNED else None


def test_a_group_with_another_plan_is_noticed_before_anything_moves() -> None:
    job = Job(plan_newest, steps=8, interval=2, begin=another_plan_for_the_second_group)
    for static, result in run_ranks(4, train_all, Job(steps=8), job):
        assert result["aborted"] == ["rank 2, 3 has another plan than rank 0"]
        assert result["moved"] >= 1 and differing(static["seen"], result["seen"]) == []


def start_or_restore_apart(rank: int) -> list[str]:
    start = eplb.Placement.initial(2, EXPERTS, 2)
    other = eplb.Placement(start.physical_to_logical[:, ::-1], EXPERTS, 2, start.home[:, ::-1])
    model, mine = make_model("olmoe", experts=EXPERTS), start if rank < 2 else other
    config = eplb.BalancerConfig(initial_placement=mine)
    said = [said_by(lambda: eplb.attach(model, config=config, ep_group=ep_group()))]
    balancer = eplb.attach(model, ep_group=ep_group())
    narrow = eplb.Placement.initial(2, EXPERTS, 4 if rank == 3 else 2)
    right = {"step": 8, "placement": other.to_json()}
    states: list[dict[str, Any]] = [{**right, "placement": mine.to_json()}, {**right, "step": 8 + rank}]
    states += [
        {**right, "placement": narrow.to_json()},
        {"placement": other.to_json()} if rank == 1 else right,
    ]
    said += [said_by(lambda state=state: balancer.load_state_dict(state)) for state in states]
    assert balancer.placement.digest() == start.digest()

    def fail(phase: Phase, subject: object) -> None:
        if phase is Phase.VERIFIED and rank == 0:
            raise OSError("the device went away")

    balancer.rebalancer._engine.probe, probe = fail, balancer.rebalancer._engine.probe
    assert "could not be restored" in said_by(lambda: balancer.load_state_dict(right))
    balancer.rebalancer._engine.probe = probe
    assert balancer.placement.digest() == start.digest()
    # The same step once more: what was decided then does not count now.
    balancer.load_state_dict(right)
    assert balancer.placement.digest() == other.digest()
    balancer.close()
    return said


def test_ranks_that_start_or_are_restored_apart_are_told_so_and_nothing_changes() -> None:
    every = run_ranks(4, start_or_restore_apart)
    for said in every:
        assert not any("\n" in line for line in said)
        assert "rank 2, 3 has another initial_placement in its config than rank 0" in said[0]
        assert said[1].endswith("rank 2, 3 has another usable saved state than rank 0")
        assert said[2].endswith("rank 1, 2, 3 has another usable saved state than rank 0")
    assert "EP size" in every[3][3] or "ranks" in every[3][3]
    assert every[0][3].endswith("no usable saved state on rank 3")
    assert "not what state_dict() gave" in every[1][4] and every[0][4].endswith("no usable saved state on rank 1")


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled_and_not(rank: int) -> list[dict[str, Any]]:
    job = Job(plan_shuffle, optimizer="SGD", settings=(("replica_slots", 1),))
    torch._dynamo.reset()
    return [train(rank, job), train(rank, replace(job, compiled=True))]


@pytest.mark.long
def test_a_compiled_step_trains_to_the_same_bits() -> None:
    """Graphs break at MoE layers. A compiled model alone: `test_any_module`."""
    for plain, compiled in run_ranks(2, compiled_and_not):
        assert differing(plain["seen"], compiled["seen"]) == [] and compiled["moved"] == 3
