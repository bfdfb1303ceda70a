"""torch's own pipeline schedules over stages with experts: one job, equal to the whole model in one piece."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.pipeline_models import EXPERTS, HIDDEN, VOCABULARY, Stage, make_stages, micro_batch
from support.ranks import rows_of, run_ranks
from support.shuffle import plan_by, plan_shuffle
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining import PipelineStage

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.hosts import pipelining

TOKENS, STEPS = 24, 2
V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
ONE_STAGE = ("Schedule1F1B", "ScheduleGPipe")
SCHEDULES = ("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", *V_SHAPED)


@dataclass(frozen=True)
class Pipeline:
    schedule: str
    blocks: int = 4
    pp: int = 2
    ep: int = 2
    micro_batches: int = 4
    moving: bool = False
    replica_slots: int = 0
    hold_back: bool = False
    meddle: bool = False
    overlap: bool = False
    beside: bool = False
    steps: int = STEPS

    @property
    def stages(self) -> int:
        return self.pp if self.schedule in ONE_STAGE else 2 * self.pp

    def stages_of(self, position: int) -> list[int]:
        if self.stages == self.pp:
            return [position]
        second = self.stages - 1 - position if self.schedule in V_SHAPED else position + self.pp
        return [position, second]


def batches(job: Pipeline, column: int, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, labels and what of it is no padding (``[N, 1]``), of all micro-batches one after the other."""
    parts = [micro_batch(column, step, number, TOKENS) for number in range(job.micro_batches)]
    ids, labels = (torch.cat(part) for part in zip(*parts, strict=True))
    padding = torch.arange(job.micro_batches).repeat_interleave(TOKENS)  # another number in each micro-batch
    place = torch.arange(len(ids)) % TOKENS
    return ids, labels, (place >= padding).long().unsqueeze(1)


def stage_of(job: Pipeline, number: int, module: Stage, group: dist.ProcessGroup) -> PipelineStage:
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    logits = torch.empty(TOKENS, VOCABULARY, dtype=torch.float64, requires_grad=True)
    first, last = number == 0, number == job.stages - 1
    return PipelineStage(
        module,
        number,
        job.stages,
        torch.device("cpu"),
        input_args=torch.zeros(TOKENS, dtype=torch.int64) if first else hidden,
        output_args=logits if last else hidden,
        group=group,
    )


@dataclass
class Run:
    """One rank's part of a job."""

    job: Pipeline
    column: int
    modules: dict[int, Stage]
    schedule: Any
    optimizers: list[torch.optim.Optimizer]
    balancer: eplb.Balancer


_GROUPS: dict[tuple[int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}


def groups_of(rank: int, pp: int, ep: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's pipeline and its EP group; made once in a process."""
    if (pp, ep) not in _GROUPS:
        pipelines = [dist.new_group(list(range(column, pp * ep, ep))) for column in range(ep)]
        experts = [dist.new_group(list(range(first, first + ep))) for first in range(0, pp * ep, ep)]
        _GROUPS[pp, ep] = pipelines[rank % ep], experts[rank // ep]
    return _GROUPS[pp, ep]


def start(rank: int, job: Pipeline) -> Run:
    pipeline, experts = groups_of(rank, job.pp, job.ep)
    everything = make_stages((job.blocks // job.stages,) * job.stages)
    modules = {number: everything[number].train() for number in job.stages_of(rank // job.ep)}
    stages = [stage_of(job, number, module, pipeline) for number, module in modules.items()]
    schedule = getattr(torch_pipelining.schedules, job.schedule)(
        stages[0] if job.schedule in ONE_STAGE else stages, job.micro_batches, loss_fn=nn.functional.cross_entropy
    )
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in modules.values()]
    balancer = pipelining.attach(
        schedule,
        optimizers,
        config=eplb.BalancerConfig(
            interval=1,
            overlap=job.beside,
            policy="incremental" if job.moving else "static",
            dense_gradients="allreduce",
            replica_slots=job.replica_slots,
            initial_placement=placement_with_copies(job) if job.replica_slots else None,
            migration=eplb.MigrationConfig(lag=0),
        ),
        ep_group=experts,
    )
    waits_less = balancer.rebalancer.overlapped.gate_seconds < balancer.config.timeout_seconds
    assert waits_less == (len(modules) < len(everything)), "ranks of other stages wait in the vote meanwhile"
    if job.moving:
        plan_by(balancer, plan_shuffle)
    if job.overlap:
        pipelining.overlap(schedule, balancer)
    return Run(job, rank % job.ep, modules, schedule, optimizers, balancer)


def placement_with_copies(job: Pipeline) -> eplb.Placement:
    """Each rank holds a copy of the next rank's first expert."""
    placement = eplb.Placement.initial(job.blocks, EXPERTS, job.ep, job.replica_slots)
    map_ = placement.physical_to_logical.copy()
    homes = EXPERTS // job.ep
    for rank in range(job.ep):
        map_[:, rank * (homes + job.replica_slots) + homes] = (rank + 1) % job.ep * homes
    return eplb.Placement(map_, EXPERTS, job.ep, placement.home, 0)


def train(rank: int, job: Pipeline) -> dict[str, Any]:
    run = start(rank, job)
    said: list[str] = []
    if job.meddle:
        next(iter(run.modules.values())).register_forward_pre_hook(lambda *_: meddle(run, said))
    result: dict[str, Any] = {"losses": [], "norms": [], "counts": [], "said": said}
    for step in range(job.steps):
        if job.beside and moved_twice(run.balancer):
            break
        ids, labels, real = batches(job, run.column, step)
        losses: list[Tensor] = []
        with run.balancer.no_sync() if job.hold_back else nullcontext():
            run.schedule.step(ids, target=labels, losses=losses, attention_mask=real)
        result["losses"].append([loss.item() for loss in losses])
        result["counts"].append(run.balancer.runtime.counter.counts.clone())
        result["norms"].append(run.balancer.clip_grad_norm_(0.5).item())
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        result["epoch"], result["digest"] = run.balancer.placement.epoch, run.balancer.placement.digest()
    result["state"] = {}
    for (number, module), optimizer in zip(run.modules.items(), run.optimizers, strict=True):
        first = number * job.blocks // job.stages
        for name, tensor in eplb.logical_state_dict(module, optimizer).items():
            result["state"][renamed(name, first)] = tensor
    result["committed"] = len(run.balancer.events.of_type(RebalanceCommitted))
    result["aborted"] = [event.cause for event in run.balancer.events.of_type(RebalanceAborted)]
    run.balancer.close()
    return result


def moved_twice(balancer: eplb.Balancer) -> bool:
    """Whether every rank has seen experts commit twice."""
    least = torch.tensor(len(balancer.events.of_type(RebalanceCommitted)))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.item() >= 2


def renamed(name: str, first: int) -> str:
    """Blocks are numbered over the whole model."""
    before, found, after = name.partition("blocks.")
    if not found:
        return name
    number, _, rest = after.partition(".")
    return f"{before}blocks.{int(number) + first}.{rest}"


def meddle(run: Run, said: list[str]) -> None:
    for call in (run.balancer.rebalance, run.balancer.step):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))


@cache
def whole(blocks: int, ep: int, micro_batches: int) -> dict[str, Any]:
    """The same model in one piece, in one process, on the batches of all ranks."""
    job = Pipeline("", blocks=blocks, ep=ep, micro_batches=micro_batches)
    (model,) = make_stages((blocks,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    counts = torch.zeros(blocks, EXPERTS, dtype=torch.int64)
    real_T: list[Tensor] = []

    def count(block: int, ids_TK: Tensor) -> None:
        counts[block] += torch.bincount(ids_TK[real_T[0]].reshape(-1), minlength=EXPERTS)

    for number, block in enumerate(model.blocks):
        block.experts.register_forward_pre_hook(lambda _, args, number=number: count(number, args[1]))
    result: dict[str, Any] = {"losses": [], "norms": [], "counts": []}
    for _step in range(STEPS):
        of_columns = []
        result["counts"].append([])
        for column in range(ep):
            counts.zero_()
            ids, labels, real = batches(job, column, _step)
            losses = []
            for one, label, mask in zip(*(x.chunk(micro_batches) for x in (ids, labels, real)), strict=True):
                real_T[:] = [mask.bool().reshape(-1)]
                loss = nn.functional.cross_entropy(model(one), label)
                (loss / micro_batches / ep).backward()
                losses.append(loss.item())
            of_columns.append(losses)
            result["counts"][-1].append(counts.clone())
        result["losses"].append(of_columns)
        result["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    result["state"] = eplb.logical_state_dict(model, optimizer)
    return result


def largest_difference(job: Pipeline, results: list[dict[str, Any]]) -> float:
    reference = whole(job.blocks, job.ep, job.micro_batches)
    differences = []
    for rank, result in enumerate(results):
        column, position = rank % job.ep, rank // job.ep
        assert result["aborted"] == []
        last = job.stages - 1 in job.stages_of(position)
        for step in range(STEPS):
            assert len(result["losses"][step]) == (job.micro_batches if last else 0)
            pairs = zip(result["losses"][step], reference["losses"][step][column], strict=False)
            differences += [abs(a - b) for a, b in pairs]
            differences.append(abs(result["norms"][step] - reference["norms"][step]))
        differences += [
            float((tensor - reference["state"][name]).abs().max()) for name, tensor in result["state"].items()
        ]
    names = {name for result in results for name in result["state"]}
    assert names == set(reference["state"])
    return max(differences)


def check_counts(job: Pipeline, results: list[dict[str, Any]]) -> None:
    reference = whole(job.blocks, job.ep, job.micro_batches)
    per_stage = job.blocks // job.stages
    for rank, result in enumerate(results):
        held = job.stages_of(rank // job.ep)
        here = [layer for stage in held for layer in range(stage * per_stage, (stage + 1) * per_stage)]
        for counts, expected in zip(result["counts"], reference["counts"], strict=True):
            assert torch.equal(counts[here], expected[rank % job.ep][here])
            assert counts.sum() == counts[here].sum()


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    wrong = [name for name, tensor in one["state"].items() if not torch.equal(tensor, other["state"][name])]
    return wrong + [name for name in ("losses", "norms") if one[name] != other[name]]


def several(rank: int, jobs: list[Pipeline]) -> list[dict[str, Any]]:
    return [train(rank, job) for job in jobs]


def run_jobs(world: int, jobs: list[Pipeline]) -> list[list[dict[str, Any]]]:
    """What each rank gave, for each job."""
    return [list(results) for results in zip(*run_ranks(world, several, jobs), strict=True)]


def beside_and_still(rank: int) -> list[dict[str, Any]]:
    """Experts that move beside the steps until they have twice, and experts that stay for as many steps."""
    job = Pipeline("ScheduleDualPipeV", overlap=True, moving=True, beside=True, steps=12)
    moved = train(rank, job)
    return [moved, train(rank, replace(job, moving=False, beside=False, steps=len(moved["losses"])))]


def test_experts_that_migrate_beside_the_steps_of_a_pipeline_change_no_bit() -> None:
    """Each layer is committed ahead of its first micro-batch; a forward and a backward may run at once."""
    results = run_ranks(4, beside_and_still)
    for after, before in results:
        assert after["committed"] >= 2 and after["digest"] == results[0][0]["digest"]
        assert differing(before, after) == []


@pytest.mark.parametrize("schedule", rows_of(SCHEDULES, "Schedule1F1B", "ScheduleDualPipeV"))
def test_a_schedule_equals_the_whole_model_and_migrations_change_no_bit(schedule: str) -> None:
    job = Pipeline(schedule)
    still, moved = run_jobs(4, [job, replace(job, moving=True, meddle=True)])
    assert largest_difference(job, still) < 1e-10
    check_counts(job, still)
    check_counts(job, moved)
    for before, after in zip(still, moved, strict=True):
        assert after["committed"] == STEPS and after["digest"] == moved[0]["digest"]
        assert differing(before, after) == []
        assert after["said"] and all(f"inside {schedule}.step" in said for said in after["said"])


COPIES = {
    "kept": Pipeline("ScheduleDualPipeV", replica_slots=1),
    "kept, and brought home once a step": Pipeline("Schedule1F1B", replica_slots=1, hold_back=True),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_experts_change_nothing_under_any_schedule(name: str) -> None:
    job = COPIES[name]
    (results,) = run_jobs(4, [job])
    assert largest_difference(job, results) < 1e-10
    check_counts(job, results)


IN_TURN = Pipeline("ScheduleDualPipeV", micro_batches=8)
AT_ONCE = replace(IN_TURN, overlap=True)
PAIRED = [(IN_TURN, AT_ONCE, replace(AT_ONCE, moving=True))]
PAIRED += [tuple(replace(job, replica_slots=1) for job in PAIRED[0][:2])]


def test_a_forward_and_a_backward_at_once_change_no_bit() -> None:
    results = iter(run_jobs(4, [job for jobs in PAIRED for job in jobs]))
    for in_turn, *at_once in PAIRED:
        expected = next(results)
        for job in at_once:
            for rank, (before, after) in enumerate(zip(expected, next(results), strict=True)):
                assert differing(before, after) == [], (job, rank)
                assert after["committed"] == (STEPS if job.moving else 0) and after["aborted"] == []
        assert largest_difference(in_turn, expected) < 1e-10


def attach_wrongly(rank: int) -> dict[str, str]:
    """Without a word, each of these would count or train wrongly."""
    pipeline = groups_of(rank, 2, 1)[0]
    hidden = torch.empty(TOKENS, HIDDEN, dtype=torch.float64)
    ids = torch.zeros(TOKENS, dtype=torch.int64)
    needs = hidden.clone().requires_grad_()
    wrong = {
        "no shapes": ({}, {}),
        "no shapes on one rank": ({"input_args": ids, "output_args": needs}, {"input_args": needs}),
        "no gradients": ({"input_args": ids, "output_args": needs}, {"input_args": hidden, "output_args": needs}),
    }
    said = {}
    for case, examples in wrong.items():
        module = make_stages((1, 1))[rank]
        stage = PipelineStage(module, rank, 2, torch.device("cpu"), group=pipeline, **examples[rank])
        schedule = torch_pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.cross_entropy)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with pytest.raises(ValueError) as caught:
            pipelining.attach(schedule, optimizer)
        said[case] = str(caught.value)
        assert module.blocks[0].experts.down_proj.shape[0] == EXPERTS
    return said


def test_stages_that_would_count_or_train_wrongly_are_refused_on_all_ranks() -> None:
    first, second = run_ranks(2, attach_wrongly)
    assert "stage 0 has no input_args and no output_args" in first["no shapes"]
    for said in (first, second):
        assert "stage 1 has no output_args" in said["no shapes on one rank"]
        assert "input_args of stage 1 need no gradients" in said["no gradients"]
        assert all("\n" not in line for line in said.values())
