"""What every dispatcher promises, and what those that sum in logical order promise besides.

Values and gradients are those of a dense reference, whatever ranks are idle; rows come in a defined order; a placement
changes no bit where the order is logical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace

import pytest
import torch
import torch.distributed as dist
from dispatch_contract import (
    BATCHES,
    PLACEMENTS,
    SLOTS,
    WIDTH,
    Batch,
    assert_as_reference,
    assert_rows_in_order,
    placed,
    row_counts,
    there_and_back,
)
from dispatchers import ByRank
from ranks import run_ranks

from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.count_exchange import CountExchange

KINDS = {"all_to_all": AllToAll, "reduced on each rank": ByRank}
LOGICAL = [name for name, kind in KINDS.items() if kind.combine_order == "logical"]


def run(rank: int, kind: str, batch: Batch) -> dict:
    result = there_and_back(KINDS[kind](DispatchContext.of(dist.group.WORLD, SLOTS)), batch, rank)
    del result["metadata"]
    return result


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_a_dense_computation(kind: str, case: str) -> None:
    batch = BATCHES[case]
    assert_as_reference(run_ranks(len(batch.tokens), run, kind, batch), batch)


@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_travels_and_keeps_its_dtype(kind: str, weights_dtype: torch.dtype) -> None:
    batch = Batch((5, 4), slots=tuple(range(6)), dtype=torch.bfloat16, weights_dtype=weights_dtype)
    results = run_ranks(2, run, kind, batch)
    for result in results:
        assert result["out"].dtype == result["hidden"].dtype == torch.bfloat16
        assert result["weights"].dtype == weights_dtype
        result["out"] = result["out"].to(torch.promote_types(torch.bfloat16, weights_dtype))
    assert_as_reference(results, batch, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_ordered_by_slot_then_source_then_position(kind: str) -> None:
    batch = BATCHES["uneven"]
    assert_rows_in_order(run_ranks(4, run, kind, batch), batch)


# -- sums in logical order ---------------------------------------------------------------------------------------------


def placed_on(rank: int, kind: str, placement: Sequence[int]) -> list[torch.Tensor]:
    return placed(rank, KINDS[kind](DispatchContext.of(dist.group.WORLD, 6)), placement)


@pytest.mark.parametrize("kind", LOGICAL)
def test_where_experts_stand_changes_no_bit_of_outputs_and_of_gradients(kind: str) -> None:
    first, *others = [run_ranks(2, placed_on, kind, placement) for placement in PLACEMENTS]
    for other in others:
        for rank in range(2):
            for one, another in zip(first[rank], other[rank], strict=True):
                assert torch.equal(one, another)


def test_control_sums_by_rank_change_with_the_placement() -> None:
    first, *others = [run_ranks(2, placed_on, "reduced on each rank", placement) for placement in PLACEMENTS]
    assert any(not torch.equal(first[rank][0], other[rank][0]) for other in others for rank in range(2))
    torch.testing.assert_close(first[0][0], others[0][0][0])


# -- what is known already ---------------------------------------------------------------------------------------------


SENT_ONCE = Batch((5, 3), slots=tuple(range(6)), top_k=6)


def run_with_what_is_known(rank: int, kind: str, batch: Batch) -> list[dict]:
    dispatcher = KINDS[kind](DispatchContext.of(dist.group.WORLD, SLOTS))
    results = [there_and_back(dispatcher, batch, rank)]
    results.append(there_and_back(dispatcher, batch, rank, counts=row_counts(batch, rank)))
    results.append(there_and_back(dispatcher, batch, rank, metadata=results[0]["metadata"]))
    for result in results:
        del result["metadata"]
    return results


@pytest.mark.parametrize("batch", [BATCHES["a rank without tokens"], SENT_ONCE], ids=["each choice", "sent once"])
@pytest.mark.parametrize("kind", KINDS)
def test_known_counts_and_metadata_from_before_change_nothing(kind: str, batch: Batch) -> None:
    """Layers with copies know counts, and send a row for each choice; elsewhere tokens may be sent once."""
    for first, *others in run_ranks(len(batch.tokens), run_with_what_is_known, kind, batch):
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in ("out", "hidden", "weights", "experts"))


def collectives_of(rank: int, kind: str, batch: Batch) -> list[list[str]]:
    """Names of the collectives that a forward calls: by itself, with counts, with a metadata."""
    dispatcher, called = KINDS[kind](DispatchContext.of(dist.group.WORLD, SLOTS)), []

    def recorded(name: str, call: Callable) -> Callable:
        def record(*args: object, **options: object) -> object:
            called[-1].append(name)
            return call(*args, **options)

        return record

    for name in ("all_to_all_single", "all_reduce"):
        setattr(dist, name, recorded(name, getattr(dist, name)))
    hidden, slots, weights = batch.of(rank)
    called.append([])
    metadata = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots)).metadata
    called.append([])
    dispatcher.dispatch(hidden, weights, dispatcher.plan(slots, row_counts(batch, rank)))
    called.append([])
    dispatcher.dispatch(hidden, weights, metadata)
    return called


def test_what_is_known_is_not_exchanged() -> None:
    for alone, with_counts, with_metadata in run_ranks(2, collectives_of, "all_to_all", Batch((5, 4), tuple(range(6)))):
        # counts, which row a choice means, rows, router weights
        assert (len(alone), len(with_counts), len(with_metadata)) == (4, 2, 2)


def rows_that_leave(rank: int, batch: Batch) -> int:
    """Hidden states that this rank sends to others."""
    sizes: list[int] = []
    call = dist.all_to_all_single

    def record(out: torch.Tensor, rows: torch.Tensor, *args: object, **options: object) -> object:
        sizes.extend([len(rows)] if rows.dtype == batch.dtype and rows.shape[1:] == (WIDTH,) else [])
        return call(out, rows, *args, **options)

    dist.all_to_all_single = record
    there_and_back(KINDS["all_to_all"](DispatchContext.of(dist.group.WORLD, SLOTS)), replace(batch, need=()), rank)
    there, back = sizes
    assert back > there
    return there


def test_a_token_goes_once_to_each_rank_it_visits_where_that_saves_rows() -> None:
    assert run_ranks(2, rows_that_leave, SENT_ONCE) == [5, 3]


def exchange(rank: int) -> list[list]:
    counts = CountExchange(DispatchContext.of(dist.group.WORLD, SLOTS).channels)
    said = []
    for call in range(2):
        # What is kept from a call inside inference mode must be of use outside it.
        with torch.inference_mode(call == 0):
            said.append(counts(torch.arange(4) + 10 * rank + call).tolist())
    return said


def test_every_rank_learns_every_ranks_counts() -> None:
    expected = [[[10 * rank + call + expert for expert in range(4)] for rank in range(3)] for call in range(2)]
    assert run_ranks(3, exchange) == [expected] * 3


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept_bytes(rank: int, kind: str, learns: bool) -> dict[str, int]:
    """Largest tensor that dispatch and combine keep for backward, in bytes, and what ``[T, K, D]`` would take."""
    tokens, top_k, width = 64, 4, 256
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    slots = torch.randint(2 * SLOTS, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_(learns)
    dispatcher = KINDS[kind](DispatchContext.of(dist.group.WORLD, SLOTS))
    saved: list[int] = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots))
        out = dispatcher.combine(arrived.rows_MD * 1.0, arrived)
    nodes, seen = [out.grad_fn], 0
    while nodes:
        node = nodes.pop()
        if node is not None:
            seen += 1
            saved += sizes_within(node)
            nodes += [function for function, _ in node.next_functions]
    assert seen >= 3
    return {"kept": max(saved), "results": tokens * top_k * width * 4}


def sizes_within(holder: object) -> list[int]:
    """Of tensors in an object's attributes, and in those of the metadata there."""
    found = []
    for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
        if isinstance(value, torch.Tensor):
            found.append(value.nbytes)
        elif is_dataclass(value):
            found += sizes_within(value)
    return found


@pytest.mark.parametrize("learns", [True, False], ids=["router learns", "router is frozen"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_result_is_kept_where_the_tokens_are(kind: str, learns: bool) -> None:
    for found in run_ranks(2, kept_bytes, kind, learns):
        assert found["kept"] * 8 <= found["results"]
