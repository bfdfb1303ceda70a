"""What every dispatcher promises, and what those that sum in logical order promise besides.

Values and gradients are those of a dense reference, whatever ranks are idle; rows come in a defined order; a placement
changes no bit where the order is logical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace

import pytest
import torch
import torch.distributed as dist
from dispatchers import ByRank
from ranks import run_ranks

from eplb_runtime.config import DISPATCHES
from eplb_runtime.dispatch import DISPATCHERS
from eplb_runtime.dispatch.base import CountExchange, Dispatcher
from eplb_runtime.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.routing.splitter import RowCounts

SLOTS, WIDTH = 3, 8
KINDS = {**DISPATCHERS, "reduced on each rank": ByRank}
LOGICAL = [name for name, kind in KINDS.items() if kind.combine_order == "logical"]


@dataclass(frozen=True)
class Batch:
    """Tokens of each rank, slots that they choose among, and what of it needs gradients."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...] = tuple(range(12))
    top_k: int = 2
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    need: tuple[str, ...] = ("hidden", "weights", "experts")

    def of(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(100 + rank)
        hidden = torch.randn(self.tokens[rank], WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)
        choice = torch.stack(
            [torch.randperm(len(self.slots), generator=generator) for _ in range(self.tokens[rank])]
            or [torch.empty(0, dtype=torch.int64)]
        )
        choice = choice.repeat(1, self.top_k)[:, : self.top_k].reshape(self.tokens[rank], self.top_k)
        weights = torch.rand(self.tokens[rank], self.top_k, generator=generator, dtype=torch.float64)
        weights = weights.to(self.weights_dtype or self.dtype)
        return (
            hidden.requires_grad_("hidden" in self.need),
            torch.tensor(self.slots)[choice],
            weights.requires_grad_("weights" in self.need),
        )

    def experts(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7)
        count = len(self.tokens) * SLOTS
        return torch.randn(count, WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(self.dtype)


def experts_here(batch: Batch, rank: int) -> torch.Tensor:
    mine = batch.experts()[rank * SLOTS : (rank + 1) * SLOTS].clone()
    return mine.requires_grad_("experts" in batch.need)


def local(experts: torch.Tensor, seen: list) -> LocalExperts:
    def compute(rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        slots = counts.slot_of_rows(len(rows))
        assert slots.bincount(minlength=SLOTS).tolist() == list(counts.known()) == counts.counts_S.tolist()
        seen.append((rows.detach().clone(), slots))
        return torch.einsum("md,mde->me", rows, parameters[0][slots])

    return LocalExperts(compute, lambda: [experts])


def there_and_back(dispatcher: Dispatcher, batch: Batch, rank: int, **options: object) -> dict:
    hidden, slots, weights = batch.of(rank)
    experts, seen = experts_here(batch, rank), []
    arrived = dispatcher.dispatch(hidden, None if "manifest" in options else slots, weights, **options)
    out = local(experts, seen)(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
    out = dispatcher.combine(out, arrived.handle)
    if out.requires_grad:
        out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": hidden.grad,
        "weights": weights.grad,
        "experts": experts.grad,
        "rows": seen[0] if seen else None,
        "manifest": arrived.handle.manifest,
    }


def run(rank: int, kind: str, batch: Batch) -> dict:
    result = there_and_back(KINDS[kind](dist.group.WORLD, SLOTS), batch, rank)
    del result["manifest"]
    return result


def reference(rank: int, batch: Batch) -> dict:
    experts = batch.experts().requires_grad_("experts" in batch.need)
    hidden, slots, weights = batch.of(rank)
    out = (torch.einsum("td,tkde->tke", hidden, experts[slots]) * weights[..., None]).sum(1)
    if out.requires_grad:
        out.square().sum().backward()
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, "experts": experts.grad}


def assert_as_reference(results: list[dict], batch: Batch, **tolerance: float) -> None:
    total = torch.zeros_like(batch.experts())
    for rank, result in enumerate(results):
        expected = reference(rank, batch)
        for name in ("out", "hidden", "weights"):
            assert (result[name] is None) == (expected[name] is None), name
            if expected[name] is not None:
                torch.testing.assert_close(result[name], expected[name], **tolerance)
        if expected["experts"] is not None:
            total += expected["experts"]
    for rank, result in enumerate(results):
        assert (result["experts"] is not None) == ("experts" in batch.need), "an idle rank's gradients are zeros"
        if result["experts"] is not None:
            torch.testing.assert_close(result["experts"], total[rank * SLOTS : (rank + 1) * SLOTS], **tolerance)


BATCHES = {
    "uneven": Batch((5, 9, 2, 7)),
    "a rank without tokens": Batch((6, 0, 3, 4)),
    "a rank that receives nothing": Batch((6, 5, 3, 4), slots=(0, 1, 2, 6, 7, 8, 9, 11)),
    "everything to one slot": Batch((4, 4, 4, 4), slots=(5,)),
    "one choice a token": Batch((5, 9, 0, 7), top_k=1),
    "many choices a token": Batch((5, 3), slots=tuple(range(6)), top_k=6),
    "many choices, on one rank": Batch((5, 3), slots=(3, 4, 5), top_k=3),
    "many choices, a rank without tokens": Batch((0, 7), slots=(0, 1, 3), top_k=3),
    "nothing at all": Batch((0, 0, 0, 0)),
    "one rank": Batch((5,), slots=(0, 2)),
    "hidden states need no gradient": Batch((5, 0), slots=tuple(range(6)), need=("weights", "experts")),
    "router weights need no gradient": Batch((5, 4), slots=(0, 1, 2), need=("hidden", "experts")),
    "only the router learns": Batch((5, 4), slots=(0, 1, 2), need=("weights",)),
    "nothing learns": Batch((5, 4), slots=tuple(range(6)), need=()),
}


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
    for rank, result in enumerate(run_ranks(4, run, kind, batch)):
        rows, slots = result["rows"]
        expected = []
        for slot in range(SLOTS):
            for source in range(4):
                hidden, slot_ids, _ = batch.of(source)
                for token in range(len(hidden)):
                    expected += [hidden[token]] * int((slot_ids[token] == rank * SLOTS + slot).sum())
        assert torch.equal(slots, slots.sort().values)
        assert torch.equal(rows, torch.stack(expected).detach())


# -- sums in logical order ---------------------------------------------------------------------------------------------


def placed(rank: int, kind: str, placement: Sequence[int]) -> list[torch.Tensor]:
    """The same choices of logical experts with each in the slot that ``placement`` says; gradients of experts by
    logical expert. In float32, eight choices a token: another order of sums has other bits."""
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(40, 128, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(12, generator=generator)[:8] for _ in range(40)])
    weights = torch.rand(40, 8, generator=generator).requires_grad_()
    logical = torch.randn(12, 128, generator=torch.Generator().manual_seed(9))
    slot_of_expert = torch.tensor(placement)
    expert_of_slot = slot_of_expert.argsort()
    mine = logical[expert_of_slot[rank * 6 : (rank + 1) * 6]].requires_grad_()
    dispatcher = KINDS[kind](dist.group.WORLD, 6)

    def compute(rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return rows * parameters[0][counts.slot_of_rows(len(rows))]

    arrived = dispatcher.dispatch(hidden, slot_of_expert[ids], weights)
    out = LocalExperts(compute, lambda: [mine])(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
    out = dispatcher.combine(out, arrived.handle)
    out.square().sum().backward()
    return [out.detach(), hidden.grad, weights.grad]


PLACEMENTS = (list(range(12)), [11 - slot for slot in range(12)], [0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10, 5])


@pytest.mark.parametrize("kind", LOGICAL)
def test_where_experts_stand_changes_no_bit_of_outputs_and_of_gradients(kind: str) -> None:
    first, *others = [run_ranks(2, placed, kind, placement) for placement in PLACEMENTS]
    for other in others:
        for rank in range(2):
            for one, another in zip(first[rank], other[rank], strict=True):
                assert torch.equal(one, another)


def test_control_sums_by_rank_change_with_the_placement() -> None:
    first, *others = [run_ranks(2, placed, "reduced on each rank", placement) for placement in PLACEMENTS]
    assert any(not torch.equal(first[rank][0], other[rank][0]) for other in others for rank in range(2))
    torch.testing.assert_close(first[0][0], others[0][0][0])


# -- what is known already ---------------------------------------------------------------------------------------------


def row_counts(batch: Batch, rank: int) -> RowCounts:
    ranks = range(len(batch.tokens))
    sent = [batch.of(source)[1].reshape(-1).bincount(minlength=len(ranks) * SLOTS) for source in ranks]
    received = torch.stack([one[rank * SLOTS : (rank + 1) * SLOTS] for one in sent])
    return RowCounts(sent[rank].numpy(), received.numpy())


def run_with_what_is_known(rank: int, kind: str, batch: Batch) -> list[dict]:
    dispatcher = KINDS[kind](dist.group.WORLD, SLOTS)
    results = [there_and_back(dispatcher, batch, rank)]
    results.append(there_and_back(dispatcher, batch, rank, counts=row_counts(batch, rank)))
    results.append(there_and_back(dispatcher, batch, rank, manifest=results[0]["manifest"]))
    for result in results:
        del result["manifest"]
    return results


@pytest.mark.parametrize("kind", KINDS)
def test_known_counts_and_a_manifest_from_before_change_nothing(kind: str) -> None:
    for first, *others in run_ranks(4, run_with_what_is_known, kind, BATCHES["a rank without tokens"]):
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in ("out", "hidden", "weights", "experts"))


def collectives_of(rank: int, kind: str, batch: Batch) -> list[list[str]]:
    """Names of the collectives that a forward calls: by itself, with counts, with a manifest."""
    dispatcher, called = KINDS[kind](dist.group.WORLD, SLOTS), []

    def recorded(name: str, call: Callable) -> Callable:
        def record(*args: object, **options: object) -> object:
            called[-1].append(name)
            return call(*args, **options)

        return record

    for name in ("all_to_all_single", "all_reduce"):
        setattr(dist, name, recorded(name, getattr(dist, name)))
    hidden, slots, weights = batch.of(rank)
    called.append([])
    manifest = dispatcher.dispatch(hidden, slots, weights).handle.manifest
    called.append([])
    dispatcher.dispatch(hidden, slots, weights, counts=row_counts(batch, rank))
    called.append([])
    dispatcher.dispatch(hidden, None, weights, manifest=manifest)
    return called


def test_what_is_known_is_not_exchanged() -> None:
    for alone, with_counts, with_manifest in run_ranks(2, collectives_of, "all_to_all", Batch((5, 4), tuple(range(6)))):
        # counts, which row a choice means, rows, router weights
        assert (len(alone), len(with_counts), len(with_manifest)) == (4, 2, 2)


def rows_that_leave(rank: int, batch: Batch) -> int:
    """Hidden states that this rank sends to others."""
    sizes: list[int] = []
    call = dist.all_to_all_single

    def record(out: torch.Tensor, rows: torch.Tensor, *args: object, **options: object) -> object:
        sizes.extend([len(rows)] if rows.dtype == batch.dtype and rows.shape[1:] == (WIDTH,) else [])
        return call(out, rows, *args, **options)

    dist.all_to_all_single = record
    there_and_back(KINDS["all_to_all"](dist.group.WORLD, SLOTS), replace(batch, need=()), rank)
    there, back = sizes
    assert back > there
    return there


def test_a_token_goes_once_to_each_rank_it_visits_where_that_saves_rows() -> None:
    batch = Batch((5, 3), slots=tuple(range(6)), top_k=6)
    assert run_ranks(2, rows_that_leave, batch) == [5, 3]


def exchange(rank: int) -> list[list]:
    counts = CountExchange(dist.group.WORLD)
    said = []
    for call in range(2):
        # What is kept from a call inside inference mode must be of use outside it.
        with torch.inference_mode(call == 0):
            said.append(counts(torch.arange(4) + 10 * rank + call).tolist())
    return said


def test_every_rank_learns_every_ranks_counts() -> None:
    expected = [[[10 * rank + call + expert for expert in range(4)] for rank in range(3)] for call in range(2)]
    assert run_ranks(3, exchange) == [expected] * 3


def test_every_dispatcher_that_a_config_can_name_is_there() -> None:
    assert set(DISPATCHERS) == set(DISPATCHES)


# -- what is kept ------------------------------------------------------------------------------------------------------


def kept_bytes(rank: int, kind: str, learns: bool) -> dict[str, int]:
    """Largest tensor that dispatch and combine keep for backward, in bytes, and what ``[T, K, D]`` would take."""
    tokens, top_k, width = 64, 4, 256
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    slots = torch.randint(2 * SLOTS, (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator).requires_grad_(learns)
    dispatcher = KINDS[kind](dist.group.WORLD, SLOTS)
    saved: list[int] = [0]

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        arrived = dispatcher.dispatch(hidden, slots, weights)
        out = dispatcher.combine(arrived.rows_MD * 1.0, arrived.handle)
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
    """Of tensors in an object's attributes, and in those of the handles and manifests there."""
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
