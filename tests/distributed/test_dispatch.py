"""What every dispatcher promises, and what those that sum in logical order promise besides.

Values and gradients are those of a dense reference, whatever ranks are idle; rows come in a defined order; a placement
changes no bit where the order is logical. All of it is looked at in one job of four ranks, on as many as a batch has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

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
from ranks import run_ranks

from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical

KINDS: dict[str, Any] = {
    "all_to_all": AllToAll,
    "hierarchical": Hierarchical,
    "hierarchical, by rank": partial(Hierarchical, combine_order="by_rank"),
}
LOGICAL = ["all_to_all", "hierarchical"]


HALF_SIZED = {
    f"weights in {dtype}": Batch((5, 4), slots=tuple(range(6)), dtype=torch.bfloat16, weights_dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
}
HALF_SIZED["float32 results, and a rank without rows"] = replace(
    HALF_SIZED["weights in torch.float32"], slots=tuple(range(SLOTS)), results=torch.float32
)
SENT_ONCE = Batch((5, 3), slots=tuple(range(6)), top_k=6)
KNOWN = {"each choice": BATCHES["a rank without tokens"], "sent once": SENT_ONCE}


def all_of_it(rank: int) -> dict[Any, Any]:
    """Everything that is looked at, by name."""
    groups = {size: group_of(rank, size) for size in (1, 2, 4)}

    def on(kind: str, size: int, slots: int = SLOTS) -> tuple[Dispatcher, int]:
        """Nodes of hierarchical ones have half of the ranks."""
        nodes = {"ranks_per_node": max(1, size // 2)} if "hierarchical" in kind else {}
        return KINDS[kind](DispatchContext.of(groups[size], slots), **nodes), rank % size

    found: dict[Any, Any] = {"counts": exchanged(rank)}
    for kind in KINDS:
        for name, batch in {**BATCHES, **HALF_SIZED}.items():
            dispatcher, place = on(kind, len(batch.tokens))
            found[kind, name] = without_metadata(there_and_back(dispatcher, batch, place))
        for name, batch in KNOWN.items():
            found[kind, name, "known"] = with_what_is_known(*on(kind, len(batch.tokens)), batch)
        dispatcher, place = on(kind, 2, slots=6)
        found[kind, "placed"] = [placed(place, dispatcher, placement) for placement in PLACEMENTS]
        for learns in (True, False):
            found[kind, "kept", learns] = kept_bytes(*on(kind, 2), learns)
    for top_k in (1, 2):
        batch = Batch((5, 4), tuple(range(6)), top_k)
        found["collectives", top_k] = collectives_of(*on("all_to_all", 2), batch)
    for known in (False, True):
        found["rows", known] = rows_that_leave(*on("all_to_all", 2), SENT_ONCE, known)
    return found


def group_of(rank: int, size: int) -> dist.ProcessGroup:
    return [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)][rank // size]


def without_metadata(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "metadata"}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, all_of_it)


@pytest.mark.parametrize("case", BATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_a_dense_computation(ranks: list, kind: str, case: str) -> None:
    batch = BATCHES[case]
    assert_as_reference([result[kind, case] for result in ranks[: len(batch.tokens)]], batch)


@pytest.mark.parametrize("case", HALF_SIZED)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_travels_and_keeps_its_dtype(ranks: list, kind: str, case: str) -> None:
    batch = HALF_SIZED[case]
    results = [dict(result[kind, case]) for result in ranks[:2]]
    for result in results:
        assert result["out"].dtype == result["hidden"].dtype == torch.bfloat16
        assert result["weights"].dtype == batch.weights_dtype
        result["out"] = result["out"].to(torch.promote_types(torch.bfloat16, batch.weights_dtype))
    assert_as_reference(results, batch, rtol=1e-1, atol=1e-1)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_ordered_by_slot_then_source_then_position(ranks: list, kind: str) -> None:
    assert_rows_in_order([result[kind, "uneven"] for result in ranks], BATCHES["uneven"])


# -- sums in logical order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LOGICAL)
def test_where_experts_stand_changes_no_bit_of_outputs_and_of_gradients(ranks: list, kind: str) -> None:
    for result in ranks:
        first, *others = result[kind, "placed"]
        for other in others:
            assert all(map(torch.equal, first, other))


# -- what is known already ---------------------------------------------------------------------------------------------


def with_what_is_known(dispatcher: Dispatcher, rank: int, batch: Batch) -> list[dict]:
    first = there_and_back(dispatcher, batch, rank)
    with_counts = there_and_back(dispatcher, batch, rank, counts=row_counts(batch, rank))
    again = there_and_back(dispatcher, batch, rank, metadata=first["metadata"])
    return [without_metadata(result) for result in (first, with_counts, again)]


@pytest.mark.parametrize("case", KNOWN)
@pytest.mark.parametrize("kind", KINDS)
def test_known_counts_and_metadata_from_before_change_nothing(ranks: list, kind: str, case: str) -> None:
    for result in ranks:
        first, *others = result[kind, case, "known"]
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in ("out", "hidden", "weights", "experts"))


def collectives_of(dispatcher: Dispatcher, rank: int, batch: Batch) -> list[list[str]]:
    """Names of the collectives that a forward calls: by itself, with counts, with a metadata."""
    called: list[list[str]] = []

    def recorded(name: str, call: Callable) -> Callable:
        def record(*args: object, **options: object) -> object:
            called[-1].append(name)
            return call(*args, **options)

        return record

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_to_all_single", "all_reduce"):
            patch.setattr(dist, name, recorded(name, getattr(dist, name)))
        hidden, slots, weights = batch.of(rank)
        called.append([])
        metadata = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots)).metadata
        called.append([])
        dispatcher.dispatch(hidden, weights, dispatcher.plan(slots, row_counts(batch, rank)))
        called.append([])
        dispatcher.dispatch(hidden, weights, metadata)
    return called


def test_what_is_known_is_not_exchanged(ranks: list) -> None:
    for result in ranks:
        # counts, rows, router weights
        assert [len(names) for names in result["collectives", 1]] == [3, 2, 2]
        # and which row a choice means; known counts are not of tokens
        assert [len(names) for names in result["collectives", 2]] == [4, 4, 2]


def rows_that_leave(dispatcher: Dispatcher, rank: int, batch: Batch, known: bool) -> int:
    """Hidden states that this rank sends to others."""
    sizes: list[int] = []
    call = dist.all_to_all_single

    def record(out: torch.Tensor, rows: torch.Tensor, *args: object, **options: object) -> object:
        sizes.extend([len(rows)] if rows.dtype == batch.dtype and rows.shape[1:] == (WIDTH,) else [])
        return call(out, rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", record)
        counts = {"counts": row_counts(batch, rank)} if known else {}
        there_and_back(dispatcher, replace(batch, need=()), rank, **counts)
    there, back = sizes
    assert back > there
    return there


@pytest.mark.parametrize("known", [False, True], ids=["no replicas", "replicas"])
def test_a_token_goes_once_to_each_rank_it_visits_where_that_saves_rows(ranks: list, known: bool) -> None:
    assert [result["rows", known] for result in ranks] == [5, 3] * 2


def exchanged(rank: int) -> list[list]:
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, SLOTS))
    return [dispatcher.gather_counts(torch.arange(4) + 10 * rank + call).tolist() for call in range(2)]


def test_every_rank_learns_every_ranks_counts(ranks: list) -> None:
    expected = [[[10 * rank + call + expert for expert in range(4)] for rank in range(4)] for call in range(2)]
    assert [result["counts"] for result in ranks] == [expected] * 4


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept_bytes(dispatcher: Dispatcher, rank: int, learns: bool) -> dict[str, int]:
    """Largest tensor that dispatch and combine keep for backward, in bytes, and what ``[T, K, D]`` would take."""
    tokens, top_k, width = 64, 4, 256
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    slots = torch.randint(2 * SLOTS, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_(learns)
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
def test_no_result_is_kept_where_the_tokens_are(ranks: list, kind: str, learns: bool) -> None:
    for result in ranks:
        found = result[kind, "kept", learns]
        assert found["kept"] * 8 <= found["results"]
