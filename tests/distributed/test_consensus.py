"""What ranks tell each other before they move anything: comparisons, votes, and the one record that counts."""

from __future__ import annotations

import hashlib
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from eplb_runtime.distributed.ballot import Ballot, Verdict
from eplb_runtime.distributed.consensus import (
    Agreement,
    ConsensusError,
    all_equal,
    extremes,
    first_problem,
    gather_bytes,
)


def digest_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def agreement_of(seconds: float = 30.0) -> Agreement:
    return Agreement(dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds)))


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
        [str(problem) for problem in problems],
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
        assert problems == ["None", "rank 1: " + "no memory" * 100, "rank 0: wrong on 0"]
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
