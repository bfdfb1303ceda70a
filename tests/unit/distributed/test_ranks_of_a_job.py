"""Who has which rows of experts, from what the ranks of a job said."""

from __future__ import annotations

from dataclasses import replace

from eplb_runtime.distributed.ranks import Job


def job(divided_rows: int) -> Job:
    """Two stages of eight ranks, EP 2."""
    sets = tuple((first, first + 1) for first in range(0, 16, 2))
    return Job(tuple(range(16)), 5, sets, ((0,),) * 4 + ((1,),) * 4, (1, 1), 1, divided_rows)


def test_rows_that_are_not_divided_are_those_of_the_ep_groups() -> None:
    assert job(0).row_sets == list(job(0).ep_sets)
    assert (job(0).row_ranks, job(0).row_rank, job(0).row_division) == ((4, 5), 1, 1)


def test_divided_rows_lie_on_all_ranks_of_a_stage() -> None:
    assert job(4).part_sets[0] == (0, 2, 4, 6) and all(len(twins) == 1 for twins in job(4).twin_sets)
    assert job(4).row_sets == [(0, 2, 4, 6, 1, 3, 5, 7), (8, 10, 12, 14, 9, 11, 13, 15)]
    assert (job(4).row_rank, job(4).row_division) == (6, 4)


def test_replicas_of_the_model_have_them_once_each() -> None:
    assert job(2).row_sets == [(0, 2, 1, 3), (4, 6, 5, 7), (8, 10, 9, 11), (12, 14, 13, 15)]
    assert (job(2).row_rank, job(2).row_division) == (2, 2)
    assert job(2).part_sets[:2] == [(0, 2), (4, 6)] and job(2).twin_sets[:2] == [(0, 4), (2, 6)]
    assert job(1).row_sets == list(job(1).ep_sets)
    assert job(0).part_sets[0] == (0, 2, 4, 6) and all(len(twins) == 1 for twins in job(0).twin_sets)


def test_divided_state_travels_among_all_ranks_of_a_stage() -> None:
    plain, divided = job(0), replace(job(0), divided_state=True)
    assert plain.migration_sets == plain.row_sets and plain.migration_rank == plain.row_rank
    assert divided.row_sets == plain.row_sets and divided.state_holders == 4 and plain.state_holders == 1
    assert divided.migration_sets == [(0, 2, 4, 6, 1, 3, 5, 7), (8, 10, 12, 14, 9, 11, 13, 15)]
    assert divided.migration_rank == divided.ep_rank * 4 + divided.edp_ranks.index(divided.rank) == 6
