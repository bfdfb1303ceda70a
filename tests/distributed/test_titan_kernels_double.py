"""`titan_dispatch_double` does what torchtitan's kernels of MinimalAsyncEP do, which Triton's interpreter runs here."""

from __future__ import annotations

from typing import Any

import pytest
import titan_dispatch_double as double
import torch
from ranks import run_ranks
from torch import Tensor

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")
triton = pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.skipif(triton.__version__ >= "3.9", reason="the interpreter of triton 3.9 has no such masks")

RANKS, LOCAL, TOKENS, TOP_K, WIDTH = 2, 3, 7, 3, 8
EXPERTS, ROWS = RANKS * LOCAL, TOKENS * TOP_K


def compared(rank: int) -> dict[str, bool]:
    """Whether each kernel and its double give the same bits."""
    from torchtitan.distributed.minimal_async_ep import kernels

    generator = torch.Generator().manual_seed(5)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)  # the interpreter has another rounding to bfloat16

    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    counts = ids.flatten().bincount(minlength=EXPERTS)
    of_row = ids.flatten().argsort(stable=True)
    scores = torch.rand(ROWS, generator=generator)
    rows, tokens = numbers(ROWS, WIDTH), numbers(TOKENS, WIDTH)
    back = double.invert_flat_indices_kernel(of_row, num_rows=ROWS)
    others = counts.roll(1)
    received = torch.stack([counts, others]).view(RANKS, RANKS, LOCAL)
    segments = received[:, 0].t().reshape(-1)
    ends = segments.cumsum(0)
    starts = torch.stack([counts, others]).cumsum(1) - torch.stack([counts, others])
    here = int(ends[-1])
    calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "fill_dispatch_metadata_kernel": (
            (counts, 10 * torch.arange(EXPERTS), counts.cumsum(0) - counts),
            {"num_routed_tokens": ROWS, "num_local_experts": LOCAL, "max_tokens_per_segment": TOKENS},
        ),
        "fill_combine_metadata_kernel": (
            (segments, ends - segments, starts),
            {
                "ep_rank": 0,
                "ep_size": RANKS,
                "num_local_experts": LOCAL,
                "receive_capacity": 2 * ROWS,
                "max_tokens_per_segment": TOKENS,
            },
        ),
        "invert_flat_indices_kernel": ((of_row,), {"num_rows": ROWS}),
        "reduce_topk_slots_kernel": (
            (rows, back, scores),
            {"num_tokens": TOKENS, "top_k": TOP_K, "scores_are_slot_ordered": True},
        ),
        "expand_topk_grad_kernel": (
            (tokens, of_row, scores),
            {"top_k": TOP_K, "dtype": torch.float32, "scores_are_slot_ordered": True},
        ),
        "topk_scores_grad_kernel": (
            (rows, tokens, of_row),
            {"top_k": TOP_K, "dtype": torch.float32, "scores_are_slot_ordered": True},
        ),
    }
    found = {}
    for name, (given, options) in calls.items():
        results = [getattr(module, name)(*given, **options) for module in (kernels, double)]
        real, ours = (one if isinstance(one, tuple) else (one,) for one in results)
        if name == "fill_combine_metadata_kernel":  # what is behind the rows that came is not written
            real, ours = ((a[:here], b[:here], count) for a, b, count in (real, ours))
        close = name == "topk_scores_grad_kernel"  # a sum over columns: the order is the device's
        same = torch.allclose if close else torch.equal
        found[name] = all(same(one, other) for one, other in zip(real, ours, strict=True))
    found |= copies(kernels, rows, of_row)
    return found


def copies(kernels: Any, rows: Tensor, source: Tensor) -> dict[str, bool]:
    """Of the two kernels that write to other ranks: their memory is this process's own here."""
    found = {}
    to_rank, to_row = torch.arange(ROWS) % RANKS, torch.arange(ROWS) // RANKS
    for name, valid in (("copy_rows", None), ("copy_rows, some", torch.tensor([5]))):
        wrote = []
        for module in (kernels, double):
            peers = [torch.zeros(ROWS, WIDTH) for _ in range(RANKS)]
            module.copy_rows_to_peers_kernel(
                rows,
                peers,
                to_rank,
                to_row,
                ep_size=RANKS,
                num_rows=ROWS,
                num_cols=WIDTH,
                dst_ptrs=torch.tensor([peer.data_ptr() for peer in peers]),
                block_m=4,
                src_rows=source,
                num_valid_rows=valid,
            )
            wrote.append(torch.stack(peers))
        found[name] = torch.equal(*wrote) and bool(wrote[0].any())
    wrote = []
    for module in (kernels, double):
        peers = [torch.zeros(RANKS, EXPERTS, dtype=torch.int64) for _ in range(RANKS)]
        module.copy_full_counts_to_peers_kernel(
            torch.arange(EXPERTS) + 1,
            peers,
            rank=1,
            ep_size=RANKS,
            num_experts=EXPERTS,
            dst_ptrs=torch.tensor([peer.data_ptr() for peer in peers]),
        )
        wrote.append(torch.stack(peers))
    found["copy_full_counts"] = torch.equal(*wrote) and bool(wrote[0].any())
    return found


def test_the_double_does_what_the_kernels_do() -> None:
    (found,) = run_ranks(1, compared, TRITON_INTERPRET="1")
    assert [name for name, same in found.items() if not same] == []
    assert len(found) == 9
