"""Models cut into pipeline stages by hand: one job, one plan for all stages, equal to the whole model in one piece."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pipeline_models import EXPERTS, HIDDEN, TOP_K, Stage, make_stages, micro_batch
from ranks import run_ranks
from torch import Tensor, nn

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import LoadMeasured, RebalanceAborted, RebalanceCommitted
from eplb_runtime.planner.shuffle import plan_shuffle

MICRO_BATCHES, TOKENS, STEPS = 3, 24, 2


def loss_of(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out, labels) / MICRO_BATCHES


def break_nothing() -> None:
    pass


@dataclass(frozen=True)
class Job:
    blocks_of_stage: tuple[int, ...] = (2, 1)
    stages_of_rank: tuple[tuple[int, ...], ...] = ((0,), (1,))
    ep_size: int = 2
    copies_of_model: int = 1
    moving: bool = False
    damage: Callable[[], None] = break_nothing

    @property
    def world_size(self) -> int:
        return len(self.stages_of_rank) * self.ep_size * self.copies_of_model


class Pipe:
    """Carries hidden states forward and their gradients back between the ranks that hold neighbouring stages."""

    def __init__(self, job: Job, rank: int) -> None:
        per_stage = job.ep_size * job.copies_of_model
        self._column, self._per_stage = rank % per_stage, per_stage
        self._holder = {
            stage: index * per_stage + self._column
            for index, stages in enumerate(job.stages_of_rank)
            for stage in stages
        }
        self._rank = rank
        self._kept: dict[tuple[str, int, int], Tensor] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, what: str, tensor: Tensor, stage: int, number: int) -> None:
        if self._holder[stage] == self._rank:
            self._kept[what, stage, number] = tensor.detach().clone()
        else:
            message = tensor.detach().contiguous()
            work = dist.isend(message, self._holder[stage], tag=self._tag(what, stage, number))
            self._sent.append((work, message))

    def receive(self, what: str, stage: int, number: int, source_stage: int) -> Tensor:
        if self._holder[source_stage] == self._rank:
            return self._kept.pop((what, stage, number))
        arrived = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
        dist.recv(arrived, self._holder[source_stage], tag=self._tag(what, stage, number))
        return arrived

    def finish(self) -> None:
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _tag(self, what: str, stage: int, number: int) -> int:
        return (number * 16 + stage) * 2 + (what == "forward")


def one_forward_one_backward(position: int, ranks: int) -> Iterator[tuple[str, int]]:
    """The order of one rank's work: a few forwards ahead, then in turn, then the backwards that are left."""
    ahead = min(ranks - 1 - position, MICRO_BATCHES)
    yield from (("forward", number) for number in range(ahead))
    for number in range(MICRO_BATCHES - ahead):
        yield "forward", number + ahead
        yield "backward", number
    yield from (("backward", number) for number in range(MICRO_BATCHES - ahead, MICRO_BATCHES))


def all_forwards_then_backwards(stages: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    for number in range(MICRO_BATCHES):
        yield from (("forward", stage, number) for stage in stages)
    for number in range(MICRO_BATCHES):
        yield from (("backward", stage, number) for stage in reversed(stages))


class Runner:
    """One rank's stages in training."""

    def __init__(self, job: Job, rank: int, stages: dict[int, Stage]) -> None:
        self.pipe = Pipe(job, rank)
        self.job = job
        self.stages = stages
        self.last = len(job.blocks_of_stage) - 1
        self.position = rank // (job.ep_size * job.copies_of_model)
        self.replica = rank % (job.ep_size * job.copies_of_model)
        self._open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def work(self) -> Iterator[tuple[str, int, int]]:
        held = self.job.stages_of_rank[self.position]
        if len(held) > 1:
            yield from all_forwards_then_backwards(held)
            return
        for what, number in one_forward_one_backward(self.position, len(self.job.stages_of_rank)):
            yield what, held[0], number

    def step(self, step: int) -> float:
        loss = 0.0
        for what, stage, number in self.work():
            if what == "forward":
                loss += self.forward(stage, number, step)
            else:
                self.backward(stage, number)
        self.pipe.finish()
        return loss

    def forward(self, stage: int, number: int, step: int) -> float:
        ids, labels = micro_batch(self.replica, step, number, TOKENS)
        incoming = ids if stage == 0 else self.pipe.receive("forward", stage, number, stage - 1).requires_grad_()
        out = self.stages[stage](incoming)
        if stage == self.last:
            out = loss_of(out, labels)
        self._open[stage, number] = incoming, out
        if stage < self.last:
            self.pipe.send("forward", out, stage + 1, number)
            return 0.0
        return out.item()

    def backward(self, stage: int, number: int) -> None:
        incoming, out = self._open.pop((stage, number))
        out.backward(None if stage == self.last else self.pipe.receive("backward", stage, number, stage + 1))
        if stage > 0:
            self.pipe.send("backward", incoming.grad, stage - 1, number)


def train(rank: int, job: Job) -> dict:
    job.damage()
    per_stage = job.ep_size * job.copies_of_model
    position = rank // per_stage
    held = job.stages_of_rank[position]
    everything = make_stages(job.blocks_of_stage)
    stages = {stage: everything[stage] for stage in held}
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-2) for stage in stages.values()]
    first = rank - rank % job.ep_size
    balancer = eplb.attach(
        list(stages.values()),
        optimizers,
        config=eplb.BalancerConfig(
            interval=1,
            policy="static" if not job.moving else "incremental",
            dense_gradients="allreduce",
            migration=eplb.MigrationConfig(lag=0),
        ),
        ranks=Ranks(ep=tuple(range(first, first + job.ep_size)), stages=held),
    )
    if job.moving:
        balancer._plan_with(plan_shuffle)
        balancer._wait_until_compiled()
    runner = Runner(job, rank, stages)
    losses, norms = [], []
    for stage in stages.values():
        stage.train()
    for step in range(STEPS):
        losses.append(runner.step(step))
        norms.append(balancer.clip_grad_norm_(0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    result = {
        "losses": losses,
        "norms": norms,
        "stages": {
            number: eplb.logical_state_dict(stage, optimizer)
            for (number, stage), optimizer in zip(stages.items(), optimizers, strict=True)
        },
        "layers": balancer.placement.num_layers,
        "epoch": balancer.placement.epoch,
        "digest": balancer.placement.digest(),
        "measured": [event.imbalance for event in balancer.events.of_type(LoadMeasured)],
        "committed": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def train_whole(job: Job) -> dict:
    """The same model, whole, in one process, on the batches of all ranks."""
    replicas = job.ep_size * job.copies_of_model
    stages = make_stages(job.blocks_of_stage)
    optimizers = [torch.optim.AdamW(stage.parameters(), lr=1e-2) for stage in stages]
    losses, norms = [[] for _ in range(replicas)], []
    for step in range(STEPS):
        for replica in range(replicas):
            total = 0.0
            for number in range(MICRO_BATCHES):
                out, labels = micro_batch(replica, step, number, TOKENS)
                for stage in stages:
                    out = stage(out)
                loss = loss_of(out, labels)
                (loss / replicas).backward()
                total += loss.item()
            losses[replica].append(total)
        parameters = [p for stage in stages for p in stage.parameters()]
        norms.append(nn.utils.clip_grad_norm_(parameters, 0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {
        "losses": losses,
        "norms": norms,
        "stages": [
            eplb.logical_state_dict(stage, optimizer) for stage, optimizer in zip(stages, optimizers, strict=True)
        ],
    }


def largest_difference(job: Job, results: list[dict], whole: dict) -> float:
    replicas = job.ep_size * job.copies_of_model
    differences = []
    for rank, result in enumerate(results):
        if len(job.blocks_of_stage) - 1 in job.stages_of_rank[rank // replicas]:
            differences += [abs(a - b) for a, b in zip(result["losses"], whole["losses"][rank % replicas], strict=True)]
        differences += [abs(a - b) for a, b in zip(result["norms"], whole["norms"], strict=True)]
        for number, state in result["stages"].items():
            reference = whole["stages"][number]
            assert state.keys() == reference.keys()
            differences += [float((state[name] - reference[name]).abs().max()) for name in state]
    return max(differences)


JOBS = {
    "two stages": Job(),
    "a stage without experts": Job(blocks_of_stage=(0, 2, 1), stages_of_rank=((0,), (1,), (2,)), ep_size=1),
    "two stages, two copies of the model": Job(ep_size=1, copies_of_model=2),
    "two stages a rank, in a V": Job(blocks_of_stage=(1, 1, 1, 1), stages_of_rank=((0, 3), (1, 2))),
}


@cache
def trained(name: str) -> list[dict]:
    return run_ranks(JOBS[name].world_size, train, JOBS[name])


@pytest.mark.parametrize("name", JOBS)
def test_a_model_in_stages_equals_the_whole_model(name: str) -> None:
    job, results = JOBS[name], trained(name)
    assert largest_difference(job, results, train_whole(job)) < 1e-11
    assert {result["layers"] for result in results} == {sum(job.blocks_of_stage)}
    assert all(result["norms"] == results[0]["norms"] for result in results)
    assert all(result["measured"] == results[0]["measured"] for result in results)


@pytest.mark.parametrize("name", ["two stages", "two stages a rank, in a V"])
def test_migrations_of_all_stages_change_no_bit(name: str) -> None:
    moving = run_ranks(4, train, replace(JOBS[name], moving=True))
    for rank, (before, after) in enumerate(zip(trained(name), moving, strict=True)):
        assert (after["committed"], after["aborted"]) == (STEPS, []), f"rank {rank}"
        assert after["epoch"] >= 2 and after["digest"] == moving[0]["digest"]
        assert after["losses"] == before["losses"] and after["norms"] == before["norms"]
        for number, state in before["stages"].items():
            assert [k for k in state if not torch.equal(state[k], after["stages"][number][k])] == []


def one_stage_alone(rank: int) -> list:
    """A plan that changes the layers of one stage only, with replica slots: the others have nothing to do."""
    job = Job()
    stage = make_stages(job.blocks_of_stage)[rank // 2]
    config = eplb.BalancerConfig(replica_slots=1, dense_gradients="allreduce", policy="static")
    ranks = Ranks(ep=(0, 1) if rank < 2 else (2, 3), stages=(rank // 2,))
    balancer = eplb.attach(stage, torch.optim.SGD(stage.parameters(), lr=0.1), config=config, ranks=ranks)
    before = balancer.placement
    map_, home = before.physical_to_logical.copy(), before.home.copy()
    map_[0, [0, -2]], home[0, [0, EXPERTS - 1]] = map_[0, [-2, 0]], home[0, [EXPERTS - 1, 0]]
    balancer._rebalancer._migrate(eplb.Placement(map_, EXPERTS, 2, home, before.epoch + 1))
    aborted = [event.cause for event in balancer.events.of_type(RebalanceAborted)]
    epoch = balancer.placement.epoch
    balancer.close()
    return [epoch, aborted]


def test_a_plan_may_change_one_stage_alone() -> None:
    assert run_ranks(4, one_stage_alone) == [[1, []]] * 4


def forget_the_other_stages() -> None:
    from eplb_runtime.balancer.gradients import reduction

    reduction.sum_over_stages = lambda square, groups: square


def test_a_norm_of_one_stage_alone_is_noticed() -> None:
    job = Job(damage=forget_the_other_stages)
    results = run_ranks(4, train, job)
    assert largest_difference(job, results, train_whole(job)) > 1e-4


ODD_NORMS = ((math.nan, 0), (math.nan, 1), (math.inf, 1))
"""What one gradient is, and in which stage."""


def norms_where_one_stage_has(rank: int) -> list[list[float]]:
    return [norm_where_one_stage_has(rank, *odd) for odd in ODD_NORMS]


def norm_where_one_stage_has(rank: int, value: float, stage_of_it: int) -> list[float]:
    stage = make_stages((1, 1))[rank]
    config = eplb.BalancerConfig(policy="static", guard="off", dense_gradients="allreduce")
    ranks = Ranks(ep=(rank,), stages=(rank,))
    balancer = eplb.attach(stage, torch.optim.SGD(stage.parameters()), config=config, ranks=ranks)
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    if rank == stage_of_it:
        stage.blocks[0].router.bias.grad[0] = value
    norm = balancer.clip_grad_norm_(1.0).item()
    balancer.close()
    return [norm, float(stage.blocks[0].mix.bias.grad[0])]


def test_a_norm_that_is_no_number_or_infinite_in_one_stage_is_so_on_every_rank() -> None:
    for *no_numbers, (infinite, _) in run_ranks(2, norms_where_one_stage_has):
        assert all(math.isnan(norm) and math.isnan(gradient) for norm, gradient in no_numbers)
        assert infinite == math.inf


def load_of_stages(rank: int) -> list:
    """Two stages of one layer on one EP rank each: what was counted, as every rank learns it."""
    job = Job(blocks_of_stage=(1, 1), ep_size=1)
    stage = make_stages(job.blocks_of_stage)[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    config = eplb.BalancerConfig(interval=2, dense_gradients="allreduce", migration=eplb.MigrationConfig(lag=1))
    balancer = eplb.attach([stage], [optimizer], config=config, ranks=Ranks(ep=(rank,), stages=(rank,)))
    totals: list = []
    decisions = balancer._rebalancer.decisions
    plan = decisions._plan
    decisions._plan = lambda measurement, *more: totals.append(np.stack(decisions.history)) or plan(measurement, *more)
    runner = Runner(job, rank, {rank: stage})
    stage.train()
    for step in range(3):
        runner.step(step)
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return [total.tolist() for total in totals]


def test_one_sum_holds_the_load_of_every_stage() -> None:
    planner, other = run_ranks(2, load_of_stages)
    assert other == []  # rank 0 of the job plans for all
    (load,) = planner
    per_layer = [[sum(layer) for layer in window] for window in load]
    assert per_layer == [[MICRO_BATCHES * TOKENS * TOP_K] * 2] * 2


def attach_wrongly(rank: int) -> dict[str, str]:
    said = {}

    def refused(case: str, ranks: Ranks, models: int = 1) -> None:
        stages = make_stages((1, 1, 1))
        before = {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}
        with pytest.raises(ValueError) as caught:
            eplb.attach(stages[:models], None, ranks=ranks)
        said[case] = str(caught.value)
        assert before == {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}

    refused("a gap", Ranks(ep=(rank,), stages=(0,) if rank == 0 else (2,)))
    refused("no stage named", Ranks(ep=(rank,)), models=2)
    refused("overlap", Ranks(ep=(0, 1) if rank == 0 else (1,)))
    refused("another size", Ranks(ep=(0, 1) if rank < 2 else (2,)))
    refused("divisors", Ranks(gradient_divisor=rank + 1))
    refused("uneven stages", Ranks(ep=(rank,), stages=(0, 1) if rank else (0,)), models=2 if rank else 1)
    return said


def test_ranks_that_contradict_each_other_are_refused_on_all() -> None:
    first, *others = run_ranks(3, attach_wrongly)
    assert all(said == first for said in others)
    assert "stages [0, 2]" in first["a gap"]
    assert "Ranks(stages=...)" in first["no stage named"]
    assert "do not partition" in first["overlap"]
    assert "differ in size" in first["another size"]
    assert "gradient divisors" in first["divisors"]
    assert "stage 0 is held together" in first["uneven stages"]
