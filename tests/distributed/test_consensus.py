"""What ranks tell each other before they move anything: comparisons, votes, and the one record that counts."""

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support import training
from support.job import Job, Run
from support.moe_models import batch_of
from support.ranks import run_ranks
from support.seen import heard, said_by

import eplb_runtime as eplb
from eplb_runtime.distributed.consensus import (
    Agreement,
    Ballot,
    TransportError,
    Verdict,
    all_equal,
    first_problem,
    gather_bytes,
    unobserved,
)
from eplb_runtime.distributed.control_channel import ConnectionLost, ControlChannel
from eplb_runtime.distributed.process_groups import ProcessGroups
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.distributed.store import JobStore


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def agreement_of(seconds: float = 30.0) -> Agreement:
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    return Agreement(control, JobStore(control.get_group_store(), "agreement", 30.0))


def talk(rank: int) -> dict[str, Any]:
    """What five ranks hear of each other."""
    agreement = agreement_of()
    same, other = digest_of("same"), digest_of("other")
    odd = b"odd!" if rank == 2 else b"same"
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    problems = [first_problem(text, group) for text in ("", "no memory" * 100 if rank else "", f"wrong on {rank}")]
    return {
        "rows": agreement.gather(torch.tensor([[rank, -(2**62)], [rank * 7, 2**62]])).tolist(),
        "words": agreement.gather_words(b"w%d" % rank, f"wrong on {rank}" if rank else ""),
        "verdicts": [
            agreement.check_equal(same, "plan"),
            agreement.check_equal(other if rank in (2, 3) else same, "plan"),
            agreement.check_equal(bytes(16) if rank == 1 else same, "plan"),
            agreement.check_equal(same, "plan", "no memory" if rank == 4 else ""),
            agreement.check_equal(same, "plan", f"wrong on {rank}" if rank in (2, 3) else ""),
            agreement.check_equal(same, "plan"),
        ],
        "bytes": [gather_bytes(b"x" * rank, group), gather_bytes(b"", group)],
        "problems": problems,
        "equal": [
            all_equal(b"same", "plan", group),
            all_equal(odd, "plan", group),
            all_equal(odd, "plan", group, [[0, 1], [2], [3, 4]]),
        ],
    }


def test_every_rank_learns_the_words_of_all_and_who_differs_is_named_on_all() -> None:
    expected = {
        "rows": [[[rank, -(2**62)], [rank * 7, 2**62]] for rank in range(5)],
        "words": ({rank: b"w%d" % rank for rank in range(5)}, "rank 1: wrong on 1"),
        "verdicts": [
            Verdict(True),
            Verdict(False, "rank 2, 3 has another plan than rank 0"),
            Verdict(False, "no plan on rank 1"),
            Verdict(False, "rank 4: no memory"),
            Verdict(False, "rank 2: wrong on 2"),
            Verdict(True),
        ],
        "bytes": [[b"x" * rank for rank in range(5)], [b""] * 5],
        "problems": ["", "rank 1: " + "no memory" * 100, "rank 0: wrong on 0"],
        "equal": ["", "rank 2 has another plan than rank 0", ""],
    }
    assert run_ranks(5, talk) == [expected] * 5


LONGER_THAN_A_TEST = 3600.0


def vote(rank: int) -> list[Verdict]:
    agreement, late = agreement_of(LONGER_THAN_A_TEST), Ballot("late")
    if rank:  # as another thread of it says while this one is about to vote
        late.say(f"{rank} waits no longer", "late" if rank == 1 else "")
    said = [
        agreement.vote_and_record(late, "", False),
        agreement.vote_and_record(Ballot("a"), "", False),
        agreement.vote_and_record(Ballot("b"), "odd bytes" if rank == 1 else "", False),
    ]
    said.append(agreement.vote_and_record(Ballot("c"), "nothing came" if rank == 2 else "", rank == 2))
    return said


def test_one_decision_stands_also_where_a_rank_did_not_vote() -> None:
    """Rank 2 has timed out: it writes its word into the store and does not vote. The others hear of it, and at once
    that it does not come: they would wait for it longer than a test may take. A refusal's kind goes with it."""
    for late, whole, refused, broken in run_ranks(3, vote):
        assert late == Verdict(False, "rank 1: 1 waits no longer", kind="late")
        assert whole == Verdict(True)
        assert refused == Verdict(False, "rank 1: odd bytes")
        assert not broken.commit and broken.connections_broken
        assert broken.cause == "nothing came"


def gather_alone(rank: int) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LONGER_THAN_A_TEST))
    said = ""
    if rank == 0:
        with pytest.raises(TransportError) as late:
            gather_bytes(b"here", group, deadline=time.monotonic() + 0.1)
        said = str(late.value)
    dist.barrier()
    return said


def test_gathering_ends_by_its_deadline() -> None:
    said, _ = run_ranks(2, gather_alone)
    assert said.startswith("the ranks could not meet: ")


def fail_at_work(rank: int) -> str:
    groups = ProcessGroups(Ranks(), [1], torch.device("cpu"), LONGER_THAN_A_TEST)
    channel = ControlChannel(groups, Mock(), lambda: None, unobserved)
    with pytest.raises(ConnectionLost) as lost:
        channel.run(lambda _, agreement: agreement.gather(torch.tensor({0: rank}[rank])))
    return str(lost.value)


def test_a_mistake_in_work_of_one_rank_leaves_no_other_waiting() -> None:
    """Rank 1's work fails ahead of its first collective, in which rank 0 waits for it."""
    waited, failed = run_ranks(2, fail_at_work)
    assert waited.startswith("gloo: ") and failed == "KeyError: 1"


# -- Ranks that run unequal numbers of forwards: said in one line that names them, and never the end of the process


class Parting(Run):
    """An attached model in training, past the guard's first steps unless told otherwise."""

    def __init__(self, rank: int, steps: int = 4, **options: Any) -> None:
        super().__init__(rank, Job(settings={"interval": 100, **options}))
        self.attach().train(steps)

    def step(self) -> None:
        self.model.train()
        super().step()

    @torch.no_grad()
    def evaluate(self, batches: int) -> None:
        self.model.eval()
        for batch in range(batches):
            self.model(input_ids=batch_of(self.rank, batch, length=5 + self.rank))

    def generate(self, length: int) -> None:
        self.model.eval().generate(
            batch_of(self.rank, 0), max_new_tokens=length, min_new_tokens=length, do_sample=False, use_cache=False
        )

    def heard(self, *work: Callable[[], None]) -> str:
        """What some calls, one after the other, raise or warn of."""
        self.optimizer.zero_grad()
        with heard() as lines:
            try:
                for call in work:
                    call()
            except RuntimeError as error:
                lines.append(f"{type(error).__name__}: {error}")
        return "\n".join(lines)


def meeting(rank: int) -> list[list[str]]:
    """The ranks meet in forwards that don't belong together, without copies and with them: on all at once, without a
    wait. Who was ahead has met no one yet in what the others have behind them."""
    found = []
    for slots in (0, 1):
        job = Parting(rank, replica_slots=slots)
        right = partial(job.evaluate, 3), partial(job.generate, 3), job.step
        said = [job.heard(*right), job.heard(partial(job.evaluate, 3 + (rank == 0)), job.step)]
        said += [job.heard(partial(job.generate, 4 if rank else 6), job.step), job.heard(*right)]
        if rank == 0:  # as after a commit that has reached one rank only
            job.balancer.runtime.maps.table.prepare(job.balancer.placement, [1])()
        found.append([*said, job.heard(job.step)])
        job.balancer.close()
    return found


def test_forwards_that_do_not_belong_together_are_noticed_where_they_meet() -> None:
    for rank, found in enumerate(run_ranks(2, meeting)):
        for before, batches, answers, after, parted in found:
            start = f"OutOfStepError: rank {rank} and rank {1 - rank} have different placements of"
            assert parted.startswith(f"{start} MoE layer 1: a migration was committed on some ranks only")
            assert before == after == "", "right use is silent, before and after"
            for error in (batches, answers):
                assert error.startswith("OutOfStepError: ranks run different forwards at once: rank ")
                assert "rank 0 in the forward of MoE layer 0 in evaluation without gradients after" in error
                assert "rank 1 in the forward of MoE layer 0 in training after" in error
                assert "synced_gpus=True" in error and "\n" not in error


def meeting_in_the_first_steps(rank: int) -> None:
    job = Parting(rank, steps=0)

    def exit_early() -> None:
        out = job.model(input_ids=batch_of(rank, 0), output_hidden_states=True)
        out.hidden_states[1].square().mean().backward()
        job.optimizer.step()

    assert job.heard(exit_early) == ""
    said = job.heard(job.step if rank else partial(job.evaluate, 1))
    assert "OutOfStepError: ranks run different forwards at once: rank " in said
    job.balancer.close()


def test_ranks_that_part_in_the_first_steps_are_told_at_once_and_on_all_but_not_who_exits_early() -> None:
    run_ranks(2, meeting_in_the_first_steps)


def rebalance_alone(rank: int) -> str:
    """The second rank calls it while the first trains on and its guard compares; both then train to the end."""
    settings = {"interval": 50, "lag": 1, "timeout_seconds": training.DEADLINE}
    job, said = Run(rank, Job(planner=eplb.plan, settings=settings)).attach().train(1), ""
    if rank == 1:
        said = said_by(job.balancer.rebalance)
    job.train(4).balancer.rebalance()
    job.balancer.close()
    return said


def test_a_rebalance_that_one_rank_calls_is_refused_there_and_training_goes_on() -> None:
    none, said = run_ranks(2, rebalance_alone)
    assert none == "" and f"rank 0 did not come to rebalance() within {training.DEADLINE:g} s" in said
