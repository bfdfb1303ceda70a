"""Dispatch over DeepEP's double: what every dispatcher promises, in one job of four ranks.

The package itself needs a GPU: `tests/gpu/test_deepep_on_cuda.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepep_double
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import (
    BATCHES,
    PLACEMENTS,
    SLOTS,
    Batch,
    assert_as_reference,
    assert_rows_in_order,
    placed,
    row_counts,
    there_and_back,
)
from ranks import run_ranks

from eplb_runtime.config import DispatchConfig
from eplb_runtime.distributed.transports import deepep_package, nvshmem
from eplb_runtime.moe.dispatch import wire_format
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPDispatcher

ORDERS = "logical", "by_rank"
CASES = {
    name: replace(batch, dtype=torch.bfloat16, weights_dtype=torch.float32)
    for name, batch in BATCHES.items()
    if len(batch.tokens) > 1
}
CASES["float32 results"] = replace(CASES["uneven"], results=torch.float32)
IN_BFLOAT16 = Batch((5, 4, 0, 3), dtype=torch.bfloat16, weights_dtype=torch.float32, top_k=4)


def over(group: dist.ProcessGroup, order: str, slots: int = SLOTS, in_float8: bool = False) -> DeepEPDispatcher:
    config = DispatchConfig("deepep", combine_order=order, dtype="float8" if in_float8 else "model")
    return DeepEPDispatcher(DispatchContext.of(group, slots), config)


def without_metadata(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "metadata"}


def all_of_it(rank: int, ranks_per_node: int) -> dict[str, Any]:
    """Everything that is looked at, by name; batches of two ranks run on two pairs of ranks."""
    deepep_package.RANKS_OF_A_NODE = deepep_double.NODE = ranks_per_node
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = pairs[rank // 2], rank % 2
    whole = dist.group.WORLD
    deepep_package.imported = deepep_double.imported
    found: dict[str, Any] = {}
    for order in ORDERS:
        for name, batch in CASES.items():
            group, mine = (whole, rank) if len(batch.tokens) == 4 else (pair, place)
            found[order, name] = without_metadata(there_and_back(over(group, order), batch, mine))
        dispatcher, batch = over(whole, order), IN_BFLOAT16
        deepep_double.CALLS.clear()
        first = there_and_back(dispatcher, batch, rank)
        with_counts = there_and_back(dispatcher, batch, rank, counts=row_counts(batch, rank))
        again = there_and_back(dispatcher, batch, rank, metadata=first["metadata"])
        found[order, "known"] = [without_metadata(result) for result in (first, with_counts, again)]
        found[order, "calls"] = [call for call in deepep_double.CALLS if call != "handle"]
        found[order, "placed"] = [placed(place, over(pair, order, 6), one, torch.bfloat16) for one in PLACEMENTS]
    for order in ORDERS:
        found[order, "float8"] = rounded(place, pair, order)
    nvshmem._world.clear()  # which the double does not start; a job has kernels of one kind
    found["low latency"] = {
        in_float8: [small_batches(place, pair, one, in_float8) for one in PLACEMENTS] for in_float8 in (False, True)
    }
    found["waits"] = list(deepep_double.HOST_WAITS)
    plain = AllToAll(DispatchContext.of(whole, SLOTS))
    found["all_to_all"] = without_metadata(there_and_back(plain, IN_BFLOAT16, rank))
    return found


def rounded_to_float8(hidden: torch.Tensor) -> torch.Tensor:
    rows = wire_format.pack(hidden, None, 1, in_float8=True)
    return wire_format.unpack(rows, torch.arange(len(hidden)), hidden.shape[1])


def rounded(rank: int, group: dist.ProcessGroup, order: str) -> dict[str, Any]:
    """Hidden states that travel in float8, ones that were rounded so before they were dispatched, and ones that are not
    rounded; each with experts in several places."""
    found: dict[str, Any] = {}

    ways = {
        "travel": (True, lambda hidden: hidden),
        "before": (False, rounded_to_float8),
        "not": (False, lambda hidden: hidden),
    }
    for name, (in_float8, change) in ways.items():
        deepep_double.DTYPES.clear()
        dispatcher = over(group, order, 6, in_float8)
        found[name] = [placed(rank, dispatcher, one, torch.bfloat16, change) for one in PLACEMENTS]
        found[name, "dtypes"] = deepep_double.DTYPES[:4]
    hidden, weights = torch.randn(4, 128).bfloat16(), torch.rand(4, 3)
    dispatcher = over(group, order, 6, True)
    first = dispatcher.dispatch(hidden, weights, dispatcher.plan(torch.tensor([[0, 7, 3]] * 4)))
    again = dispatcher.dispatch(hidden, weights, first.metadata)
    found["again"] = torch.equal(first.rows_MD, again.rows_MD)
    return found


def small_batches(rank: int, group: dist.ProcessGroup, placement: list[int], in_float8: bool) -> dict[str, Any]:
    """Up to eight tokens a rank go by the low-latency kernels where nothing learns; one rank may have none."""
    slow = over(group, "by_rank", 6, in_float8)
    dtype = "float8" if in_float8 else "model"
    config = DispatchConfig("deepep", combine_order="by_rank", dtype=dtype, low_latency_tokens=8)
    dispatcher = DeepEPDispatcher(DispatchContext.of(group, 6), config)
    generator = torch.Generator().manual_seed(rank)
    slot_of_expert = torch.tensor(placement)
    mine = slot_of_expert.argsort()[rank * 6 : (rank + 1) * 6]
    experts = torch.randn(12, 2048, generator=torch.Generator().manual_seed(9)).bfloat16()
    found: dict[str, Any] = {}
    for name, tokens in {"small": (8, 5), "none on one": (0, 3), "large on one": (3, 9), "learns": (8, 5)}.items():
        hidden = torch.randn(tokens[rank], 2048, generator=generator).bfloat16()
        ids = torch.rand(tokens[rank], 12, generator=generator).argsort(dim=1)[:, :4]
        weights = torch.rand(tokens[rank], 4, generator=generator)
        with torch.set_grad_enabled(name == "learns"):
            expected = slow.dispatch(hidden, weights, slow.plan(slot_of_expert[ids]))
            deepep_double.CALLS.clear()
            arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slot_of_expert[ids]))
            slots_M = arrived.counts_S.slot_of_rows(len(arrived.rows_MD))
            out = dispatcher.combine(arrived.rows_MD * experts[mine][slots_M], arrived)
        rows = ((rounded_to_float8(hidden) if in_float8 else hidden).unsqueeze(1) * experts[ids]).double()
        found[name] = {
            "calls": list(deepep_double.CALLS),
            "rows": torch.equal(arrived.rows_MD, expected.rows_MD)
            and arrived.counts_S.known() == expected.counts_S.known(),
            "out": out.detach(),
            "dense": (rows * weights.unsqueeze(2)).sum(1),
        }
    return found


@pytest.fixture(scope="module", params=[8, pytest.param(2, marks=pytest.mark.long)], ids=["one node", "nodes of two"])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Between nodes tokens of nodes are counted, handles look otherwise, sums run over a node first, in bfloat16, and
    rows to be summed are multiples of 512 bytes."""
    return run_ranks(4, all_of_it, request.param)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ORDERS)
def test_values_and_gradients_are_those_of_a_dense_computation(ranks: list, order: str, case: str) -> None:
    batch = CASES[case]
    results = [dict(result[order, case]) for result in ranks[: len(batch.tokens)]]
    for result in results:
        assert result["out"].dtype == batch.dtype
        result["out"] = result["out"].to(batch.weights_dtype or batch.dtype)
    assert_as_reference(results, batch, rtol=0.1, atol=0.5)


@pytest.mark.parametrize("order", ORDERS)
def test_rows_arrive_ordered_by_slot_then_source_then_position(ranks: list, order: str) -> None:
    assert_rows_in_order([result[order, "uneven"] for result in ranks], CASES["uneven"])


def test_in_logical_order_every_bit_is_that_of_all_to_all(ranks: list) -> None:
    for result in ranks:
        for name, value in result["all_to_all"].items():
            mine = result["logical", "known"][0][name]
            assert all(map(torch.equal, value, mine)) if isinstance(value, tuple) else torch.equal(value, mine), name


@pytest.mark.parametrize("order", ORDERS)
def test_known_counts_and_metadata_from_before_change_nothing(ranks: list, order: str) -> None:
    for result in ranks:
        first, *others = result[order, "known"]
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in ("out", "hidden", "weights", "experts"))


@pytest.mark.parametrize("order", ORDERS)
def test_backward_and_recompute_go_the_way_of_the_handle(ranks: list, order: str) -> None:
    passes = ["dispatch", "combine", "again", "combine"]
    for result in ranks:
        assert result[order, "calls"] == [*passes, *passes, "again", *passes[1:]]


def test_deepep_never_waits_on_the_host_with_the_interpreter_locked(ranks: list) -> None:
    assert all(result["waits"] == [] for result in ranks)


def test_where_experts_stand_changes_no_bit_in_logical_order(ranks: list) -> None:
    for result in ranks:
        first, *others = result["logical", "placed"]
        for other in others:
            assert all(map(torch.equal, first, other))


@pytest.mark.parametrize("order", ORDERS)
def test_float8_on_the_way_is_as_if_hidden_states_had_been_rounded_before(ranks: list, order: str) -> None:
    for result in ranks:
        found = result[order, "float8"]
        assert all(all(map(torch.equal, *pair)) for pair in zip(found["travel"], found["before"], strict=True))
        assert not torch.equal(found["travel"][0][0], found["not"][0][0]), "control: it is a rounding"
        assert found["again"]


@pytest.mark.parametrize("order", ORDERS)
def test_only_the_way_to_the_experts_is_in_float8(ranks: list, order: str) -> None:
    for result in ranks:
        there, *others = result[order, "float8"]["travel", "dtypes"]
        assert there == wire_format.FLOAT8 and others == [torch.bfloat16] * 3


def test_in_float8_where_experts_stand_changes_no_bit_in_logical_order(ranks: list) -> None:
    for result in ranks:
        first, *others = result["logical", "float8"]["travel"]
        assert all(all(map(torch.equal, first, other)) for other in others)


@pytest.mark.parametrize("in_float8", [False, True])
def test_small_batches_go_by_the_low_latency_kernels_where_nothing_learns(ranks: list, in_float8: bool) -> None:
    fast, slow = ["low latency dispatch", "low latency combine"], ["dispatch", "combine"]
    for result in ranks:
        for found in result["low latency"][in_float8]:
            calls = {name: one["calls"] for name, one in found.items()}
            assert calls == {"small": fast, "none on one": fast, "large on one": slow, "learns": slow}


@pytest.mark.parametrize("in_float8", [False, True])
def test_their_rows_come_in_the_order_of_all_dispatchers(ranks: list, in_float8: bool) -> None:
    for result in ranks:
        for found in result["low latency"][in_float8]:
            assert all(one["rows"] for one in found.values())


@pytest.mark.parametrize("in_float8", [False, True])
def test_their_results_are_those_of_a_dense_computation_and_know_no_placement(ranks: list, in_float8: bool) -> None:
    for result in ranks:
        first, *others = result["low latency"][in_float8]
        for one in first.values():
            torch.testing.assert_close(one["out"].double(), one["dense"], rtol=0.02, atol=0.05)
        for name in ("small", "none on one"):
            assert all(torch.equal(first[name]["out"], other[name]["out"]) for other in others)
