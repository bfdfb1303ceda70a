"""What ranks tell each other before they move anything: comparisons, votes, and the one record that counts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import heard

import eplb_runtime as eplb
from eplb_runtime.distributed.consensus import (
    Agreement,
    Ballot,
    ConsensusError,
    Verdict,
    all_equal,
    extremes,
    first_problem,
    gather_bytes,
)
from eplb_runtime.distributed.control_channel import ConnectionLost, ControlChannel
from eplb_runtime.distributed.points import unobserved
from eplb_runtime.distributed.process_groups import ProcessGroups
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.distributed.store import JobStore


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def agreement_of(seconds: float = 30.0) -> Agreement:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return Agreement(control, JobStore(control.get_group_store(), "agreement", 30.0))


def gather_from_all(rank: int) -> tuple[list, tuple[dict[int, bytes], str]]:
    agreement = agreement_of()
    rows = agreement.gather(torch.tensor([[rank, -(2**62)], [rank * 7, 2**62]]))
    return rows.tolist(), agreement.gather_words(b"w%d" % rank, f"wrong on {rank}" if rank else "")


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6])
def test_every_rank_learns_the_words_of_all_in_their_order(ranks: int) -> None:
    rows = [[[rank, -(2**62)], [rank * 7, 2**62]] for rank in range(ranks)]
    words = {rank: b"w%d" % rank for rank in range(ranks)}
    assert run_ranks(ranks, gather_from_all) == [(rows, (words, "rank 1: wrong on 1" * (ranks > 1)))] * ranks


def compare(rank: int) -> list[Verdict]:
    agreement = agreement_of()
    same, other = digest_of("same"), digest_of("other")
    return [
        agreement.check_equal(same, "plan"),
        agreement.check_equal(other if rank in (2, 3) else same, "plan"),
        agreement.check_equal(bytes(16) if rank == 1 else same, "plan"),
        agreement.check_equal(same, "plan", "no memory" if rank == 4 else ""),
        agreement.check_equal(same, "plan", f"wrong on {rank}" if rank in (2, 3) else ""),
        agreement.check_equal(same, "plan"),
    ]


def test_ranks_that_differ_are_named_on_all_of_them() -> None:
    for verdicts in run_ranks(5, compare):
        assert verdicts == [
            Verdict(True),
            Verdict(False, "rank 2, 3 has another plan than rank 0"),
            Verdict(False, "no plan on rank 1"),
            Verdict(False, "rank 4: no memory"),
            Verdict(False, "rank 2: wrong on 2"),
            Verdict(True),
        ]


LONGER_THAN_A_TEST = 3600.0


def fail_at_work(rank: int) -> str:
    groups = ProcessGroups(Ranks(), [1], torch.device("cpu"), LONGER_THAN_A_TEST, only_control=True)
    channel = ControlChannel(groups, Mock(), lambda: None, unobserved)
    with pytest.raises(ConnectionLost) as lost:
        channel.run(lambda _, agreement: agreement.gather(torch.tensor({0: rank}[rank])))
    return str(lost.value)


def test_a_mistake_in_work_of_one_rank_leaves_no_other_waiting() -> None:
    """Rank 1's work fails ahead of its first collective, in which rank 0 waits for it."""
    waited, failed = run_ranks(2, fail_at_work)
    assert waited and failed == "KeyError: 1"


def vote(rank: int) -> list[Verdict]:
    agreement = agreement_of(LONGER_THAN_A_TEST)
    said = [
        agreement.vote_and_record(Ballot("a"), "", False),
        agreement.vote_and_record(Ballot("b"), "odd bytes" if rank == 1 else "", False),
    ]
    said.append(agreement.vote_and_record(Ballot("c"), "nothing came" if rank == 2 else "", rank == 2))
    return said


def test_one_decision_stands_also_where_a_rank_did_not_vote() -> None:
    """Rank 2 has timed out: it writes its word into the store and does not vote. The others hear of it, and at once
    that it does not come: they would wait for it longer than a test may take."""
    for whole, refused, broken in run_ranks(3, vote):
        assert whole == Verdict(True)
        assert refused == Verdict(False, "rank 1: odd bytes")
        assert not broken.commit and broken.connections_broken
        assert broken.cause == "nothing came"


def gather_and_look(rank: int) -> tuple[list[bytes], list[bytes], list[str], list[int], list[str]]:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    problems = [first_problem(text, group) for text in ("", "no memory" * 100 if rank else "", f"wrong on {rank}")]
    lowest, highest = extremes(torch.tensor([rank, -rank]), group)
    some = extremes(torch.tensor(rank), group, has_values=rank == 1)
    least, most = extremes(torch.tensor(rank), group, has_values=False)
    assert least > most, "no rank has values"
    return (
        gather_bytes(b"x" * rank, group),
        gather_bytes(b"", group),
        problems,
        [*lowest.tolist(), *highest.tolist(), *map(int, some)],
        [
            all_equal(b"same", "plan", group),
            all_equal(b"odd!" if rank == 2 else b"same", "plan", group),
            all_equal(b"odd!" if rank == 2 else b"same", "plan", group, [[0, 1], [2]]),
        ],
    )


def test_what_ranks_gather_is_the_same_on_each() -> None:
    for words, nothing, problems, numbers, equal in run_ranks(3, gather_and_look):
        assert words == [b"", b"x", b"xx"] and nothing == [b""] * 3
        assert problems == ["", "rank 1: " + "no memory" * 100, "rank 0: wrong on 0"]
        assert numbers == [0, -2, 2, 0, 1, 1]
        assert equal == ["", "rank 2 has another plan than rank 0", ""]


def gather_alone(rank: int) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONGER_THAN_A_TEST))
    said = ""
    if rank == 0:
        with pytest.raises(ConsensusError) as late:
            gather_bytes(b"here", group, deadline=time.monotonic() + 0.1)
        said = str(late.value)
    dist.barrier()
    return said


def test_gathering_ends_by_its_deadline() -> None:
    said, _ = run_ranks(2, gather_alone)
    assert said.startswith("the ranks could not meet: ")


# -- Ranks that run unequal numbers of forwards: said in one line that names them, and never the end of the process


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
