"""A kernel takes the place of plain torch only where it gives the same; where choices are dealt out and experts hashed,
it can be put in."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from water_filling_torch import assign_slots

from eplb_runtime.moe.dispatch import permute
from eplb_runtime.moe.dispatch.permute import PLAIN, Moves, sum_choices
from eplb_runtime.moe.experts.aligned import regroup
from eplb_runtime.moe.kernel_selection import Candidate, Kernels, TrialBatch, kernels_for, select
from eplb_runtime.moe.routing.kernels import torch_count_and_map
from eplb_runtime.moe.routing.splitter import BatchSplitter, SplitSettings, count_choices, deal_out
from eplb_runtime.placement import Placement
from eplb_runtime.utils.checksums import block_hashes

CPU = torch.device("cpu")
MOVES = ("leaving", "arriving", "sum_choices")
BATCH = TrialBatch.of(CPU, 16, 4, 7)


def dealt_otherwise(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None = None) -> Tensor:
    return assign_slots(ids_TK, sent_EC, copy_slot_EC)


def choices(experts: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches with quotas over 1, 2 and 5 replicas, some of them empty."""
    generator = torch.Generator().manual_seed(0)
    for replicas in (1, 2, 5):
        ids_TK = (torch.rand(2048, 8, generator=generator) ** 2 * experts).long()
        left_E = torch.bincount(ids_TK.flatten(), minlength=experts)
        sent_EC = torch.zeros(experts, replicas, dtype=torch.int64)
        for replica in range(replicas - 1):
            sent_EC[:, replica] = left_E // (replica + 2)
            left_E = left_E - sent_EC[:, replica]
        sent_EC[:, -1] = left_E
        yield ids_TK, sent_EC, torch.randperm(experts * replicas, generator=generator).view(experts, replicas)


def test_two_ways_to_deal_choices_out_give_the_same() -> None:
    for example in choices(16):
        assert torch.equal(deal_out(*example), assign_slots(*example)) and (deal_out(*example) >= 0).all()


def test_a_kernel_that_gives_the_same_is_used() -> None:
    moves = {"sum_choices": lambda *args: sum_choices(*args)}
    selected = select([Candidate("dealing", {"deal": dealt_otherwise}), Candidate("sums", moves=moves)], BATCH)
    assert selected == Kernels(deal=dealt_otherwise, moves=Moves(**moves))


def test_a_kernel_that_gives_something_else_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def last_copy_first(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None) -> Tensor:
        return deal_out(ids_TK, sent_EC.flip(1), copy_slot_EC.flip(1))

    candidates = [Candidate("dealing", {"deal": last_copy_first}), Candidate("again", {"deal": dealt_otherwise})]
    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        assert select(candidates, BATCH) == Kernels(deal=dealt_otherwise), "the others are used all the same"
    assert caplog.messages == ["kernel for dealing: it gives something else; plain torch is used"]


def test_a_kernel_that_fails_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def fails(data: Tensor) -> Tensor:
        raise RuntimeError("no such instruction\nand a long listing")

    with caplog.at_level(logging.WARNING, "eplb_runtime"):
        assert select([Candidate("hashes", {"hash_blocks": fails})], BATCH) == Kernels()
    assert caplog.messages == ["kernel for hashes: no such instruction; plain torch is used"]


def test_a_job_without_replicas_is_tried_too() -> None:
    assert select([Candidate("dealing", {"deal": None})], TrialBatch.of(CPU, 16, 4, 4)) == Kernels(deal=None)


def test_the_trial_notices_a_wrong_result_of_every_kernel() -> None:
    def off_by_one(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrong(*args: Any, **kwargs: Any) -> Any:
            found = function(*args, **kwargs)
            for tensor in (found,) if isinstance(found, Tensor) else found:
                if isinstance(tensor, Tensor):
                    tensor.view(-1)[0] += 1
                    break
            return found

        return wrong

    def swapped(source: Tensor, index_U: Tensor, staying: Tensor, leaving: Tensor) -> None:
        torch.index_select(source, 0, index_U[: staying.shape[0]].flip(0), out=staying)
        torch.index_select(source, 0, index_U[staying.shape[0] :], out=leaving)

    candidates = [
        Candidate("look up", {"count_and_map": off_by_one(torch_count_and_map)}),
        Candidate("hashes", {"hash_blocks": off_by_one(block_hashes)}),
        Candidate("regroup", {"regroup": off_by_one(regroup)}),
        *(Candidate(name, moves={name: off_by_one(getattr(permute, name))}) for name in MOVES),
        Candidate("part", moves={"part": swapped}),
        Candidate("deal", {"deal": off_by_one(deal_out)}),
    ]
    assert select(candidates, BATCH) == Kernels()


def _first_changed(found: Any) -> Any:
    tensor = found if isinstance(found, Tensor) else next(one for one in found if isinstance(one, Tensor))
    if tensor.numel():
        tensor.view(-1)[-1] += 1
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("weighed", [True, False])
def test_the_trial_notices_sums_that_are_wrong_for_one_dtype(dtype: torch.dtype, weighed: bool) -> None:
    def wrong(rows_ND: Tensor, place_TK: Tensor, memory: Any, weights_TK: Tensor | None = None) -> Tensor:
        found = sum_choices(rows_ND, place_TK, memory, weights_TK)
        return _first_changed(found) if rows_ND.dtype == dtype and weighed == (weights_TK is not None) else found

    assert select([Candidate("sums", moves={"sum_choices": wrong})], BATCH) == Kernels()


def test_the_trial_notices_choices_dealt_wrongly_by_what_was_not_counted_ahead() -> None:
    def wrong(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None) -> Tensor:
        found = deal_out(ids_TK, sent_EC, copy_slot_EC)
        return _first_changed(found) if begins is None else found

    def counted(ids_TK: Tensor, experts: int) -> tuple[Tensor, Tensor | None]:
        return count_choices(ids_TK, experts)[0], torch.zeros(1)

    dealing = {"count": counted, "deal": wrong}
    assert select([Candidate("dealing", dealing)], BATCH) == Kernels()


@pytest.mark.parametrize("replicas", [3, 4], ids="{} replicas".format)
def test_the_trial_has_experts_with_few_and_with_many_replicas(replicas: int) -> None:
    def wrong(ids_TK: Tensor, sent_EC: Tensor, copy_slot_EC: Tensor, begins: Tensor | None) -> Tensor:
        found = deal_out(ids_TK, sent_EC, copy_slot_EC)
        return _first_changed(found) if sent_EC.shape[1] >= replicas else found

    assert select([Candidate("dealing", {"deal": wrong})], BATCH) == Kernels()


def _wrong_where(is_hard: Callable[[Tensor], bool]) -> Callable[[Tensor], Tensor]:
    def hashed(data: Tensor) -> Tensor:
        if not data.numel() and is_hard(data):
            raise RuntimeError("no blocks: no program to launch")
        found = block_hashes(data)
        return _first_changed(found) if is_hard(data) else found

    return hashed


@pytest.mark.parametrize(
    "is_hard",
    [lambda data: data.storage_offset() % 8 > 0, lambda data: data.numel() == 0],
    ids=["at an odd address", "no blocks"],
)
def test_the_trial_hashes_what_is_hard(is_hard: Callable[[Tensor], bool]) -> None:
    assert select([Candidate("hashes", {"hash_blocks": _wrong_where(is_hard)})], BATCH) == Kernels()


def test_the_trial_moves_narrow_rows_and_more_of_one_slot_than_a_program_takes() -> None:
    def wrong_part(source: Tensor, index_U: Tensor, staying: Tensor, leaving: Tensor) -> None:
        torch.index_select(source, 0, index_U[: staying.shape[0]], out=staying)
        torch.index_select(source, 0, index_U[staying.shape[0] :], out=leaving)
        if source.shape[1] == 1:
            staying[0] += 1

    def wrong_regroup(source_ND: Tensor, *args: Any) -> Tensor:
        found = regroup(source_ND, *args)
        return _first_changed(found) if source_ND.shape[1] == 1 else found

    def wrong_arriving(counts_RW: Any, first: int, slots_per_rank: int, *args: Any) -> Any:
        found = permute.arriving(counts_RW, first, slots_per_rank, *args)
        return _first_changed(found) if counts_RW[:, :slots_per_rank].max() > 4096 else found

    candidates = [
        Candidate("part", moves={"part": wrong_part}),
        Candidate("regroup", {"regroup": wrong_regroup}),
        Candidate("arriving", moves={"arriving": wrong_arriving}),
    ]
    assert select(candidates, BATCH) == Kernels()


def test_on_a_cpu_there_are_none() -> None:
    assert kernels_for(CPU, 16, 2, 8) == Kernels() == Kernels(count_choices, deal_out, block_hashes, PLAIN, None)


def test_a_splitter_deals_by_what_it_is_given() -> None:
    placement = Placement.initial(1, 4, 2, 1)
    slots = placement.physical_to_logical.reshape(1, 2, 3).copy()
    slots[0, :, 2] = [2, 0]
    placement = Placement(slots.reshape(1, -1), 4, 2, placement.home)
    batches: list[tuple[Tensor, ...]] = []

    def dealt(*batch: Tensor) -> Tensor:
        batches.append(batch)
        return assign_slots(*batch[:3])

    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]])
    counts_RE = np.array([[4, 2, 1, 1], [4, 0, 0, 0]])
    found = [
        BatchSplitter(placement, CPU, 0, SplitSettings(2, "even", locality=False), deal=deal).route(
            0, ids_TK, counts_RE
        )[0]
        for deal in (None, dealt)
    ]
    assert len(batches) == 1 and torch.equal(*found)
