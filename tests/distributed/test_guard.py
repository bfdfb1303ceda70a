"""Mistakes that would spoil training without a word are found in its first steps; right use is silent and unchanged."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
from support import training
from support.job import Job, Run
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks
from support.seen import heard
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from eplb_runtime.balancer.guard import GuardError
from eplb_runtime.balancer.runtime import StructureError
from eplb_runtime.events import GuardFinding

EXPERTS = 8


def nothing(*_: Any) -> None: ...


@dataclass(frozen=True)
class Case:
    """A job of so many steps, and what is done on each rank: to the model before attach, to the job after it, ahead of
    each forward and of each step of the optimizer."""

    steps: int = 6
    prepare: Callable[[int, nn.Module], object] = nothing
    begin: Callable[[Run], object] = nothing
    ahead: Callable[[Run, int], object] = nothing
    before_step: Callable[[Run, int], object] = nothing
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    job: Job = field(default_factory=partial(Job, layers=1))
    options: dict[str, object] = field(default_factory=dict)


def run(rank: int, case: Case) -> dict[str, Any]:
    settings = {"interval": 4, "lag": 1, "policy": "static", **case.options}
    optimizer = partial(case.optimizer, lr=1e-3)
    job, losses, error = Run(rank, replace(case.job, optimizer=optimizer, settings=settings)), [], ""
    case.prepare(rank, job.model)
    case.begin(job.attach())
    with heard() as warnings:
        try:
            for step in range(case.steps):
                case.ahead(job, step)
                job.backward(loss := job.forward())
                case.before_step(job, step)
                job.update()
                losses.append(loss.item())
        except (GuardError, StructureError) as raised:
            error = str(raised)
    found = [(event.step, event.finding) for event in job.balancer.events.of_type(GuardFinding)]
    job.balancer.close()
    return {"losses": losses, "error": error, "findings": found, "warnings": warnings}


def padding_alone(job: Run) -> None:
    """One rank has nothing but padding, as at the end of data that does not divide evenly."""

    def pad(module: nn.Module, args: tuple, batch: dict) -> tuple:
        if job.rank == 1:
            batch["attention_mask"] = torch.zeros_like(batch["input_ids"])
        return args, batch

    job.model.register_forward_pre_hook(pad, with_kwargs=True, prepend=True)


def wrapped(job: Run) -> None:
    job.module = DistributedDataParallel(job.model)


def clipped_by_each_rank(job: Run, step: int) -> None:
    job.balancer.reduce_gradients()
    nn.utils.clip_grad_norm_(job.model.parameters(), 0.1)


def experts_alone(job: Run) -> None:
    """Nothing that ranks share shows what happens to them."""
    for name, parameter in job.model.named_parameters():
        parameter.requires_grad_(".experts." in name)


def rates_by_own_loss(job: Run, step: int) -> None:
    if step >= 4:  # when everything is no longer looked at
        job.optimizer.param_groups[0]["lr"] *= 0.9 if job.rank else 0.8


def unfrozen(job: Run) -> None:
    group = job.optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
    experts_of(job.model).requires_grad_(True)


def skipped(job: Run) -> None:
    """As torch's GradScaler does where an overflow shows on one rank alone."""
    job.optimizer.step = (lambda *_: None) if job.rank == 1 else job.optimizer.step


class WritesNothing(torch.optim.SGD):
    def step(self, closure: object = None) -> None: ...


def written(job: Run, step: int) -> None:
    """Long after the first steps, somebody writes a parameter on rank 1 alone."""
    if step == 4 and job.rank == 1:
        with torch.no_grad():
            job.model.lm_head.weight[-1, -1] += 1e-3


def between_steps(job: Run, step: int) -> None:
    job.model.eval()
    with torch.set_grad_enabled(step == 0):
        job.model(input_ids=batch_of(0, step))
    job.model.train()


def experts_of(model: Any) -> nn.Module:
    return model.model.layers[0].mlp.experts


MOVED = {"policy": "incremental", "gate": "always"}
THREE: dict[str, Any] = {"job": Job(layers=3), "steps": 5, "options": {"interval": 3, "guard": "warn"}}
CASES = {
    "right": Case(10, options=MOVED),
    "off": Case(10, options={**MOVED, "guard": "off"}),
    "DDP": Case(begin=wrapped, options={"dense_gradients": "host"}),
    "padding alone": Case(begin=padding_alone),
    "evaluation mode, off": Case(begin=lambda job: job.model.eval(), options={"guard": "off"}),
    "evaluation mode": Case(begin=lambda job: job.model.eval()),
    "evaluation mode in one late step": Case(14, ahead=lambda job, step: job.model.train(step != 5)),
    "nobody averages": Case(options={"dense_gradients": "host"}),
    "clipped by each rank": Case(before_step=clipped_by_each_rank),
    "rates by rank": Case(10, begin=experts_alone, before_step=rates_by_own_loss),
    "writes nothing": Case(optimizer=WritesNothing),
    "frozen on one rank": Case(prepare=lambda rank, model: experts_of(model).requires_grad_(rank == 0)),
    "unfrozen later": Case(prepare=lambda rank, model: experts_of(model).requires_grad_(False), begin=unfrozen),
    "skipped on one rank": Case(1, begin=skipped, options={"interval": 1000, "timeout_seconds": training.DEADLINE}),
    "written on one rank": Case(14, before_step=written),
    "written on one rank, raising": Case(10, before_step=written, options={"guard": "raise"}),
    "evaluations between steps": Case(**{**THREE, "job": Job(layers=3, recompute="reentrant")}, ahead=between_steps),
}


def all_cases(rank: int) -> dict[str, dict[str, Any]]:
    return {name: run(rank, case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(2, all_cases)


Results = list[dict[str, dict[str, Any]]]


@pytest.mark.parametrize("name", ["right", "DDP", "padding alone", "evaluations between steps", "evaluation mode, off"])
def test_right_use_is_silent(results: Results, name: str) -> None:
    for result in results:
        assert (result[name]["error"], result[name]["findings"]) == ("", [])
        assert not [line for line in result[name]["warnings"] if "differ from rank" in line]


def test_the_guard_changes_no_bit(results: Results) -> None:
    for result in results:
        assert result["right"]["losses"] == result["off"]["losses"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("evaluation mode", "call model.train()"),
        ("nobody averages", "dense_gradients='allreduce'"),
        ("clipped by each rank", "clip by balancer.clip_grad_norm_"),
        ("frozen on one rank", "the trained parameters on rank 1 differ from rank 0's"),
        ("unfrozen later", "once, but lists model.layers.0.mlp.experts"),
        ("writes nothing", "optimizer.step() did not change"),
    ],
)
def test_a_mistake_is_raised_in_the_first_step_on_every_rank(results: Results, name: str, said: str) -> None:
    (error,) = {result[name]["error"] for result in results}
    assert said in error and len(error) <= 200 and "\n" not in error
    assert all(result[name]["losses"] == [] for result in results)


def test_learning_rates_by_rank_are_said_whenever_they_begin(results: Results) -> None:
    for result in results:
        ((_, finding),) = result["rates by rank"]["findings"]
        assert "the learning rates of the optimizer on rank 1 differ from rank 0's" in finding


def test_a_rank_that_skips_a_step_alone_is_named(results: Results) -> None:
    stepped, goes_on = (result["skipped on one rank"]["error"] for result in results)
    assert f"rank 1 did not come to optimizer.step() within {training.DEADLINE:g} s" in stepped
    assert "eplb.GradScaler(balancer)" in stepped and goes_on == "", "it goes on until it needs the others"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("evaluation mode in one late step", ("call model.train()", "in step 6 in evaluation mode")),
        ("written on one rank", ("the weights of ", "rank 1 differ from rank 0's: write weights on every", "lm_head")),
    ],
)
def test_a_later_mistake_is_warned_of_at_the_next_decision(results: Results, name: str, words: tuple[str, ...]) -> None:
    for result in results:
        late = result[name]
        ((step, finding),) = late["findings"]
        assert late["error"] == "" and len(late["losses"]) == 14 and step == 9
        assert finding.startswith(words[0]) and all(word in finding for word in words) and finding in late["warnings"]
        if name == "written on one rank":
            raised = result[f"{name}, raising"]
            assert raised["error"] == finding and len(raised["losses"]) == step - 1


def alone(rank: int) -> None:
    """A rank adopts an optimizer alone; later the top-k of ranks parts."""
    model = make_model("olmoe", experts=EXPERTS, layers=1)
    balancer = training.attach(model, policy="static", timeout_seconds=training.DEADLINE)
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"rank 0 did not come to balancer.adopt\(\)"):
            balancer.adopt(torch.optim.SGD(model.parameters(), lr=0.1))
    torch.distributed.barrier()
    balancer.adopt(optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    if rank == 1:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(RuntimeError, match="rank 0 did not come to add_param_group of a SGD"):
            balancer.reduce_gradients()
    torch.distributed.barrier()
    with torch.no_grad():
        model(input_ids=batch_of(rank, 0))
    model.model.layers[0].mlp.gate.top_k = 2 + rank
    with pytest.raises(RuntimeError, match=r"with top-k 2; rank 1 in .* with top-k 3"):
        model(input_ids=batch_of(rank, 0))
    balancer.close()


def test_a_rank_that_adopts_alone_and_ranks_of_another_top_k_get_a_line() -> None:
    run_ranks(2, alone)
