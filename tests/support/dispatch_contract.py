"""What every dispatcher promises, in pieces that tests run on ranks: batches, a dense reference, experts that move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eplb_runtime.moe.dispatch.base import Dispatcher
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.routing.slots import RowCounts

SLOTS, WIDTH = 3, 8


@dataclass(frozen=True)
class Batch:
    """Tokens of each rank, slots to choose among, what of it needs gradients, and the dtype of experts' results."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...] = tuple(range(12))
    top_k: int = 2
    dtype: torch.dtype = torch.float64
    weights_dtype: torch.dtype | None = None
    need: tuple[str, ...] = ("hidden", "weights", "experts")
    results: torch.dtype | None = None

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


def local(experts: torch.Tensor, seen: list, dtype: torch.dtype | None = None) -> LocalExperts:
    def compute(rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        slots = counts.slot_of_rows(len(rows))
        assert slots.bincount(minlength=SLOTS).tolist() == list(counts.known()) == counts.counts_S.tolist()
        seen.append((rows.detach().clone(), slots))
        return torch.einsum("md,mde->me", rows, parameters[0][slots]).to(dtype or rows.dtype)

    return LocalExperts(compute, lambda: [experts])


def there_and_back(dispatcher: Dispatcher, batch: Batch, rank: int, **options: object) -> dict:
    hidden, slots, weights = batch.of(rank)
    experts, seen = experts_here(batch, rank), []
    metadata = options["metadata"] if "metadata" in options else dispatcher.plan(slots, **options)
    arrived = dispatcher.dispatch(hidden, weights, metadata)
    out = local(experts, seen, batch.results)(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
    out = dispatcher.combine(out, arrived)
    if out.requires_grad:
        out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": hidden.grad,
        "weights": weights.grad,
        "experts": experts.grad,
        "rows": seen[0] if seen else None,
        "metadata": arrived.metadata,
    }


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


def assert_rows_in_order(results: list[dict], batch: Batch) -> None:
    """By slot, then by source rank, then by position there."""
    for rank, result in enumerate(results):
        rows, slots = result["rows"]
        expected = []
        for slot in range(SLOTS):
            for source in range(len(results)):
                hidden, slot_ids, _ = batch.of(source)
                for token in range(len(hidden)):
                    expected += [hidden[token]] * int((slot_ids[token] == rank * SLOTS + slot).sum())
        assert torch.equal(slots, slots.sort().values)
        assert torch.equal(rows, torch.stack(expected).detach())


def placed(
    rank: int,
    dispatcher: Dispatcher,
    placement: Sequence[int],
    dtype: torch.dtype = torch.float32,
    change: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: hidden,
) -> list[torch.Tensor]:
    """The same choices of logical experts with each in the slot that ``placement`` says; gradients of experts by
    logical expert. In float32, eight choices a token: another order of sums has other bits.

    Args:
        change: hidden states before they are dispatched.
    """
    generator = torch.Generator().manual_seed(rank)
    hidden = change(torch.randn(40, 128, generator=generator).to(dtype)).requires_grad_()
    ids = torch.stack([torch.randperm(12, generator=generator)[:8] for _ in range(40)])
    weights = torch.rand(40, 8, generator=generator).requires_grad_()
    logical = torch.randn(12, 128, generator=torch.Generator().manual_seed(9)).to(dtype)
    slot_of_expert = torch.tensor(placement)
    expert_of_slot = slot_of_expert.argsort()
    mine = logical[expert_of_slot[rank * 6 : (rank + 1) * 6]].requires_grad_()

    def compute(rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        return rows * parameters[0][counts.slot_of_rows(len(rows))]

    arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slot_of_expert[ids]))
    out = LocalExperts(compute, lambda: [mine])(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
    out = dispatcher.combine(out, arrived)
    out.square().sum().backward()
    return [out.detach(), hidden.grad, weights.grad]


PLACEMENTS = (list(range(12)), [11 - slot for slot in range(12)], [0, 7, 2, 9, 4, 11, 6, 1, 8, 3, 10, 5])


def row_counts(batch: Batch, rank: int) -> RowCounts:
    ranks = range(len(batch.tokens))
    sent = [batch.of(source)[1].reshape(-1).bincount(minlength=len(ranks) * SLOTS) for source in ranks]
    received = torch.stack([one[rank * SLOTS : (rank + 1) * SLOTS] for one in sent])
    return RowCounts(sent[rank].numpy(), received.numpy())
