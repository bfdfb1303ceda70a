"""Ranks that run unequal numbers of forwards: said in one line that names them, and never the end of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard

import eplb_runtime as eplb


class Job:
    """An attached model in training, past the guard's first steps."""

    def __init__(self, rank: int, steps: int = 4, **options: Any) -> None:
        self.rank = rank
        self.model = make_model("olmoe", experts=8)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.balancer = training.attach(self.model, self.optimizer, policy="static", **options)
        for step in range(steps):
            self.step(step)

    def loss(self, step: int) -> torch.Tensor:
        ids = batch_of(self.rank, step)
        return self.model.train()(input_ids=ids, labels=ids).loss

    def step(self, step: int) -> None:
        self.loss(step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self, batches: int) -> None:
        self.model.eval()
        for batch in range(batches):
            self.model(input_ids=batch_of(self.rank, batch, length=5 + self.rank))

    def generate(self, length: int) -> None:
        self.model.eval().generate(
            batch_of(self.rank, 0), max_new_tokens=length, min_new_tokens=length, do_sample=False, use_cache=False
        )

    def heard(self, work: Callable[[], None]) -> tuple[str, list[str]]:
        """What was raised, and what was warned of."""
        with heard() as lines:
            try:
                work()
            except RuntimeError as error:
                return f"{type(error).__name__}: {error}", lines
        return "", lines


def meeting(rank: int, slots: int) -> list[tuple[str, list[str]]]:
    """The ranks meet in forwards that don't belong together: on all at once, without a wait."""
    job = Job(rank, replica_slots=slots)

    def more_batches() -> None:
        job.evaluate(3 + (rank == 0))
        job.step(0)

    def longer_answers() -> None:
        job.generate(4 if rank else 6)
        job.step(0)

    def equally_many() -> None:
        job.evaluate(3)
        job.generate(3)
        job.step(0)

    said = []
    for work in (equally_many, more_batches, longer_answers, equally_many):
        job.optimizer.zero_grad()
        said.append(job.heard(work))
        # Who was ahead has met no one yet in what the others have behind them.

    def parted() -> None:
        """As after a commit that has reached one rank only."""
        if rank == 0:
            job.balancer.runtime.maps.table.prepare(job.balancer.placement, [1])()
        job.step(0)

    said.append(job.heard(parted))
    job.balancer.close()
    return said


@pytest.mark.parametrize("slots", [0, 1])
def test_forwards_that_do_not_belong_together_are_noticed_where_they_meet(slots: int) -> None:
    results = run_ranks(2, meeting, slots)
    for rank, (before, batches, answers, after, parted) in enumerate(results):
        start = f"OutOfStepError: ranks have parted: rank {rank} and rank {1 - rank} have different placements of"
        assert parted[0].startswith(f"{start} MoE layer 1,")
        assert before == after == ("", []), "right use is silent, before and after"
        for error, warnings in (batches, answers):
            assert error.startswith("OutOfStepError: ranks run different forwards at once: rank ")
            assert "rank 0 in the forward of MoE layer 0 in evaluation without gradients after" in error
            assert "rank 1 in the forward of MoE layer 0 in training after" in error
            assert "synced_gpus=True" in error and "\n" not in error and warnings == []


def evaluate_on_one_rank(job: Job) -> None:
    if job.rank == 0:
        job.evaluate(1)
    else:
        job.step(0)


def early_exit_everywhere(job: Job) -> None:
    ids = batch_of(job.rank, 0)
    job.model.train()(input_ids=ids, output_hidden_states=True).hidden_states[1].square().mean().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def meeting_elsewhere(rank: int) -> dict[str, tuple[str, list[str]]]:
    said = {}
    for steps in (0, 4):
        for case in (evaluate_on_one_rank, early_exit_everywhere):
            job = Job(rank, steps)
            said[f"{case.__name__}, {steps}"] = job.heard(lambda case=case, job=job: case(job))
            job.balancer.close()
    return said


def test_ranks_that_part_in_any_step_are_told_at_once_and_on_all() -> None:
    first, second = run_ranks(2, meeting_elsewhere)
    for result in (first, second):
        for steps in (0, 4):
            error, _ = result[f"evaluate_on_one_rank, {steps}"]
            assert error.startswith("OutOfStepError: ranks run different forwards at once: rank ")
            assert result[f"early_exit_everywhere, {steps}"] == ("", [])


def rebalance_alone(rank: int) -> tuple[str, list[float], bool]:
    """The second rank calls it while the first trains on and its guard compares; both then train to the end."""
    model = make_model("olmoe")
    optimizer = torch.optim.AdamW(model.parameters())
    options = {"interval": 50, "timeout_seconds": training.DEADLINE, "dense_gradients": "allreduce"}
    balancer = eplb.attach(model, optimizer, config=config_from_settings(options))
    said, losses = "", []
    for step in range(5):
        if step == 1 and rank == 1:
            try:
                balancer.rebalance()
            except RuntimeError as error:
                said = str(error)
        losses.append(training.step(model, optimizer, batch_of(rank, step)))
    together = balancer.rebalance()
    balancer.close()
    return said, losses, together


def test_a_rebalance_that_one_rank_calls_is_refused_there_and_training_goes_on() -> None:
    (none, *_), (said, losses, _) = run_ranks(2, rebalance_alone)
    assert none == "" and f"rank 0 did not come to rebalance() within {training.DEADLINE:g} s" in said
    assert len(losses) == 5
