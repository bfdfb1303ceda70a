"""Tokens reach their slots and come back: values and gradients of a dense reference, in an order that is defined."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from eplb_runtime.dispatch.all_to_all import AllToAll
from eplb_runtime.experts.compute import LocalExperts, SlotCounts

SLOTS, WIDTH, TOP_K = 3, 8, 2


def expert_weights(world_size: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(world_size * SLOTS, WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def tokens_of(rank: int, count: int, slots: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(100 + rank)
    hidden = torch.randn(count, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    choice = torch.randint(len(slots), (count, TOP_K), generator=generator)
    weights = torch.rand(count, TOP_K, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), torch.tensor(slots)[choice], weights.requires_grad_()


def run(rank: int, counts: list[int], slots: list[int], dtype: torch.dtype) -> dict:
    world_size = dist.get_world_size()
    mine = expert_weights(world_size, dtype)[rank * SLOTS : (rank + 1) * SLOTS].clone().requires_grad_()
    hidden, slot_ids, weights = tokens_of(rank, counts[rank], slots, dtype)
    seen = []

    def compute(rows: torch.Tensor, counts: SlotCounts, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        local_slots = counts.slot_of_rows(len(rows))
        assert local_slots.bincount(minlength=SLOTS).tolist() == counts.on_host == counts.counts_S.tolist()
        seen.append((rows.detach().clone(), local_slots))
        return torch.einsum("md,mde->me", rows, weights[0][local_slots])

    dispatcher = AllToAll(dist.group.WORLD, SLOTS)
    arrived = dispatcher.dispatch(hidden, slot_ids, weights)
    out = LocalExperts(compute, lambda: [mine])(arrived.rows_MD, arrived.counts_S)
    out = dispatcher.combine(out, arrived.handle)
    out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": hidden.grad,
        "weights": weights.grad,
        "experts": mine.grad,
        "rows": seen[0] if seen else None,
    }


def reference(rank: int, counts: list[int], slots: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    world_size = len(counts)
    experts = expert_weights(world_size, dtype).requires_grad_()
    hidden, slot_ids, weights = tokens_of(rank, counts[rank], slots, dtype)
    out = (torch.einsum("td,tkde->tke", hidden, experts[slot_ids]) * weights[..., None]).sum(1)
    out.square().sum().backward()
    return out.detach(), hidden.grad, weights.grad, experts.grad


CASES = {
    "uneven": ([5, 9, 2, 7], list(range(12))),
    "a rank without tokens": ([6, 0, 3, 4], list(range(12))),
    "a rank that receives nothing": ([6, 5, 3, 4], [0, 1, 2, 6, 7, 8, 9, 11]),
    "everything to one slot": ([4, 4, 4, 4], [5]),
    "nothing at all": ([0, 0, 0, 0], list(range(12))),
}


@pytest.mark.parametrize("case", CASES, ids=lambda name: name)
def test_values_and_gradients_are_those_of_a_dense_computation(case: str) -> None:
    counts, slots = CASES[case]
    results = run_ranks(4, run, counts, slots, torch.float64)
    total = torch.zeros_like(expert_weights(4, torch.float64))
    for rank, result in enumerate(results):
        out, hidden, weights, experts = reference(rank, counts, slots, torch.float64)
        torch.testing.assert_close(result["out"], out)
        torch.testing.assert_close(result["hidden"], hidden)
        torch.testing.assert_close(result["weights"], weights)
        total += experts
    for rank, result in enumerate(results):
        assert result["experts"] is not None, "an idle rank's gradients are zeros, not None"
        torch.testing.assert_close(result["experts"], total[rank * SLOTS : (rank + 1) * SLOTS])


def test_rows_arrive_ordered_by_slot_then_source_then_position() -> None:
    counts, slots = [5, 9, 2, 7], list(range(12))
    results = run_ranks(4, run, counts, slots, torch.float64)
    for rank, result in enumerate(results):
        rows, local_slots = result["rows"]
        expected = []
        for local_slot in range(SLOTS):
            for source in range(4):
                hidden, slot_ids, _ = tokens_of(source, counts[source], slots, torch.float64)
                for token in range(counts[source]):
                    expected += [hidden[token]] * int((slot_ids[token] == rank * SLOTS + local_slot).sum())
        assert torch.equal(local_slots, local_slots.sort().values)
        assert torch.equal(rows, torch.stack(expected).detach())


def test_bfloat16_travels_and_keeps_its_dtype() -> None:
    results = run_ranks(2, run, [5, 4], list(range(6)), torch.bfloat16)
    for rank, result in enumerate(results):
        out, *_ = reference(rank, [5, 4], list(range(6)), torch.bfloat16)
        assert result["out"].dtype == torch.bfloat16
        torch.testing.assert_close(result["out"], out, rtol=2e-2, atol=2e-2)
