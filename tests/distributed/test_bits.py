"""Training whose experts move has the very bits of training whose experts stay: losses, norms, every parameter, every
optimizer tensor. What it is equal to in one process: `test_loops`; with each optimizer: `test_mixed_precision`."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support import training
from support.job import Job, Run, Trace, changing, moved, single, static, train, train_all
from support.moe_models import make_model
from support.ranks import run_ranks
from support.seen import differing, said_by
from support.shuffle import plan_newest

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.migration.engine import Phase
from eplb_runtime.planner.policies import shuffled

EXPERTS = 16


class MasterSGD(torch.optim.Optimizer):
    """bfloat16 weights, float32 masters and momentum in the optimizer's state."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
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


job = partial(Job, experts=EXPERTS, top_k=4, ep=2, batches=changing, clip=0.5)
"""Ranks 0 and 1 are one EP group, 2 and 3 the next."""
FUSED = partial(torch.optim.AdamW, lr=3e-3, fused=True)
REPLICAS = {"replica_slots": 1, "interval": 2}
MOVED = {
    "eager": job(implementation="eager"),
    "batched_mm": job(implementation="batched_mm"),
    "recomputed": job(recompute="layers"),
    "float32 masters": job(dtype=torch.bfloat16, optimizer=MasterSGD),
    "autocast": job(autocast=True),
    "averages": job(averages=True),
    "scaled": job(optimizer=FUSED, scaled=True, overflow=2, steps=4),
}
"""Against the same with experts that stay."""
SCALED = {
    "with replicas": job(planner=plan_newest, clip=0.0, overflow=3, steps=6, settings=REPLICAS),
    "with replicas, held back": job(planner=plan_newest, clip=0.0, steps=6, settings=REPLICAS, hold_back=True),
}
"""Against the same with a scaler, whose scale is a power of two: exact."""


def pairs() -> dict[str, tuple[Job, Job]]:
    found = {name: (one, moved(one)) for name, one in MOVED.items()}
    by_planner = job(planner=plan_newest, steps=8, settings={"interval": 2})
    found["by the planner"] = static(by_planner), by_planner
    return found | {f"scaled, {name}": (one, replace(one, scaled=True)) for name, one in SCALED.items()}


def train_pairs(rank: int) -> dict[str, list[Trace]]:
    return {name: train_all(rank, *pair) for name, pair in pairs().items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[Trace]]]:
    return run_ranks(2, train_pairs)


@pytest.mark.parametrize("name", pairs())
def test_no_bit_changes(trained: list[dict[str, list[Trace]]], name: str) -> None:
    for found in trained:
        one, other = found[name]
        assert differing(one.bits, other.bits) == []
        assert other.aborted == [] and other.commits >= 2
        assert one.commits == (other.commits if name.startswith("scaled, ") else 0)
        assert other.placement == trained[0][name][1].placement
        scaled = pairs()[name][1]
        assert other.scale == ((512.0 if scaled.overflow > 0 else 1024.0) if scaled.scaled else None)


def moved_in_several_ways(rank: int) -> tuple[Trace, list[list[Trace]]]:
    """Between steps, beside them, and in slices by `fully_shard`; each after the same with experts that stay; and ahead
    of all, every rank with all experts."""
    whole = job(steps=7, settings={"interval": 2})
    sliced, run = replace(whole, sliced=True, steps=5, width=48), Run(rank, moved(whole)).attach(overlap=True)
    while len(run.balancer.events.of_type(RebalanceCommitted)) < 2:
        run.step()  # on a busy machine experts arrive some steps later
    beside = run.end()
    still = train(rank, replace(whole, steps=run.steps))
    ways = [train_all(rank, whole, moved(whole)), [still, beside], train_all(rank, sliced, moved(sliced))]
    return train(rank, single(whole)), ways


@pytest.mark.parametrize("ranks", [4, pytest.param(6, marks=pytest.mark.long)])
def test_no_bit_changes_where_several_ranks_hold_an_expert(ranks: int) -> None:
    results = run_ranks(ranks, moved_in_several_ways)
    for apart, ways in results:
        assert [*apart.losses, *apart.norms] == pytest.approx([*ways[0][0].losses, *ways[0][0].norms], rel=1e-3)
        for (still, found), (_, first) in zip(ways, results[0][1], strict=True):
            assert differing(still.bits, found.bits) == []
            assert found.commits >= 2 and found.placement == first.placement


# -- EP groups that hold the same experts keep one placement, and whoever strays is noticed in time --------------------


def another_plan_for_the_second_group(rank: int) -> list[Trace]:
    """Both its ranks receive the first plan that moves anything with experts elsewhere."""
    done, run = [], Run(rank, job(planner=plan_newest, steps=8, settings={"interval": 2})).attach()

    def alter(message: bytearray) -> None:
        fields = json.loads(bytes(message))
        if not done and fields.get("placement"):
            done.append(True)
            placement = eplb.Placement.from_json(fields["placement"])
            fields["placement"] = shuffled(placement, np.ones((2, EXPERTS))).to_json()
            message[:] = json.dumps(fields).encode()

    if rank >= 2:
        run.engine.probe = lambda phase, of: alter(of) if phase is Phase.PLANNED else None
    return [run.train(8).end(), train(rank, static(run.job))]


def test_a_group_with_another_plan_is_noticed_before_anything_moves() -> None:
    for found, still in run_ranks(4, another_plan_for_the_second_group):
        assert found.aborted == ["rank 2, 3 has another plan than rank 0"]
        assert found.commits >= 1 and differing(still.bits, found.bits) == []


def start_or_restore_apart(rank: int) -> list[str]:
    start = eplb.Placement.initial(2, EXPERTS, 2)
    other = eplb.Placement(start.physical_to_logical[:, ::-1], EXPERTS, 2, start.home[:, ::-1])
    model, mine = make_model("olmoe", experts=EXPERTS), start if rank < 2 else other
    config, ep_group = eplb.BalancerConfig(initial_placement=mine), training.meshes(2, 2)[0]["ep"].get_group()
    said = [said_by(lambda: eplb.attach(model, config=config, ep_group=ep_group))]
    balancer = eplb.attach(model, ep_group=ep_group)
    narrow = eplb.Placement.initial(2, EXPERTS, 4 if rank == 3 else 2)
    right = {"step": 8, "placement": other.to_json()}
    states: list[dict[str, Any]] = [{**right, "placement": mine.to_json()}, {**right, "step": 8 + rank}]
    states += [{**right, "placement": narrow.to_json()}, {"placement": other.to_json()} if rank == 1 else right]
    said += [said_by(lambda state=state: balancer.load_state_dict(state)) for state in states]
    assert balancer.placement.digest() == start.digest()

    def fail(phase: Phase, subject: object) -> None:
        if phase is Phase.VERIFIED and rank == 0:
            raise OSError("the device went away")

    engine = balancer.rebalancer._engine
    engine.probe, probe = fail, engine.probe
    assert "could not be restored" in said_by(lambda: balancer.load_state_dict(right))
    engine.probe = probe
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
    assert all(said[3].endswith("rank 3 has another usable saved state than rank 0") for said in every)
    assert "not what state_dict() gave" in every[1][4] and every[0][4].endswith("no usable saved state on rank 1")


# -- torch.compile -----------------------------------------------------------------------------------------------------


def compiled_and_not(rank: int) -> list[Trace]:
    sgd = partial(torch.optim.SGD, lr=3e-3, momentum=0.9)
    plain = moved(job(optimizer=sgd, settings={"replica_slots": 1}))
    torch._dynamo.reset()
    return train_all(rank, plain, replace(plain, compiled=True))


@pytest.mark.long
def test_a_compiled_step_trains_to_the_same_bits() -> None:
    """Graphs break at MoE layers. A compiled model alone: `test_any_module`."""
    for plain, compiled in run_ranks(2, compiled_and_not):
        assert differing(plain.bits, compiled.bits) == [] and compiled.commits == 3
