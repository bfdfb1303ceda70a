"""What every dispatcher promises, and what those that sum in logical order promise besides; DeepEP over its double.

Values and gradients are those of a dense reference, whatever ranks are idle; rows come in a defined order; a placement
changes no bit where the order is logical. All of it is looked at in one job of four ranks, on as many as a batch has.
DeepEP itself needs a GPU: `tests/gpu/test_deepep_on_cuda.py`.
"""

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import deepep_double
from support.dispatch_contract import (
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
from support.ranks import run_ranks

from eplb_runtime.config import DispatchConfig
from eplb_runtime.distributed.transports import deepep as transport
from eplb_runtime.distributed.transports import nvshmem
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.dispatch.deepep import FLOAT8, DeepEPDispatcher, pack, unpack
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical


def deepep(context: DispatchContext, order: str = "logical", **options: Any) -> DeepEPDispatcher:
    return DeepEPDispatcher(context, DispatchConfig("deepep", combine_order=order, **options))


KINDS: dict[str, Any] = {
    "all_to_all": AllToAll,
    "hierarchical": Hierarchical,
    "hierarchical, by rank": partial(Hierarchical, combine_order="by_rank"),
    "deepep": deepep,
    "deepep, by rank": partial(deepep, order="by_rank"),
}
OF_TORCH, OF_DEEPEP = list(KINDS)[:3], list(KINDS)[3:]
LOGICAL = ["all_to_all", "hierarchical", "deepep"]
IN_BFLOAT16 = {
    name: replace(batch, dtype=torch.bfloat16, weights_dtype=torch.float32)
    for name, batch in BATCHES.items()
    if len(batch.tokens) > 1
}
IN_BFLOAT16["float32 results"] = replace(IN_BFLOAT16["uneven"], results=torch.float32)
HALF_SIZED = {
    f"weights in {dtype}": Batch((5, 4), slots=tuple(range(6)), dtype=torch.bfloat16, weights_dtype=dtype)
    for dtype in (torch.bfloat16, torch.float32)
}
HALF_SIZED["float32 results, and a rank without rows"] = replace(
    HALF_SIZED["weights in torch.float32"], slots=tuple(range(SLOTS)), results=torch.float32
)
CASES = {kind: {**BATCHES, **HALF_SIZED} if kind in OF_TORCH else IN_BFLOAT16 for kind in KINDS}
SENT_ONCE = Batch((5, 3), slots=tuple(range(6)), top_k=6)
FOUR_CHOICES = Batch((5, 4, 0, 3), dtype=torch.bfloat16, weights_dtype=torch.float32, top_k=4)
KNOWN = {kind: [BATCHES["a rank without tokens"], SENT_ONCE] if kind in OF_TORCH else [FOUR_CHOICES] for kind in KINDS}


def all_of_it(rank: int, ranks_per_node: int) -> dict[Any, Any]:
    """Everything that is looked at, by name."""
    transport.RANKS_OF_A_NODE = deepep_double.NODE = ranks_per_node
    transport.imported = deepep_double.imported
    groups = {size: group_of(rank, size) for size in (1, 2, 4)}

    def on(kind: str, size: int, slots: int = SLOTS, **options: Any) -> tuple[Dispatcher, int]:
        """Nodes of hierarchical ones have half of the ranks."""
        nodes = {"ranks_per_node": max(1, size // 2)} if "hierarchical" in kind else options
        return KINDS[kind](DispatchContext.of(groups[size], slots), **nodes), rank % size

    found: dict[Any, Any] = {}
    for kind in KINDS:
        dtype = torch.float32 if kind in OF_TORCH else torch.bfloat16
        for name, batch in CASES[kind].items():
            dispatcher, place = on(kind, len(batch.tokens))
            found[kind, name] = without_metadata(there_and_back(dispatcher, batch, place))
        deepep_double.CALLS.clear()
        found[kind, "known"] = [with_what_is_known(*on(kind, len(b.tokens)), b) for b in KNOWN[kind]]
        found[kind, "calls"] = [call for call in deepep_double.CALLS if call != "handle"]
        dispatcher, place = on(kind, 2, slots=6)
        found[kind, "placed"] = [placed(place, dispatcher, placement, dtype) for placement in PLACEMENTS]
        if kind in OF_TORCH:
            found[kind, "kept"] = [kept_bytes(*on(kind, 2), learns) for learns in (True, False)]
        else:
            found[kind, "float8"] = rounded(place, partial(on, kind, 2, 6))
    found["all_to_all in bfloat16"] = without_metadata(there_and_back(*on("all_to_all", 4)[:1], FOUR_CHOICES, rank))
    found["rows"] = [rows_that_leave(*on("all_to_all", 2), SENT_ONCE, known) for known in (False, True)]
    nvshmem._world.clear()  # which the double does not start; a job has kernels of one kind
    small = partial(on, "deepep, by rank", 2, 6)
    for dtype in ("model", "float8"):
        found["low latency", dtype] = [small_batches(rank % 2, small, one, dtype) for one in PLACEMENTS]
    found["waits"] = list(deepep_double.HOST_WAITS)
    return found


def group_of(rank: int, size: int) -> dist.ProcessGroup:
    return [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)][rank // size]


def without_metadata(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "metadata"}


@pytest.fixture(scope="module", params=[8, pytest.param(2, marks=pytest.mark.long)], ids=["one node", "nodes of two"])
def ranks(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    """Between nodes of DeepEP's tokens of nodes are counted, handles look otherwise, sums run over a node first, in
    bfloat16, and rows to be summed are multiples of 512 bytes."""
    return run_ranks(4, all_of_it, request.param)


@pytest.mark.parametrize(("kind", "case"), [(kind, case) for kind, cases in CASES.items() for case in cases])
def test_values_and_gradients_are_those_of_a_dense_computation(ranks: list, kind: str, case: str) -> None:
    batch = CASES[kind][case]
    results = [dict(result[kind, case]) for result in ranks[: len(batch.tokens)]]
    for result in results:
        assert result["out"].dtype == batch.dtype
        result["out"] = result["out"].to(torch.promote_types(batch.dtype, batch.weights_dtype or batch.dtype))
    rounding = {"rtol": 0.1, "atol": 0.1 if kind in OF_TORCH else 0.5}
    assert_as_reference(results, batch, **(rounding if batch.dtype == torch.bfloat16 else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_arrive_ordered_by_slot_then_source_then_position(ranks: list, kind: str) -> None:
    assert_rows_in_order([result[kind, "uneven"] for result in ranks], CASES[kind]["uneven"])


@pytest.mark.parametrize("kind", LOGICAL)
def test_where_experts_stand_changes_no_bit_of_outputs_and_of_gradients(ranks: list, kind: str) -> None:
    for result in ranks:
        first, *others = result[kind, "placed"]
        assert all(all(map(torch.equal, first, other)) for other in others)


def test_in_logical_order_every_bit_of_deepep_is_that_of_all_to_all(ranks: list) -> None:
    for result in ranks:
        ((mine, *_),) = result["deepep", "known"]
        for name, value in result["all_to_all in bfloat16"].items():
            assert all(map(torch.equal, value, mine[name])) if name == "rows" else torch.equal(value, mine[name]), name


# -- what is known already ---------------------------------------------------------------------------------------------


def with_what_is_known(dispatcher: Dispatcher, rank: int, batch: Batch) -> list[dict]:
    first = there_and_back(dispatcher, batch, rank)
    with_counts = there_and_back(dispatcher, batch, rank, counts=row_counts(batch, rank))
    again = there_and_back(dispatcher, batch, rank, metadata=first["metadata"])
    return [without_metadata(result) for result in (first, with_counts, again)]


@pytest.mark.parametrize("kind", KINDS)
def test_known_counts_and_metadata_from_before_change_nothing(ranks: list, kind: str) -> None:
    for result in ranks:
        for first, *others in result[kind, "known"]:
            for other in others:
                assert all(torch.equal(first[name], other[name]) for name in ("out", "hidden", "weights", "experts"))


@pytest.mark.parametrize("kind", OF_DEEPEP)
def test_backward_and_recompute_go_the_way_of_deepeps_handle(ranks: list, kind: str) -> None:
    passes = ["dispatch", "combine", "again", "combine"]
    for result in ranks:
        assert result[kind, "calls"] == [*passes, *passes, "again", *passes[1:]]
        assert result["waits"] == [], "never on the host with the interpreter locked"


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


def test_a_token_goes_once_to_each_rank_it_visits_where_that_saves_rows(ranks: list) -> None:
    """Without replicas and with them."""
    assert [result["rows"] for result in ranks] == [[5, 5], [3, 3]] * 2


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept_bytes(dispatcher: Dispatcher, rank: int, learns: bool) -> float:
    """Largest tensor that dispatch and combine keep for backward, as a part of ``[T, K, D]``."""
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
    return max(saved) / (tokens * top_k * width * 4)


def sizes_within(holder: object) -> list[int]:
    """Of tensors in an object's attributes, and in those of the metadata there."""
    found = []
    for value in vars(holder).values() if hasattr(holder, "__dict__") else ():
        if isinstance(value, torch.Tensor):
            found.append(value.nbytes)
        elif is_dataclass(value):
            found += sizes_within(value)
    return found


@pytest.mark.parametrize("kind", OF_TORCH)
def test_no_result_is_kept_where_the_tokens_are(ranks: list, kind: str) -> None:
    """Whether the router learns or is frozen."""
    assert all(max(result[kind, "kept"]) <= 1 / 8 for result in ranks)


# -- float8 and low latency --------------------------------------------------------------------------------------------


def rounded_to_float8(hidden: torch.Tensor) -> torch.Tensor:
    rows = pack(hidden, 1, in_float8=True)
    return unpack(rows, torch.arange(len(hidden)), hidden.shape[1])


def rounded(rank: int, on: Callable[..., tuple[Dispatcher, int]]) -> dict[str, Any]:
    """Hidden states that travel in float8, ones that were rounded so before they were dispatched, and ones that are not
    rounded; each with experts in several places."""
    found: dict[str, Any] = {}
    for name, dtype, change in (
        ("travel", "float8", lambda hidden: hidden),
        ("before", "model", rounded_to_float8),
        ("not", "model", lambda hidden: hidden),
    ):
        deepep_double.DTYPES.clear()
        dispatcher, _ = on(dtype=dtype)
        found[name] = [placed(rank, dispatcher, one, torch.bfloat16, change) for one in PLACEMENTS]
        found[name, "dtypes"] = deepep_double.DTYPES[:4]
    hidden, weights = torch.randn(4, 128).bfloat16(), torch.rand(4, 3)
    dispatcher, _ = on(dtype="float8")
    first = dispatcher.dispatch(hidden, weights, dispatcher.plan(torch.tensor([[0, 7, 3]] * 4)))
    again = dispatcher.dispatch(hidden, weights, first.metadata)
    found["again"] = torch.equal(first.rows_MD, again.rows_MD)
    return found


@pytest.mark.parametrize("kind", OF_DEEPEP)
def test_float8_on_the_way_to_experts_is_as_if_hidden_states_had_been_rounded_before(ranks: list, kind: str) -> None:
    for result in ranks:
        found = result[kind, "float8"]
        assert all(all(map(torch.equal, *pair)) for pair in zip(found["travel"], found["before"], strict=True))
        assert not torch.equal(found["travel"][0][0], found["not"][0][0]), "control: it is a rounding"
        assert found["again"] and found["travel", "dtypes"] == [FLOAT8, *[torch.bfloat16] * 3]
        first, *others = found["travel"]
        assert kind not in LOGICAL or all(all(map(torch.equal, first, other)) for other in others)


def small_batches(
    rank: int, on: Callable[..., tuple[Dispatcher, int]], placement: list[int], dtype: str
) -> dict[str, Any]:
    """Up to eight tokens a rank go by the low-latency kernels where nothing learns; one rank may have none."""
    (slow, _), (dispatcher, _) = on(dtype=dtype), on(dtype=dtype, low_latency_tokens=8)
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
            way = dispatcher.carrier(hidden, weights)
            arrived = way.dispatch(hidden, weights, way.plan(slot_of_expert[ids]))
            slots_M = arrived.counts_S.slot_of_rows(len(arrived.rows_MD))
            out = way.combine(arrived.rows_MD * experts[mine][slots_M], arrived)
        rows = ((rounded_to_float8(hidden) if dtype == "float8" else hidden).unsqueeze(1) * experts[ids]).double()
        found[name] = {
            "calls": list(deepep_double.CALLS),
            "rows": torch.equal(arrived.rows_MD, expected.rows_MD)
            and arrived.counts_S.known() == expected.counts_S.known(),
            "out": out.detach(),
            "dense": (rows * weights.unsqueeze(2)).sum(1),
        }
    return found


@pytest.mark.parametrize("dtype", ["model", "float8"])
def test_small_batches_go_by_the_low_latency_kernels_where_nothing_learns(ranks: list, dtype: str) -> None:
    """Their rows come in the order of all dispatchers, their results are dense ones, and know no placement."""
    fast, slow = ["low latency dispatch", "low latency combine"], ["dispatch", "combine"]
    for result in ranks:
        first = result["low latency", dtype][0]
        for found in result["low latency", dtype]:
            calls = {name: one["calls"] for name, one in found.items()}
            assert calls == {"small": fast, "none on one": fast, "large on one": slow, "learns": slow}
            for name, one in found.items():
                assert one["rows"] and (calls[name] == slow or torch.equal(one["out"], first[name]["out"]))
                torch.testing.assert_close(one["out"].double(), one["dense"], rtol=0.02, atol=0.05)
