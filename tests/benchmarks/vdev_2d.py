"""An experiment: torch's ``all_to_all_vdev_2d`` over NVSHMEM beside our all-to-all, rows there alone.

It needs no host sync and brings rows by expert, then by source rank: our order. DeepEP is in ``benchmarks.dispatch``.
"""

from typing import Any

import torch
import torch.distributed as dist

from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.tools.bench import timed

SLOTS, TOP_K, TOKENS = 8, 8, 4096
ROOM = 2
"""Rows that may come, as a multiple of the mean."""


def run(device: torch.device, repeats: int = 20, hidden: int = 7168) -> dict[str, Any]:
    """Collective over all ranks. Returns ``ms`` and ``all_to_all_ms``, and whether both bring the same rows in the same
    order. Raises RuntimeError where torch has no NVSHMEM."""
    from torch.distributed import _symmetric_memory as memory

    group, ranks = dist.group.WORLD, dist.get_world_size()
    if torch.cuda.device_count() < ranks:
        return {"left out": "NVSHMEM's teams end processes that share a GPU: give each rank one"}
    memory.set_backend("NVSHMEM")
    assert group is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    hidden_TD = torch.randn(TOKENS, hidden, generator=generator).to(device, torch.bfloat16)
    slots_TK = torch.rand(TOKENS, ranks * SLOTS, generator=generator).topk(TOP_K).indices.to(device)
    weights_TK = torch.full(slots_TK.shape, 1 / TOP_K, device=device)
    slot_N, choice_N = slots_TK.flatten().sort(stable=True)

    def shared(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return memory.empty(*shape, dtype=dtype, device=device)

    rows_ND = shared(len(slot_N), hidden, dtype=torch.bfloat16)
    out_MD = shared(ROOM * len(slot_N), hidden, dtype=torch.bfloat16)
    counts_P = shared(ranks * SLOTS, dtype=torch.int64).copy_(torch.bincount(slot_N, minlength=ranks * SLOTS))
    arrived_2P = shared(2, ranks * SLOTS, dtype=torch.int64).zero_()
    dispatcher = AllToAll(DispatchContext.of(group, slots_per_rank=SLOTS))

    def by_torch() -> None:
        torch.index_select(hidden_TD, 0, choice_N // TOP_K, out=rows_ND)
        torch.ops.symm_mem.all_to_all_vdev_2d(rows_ND, out_MD, counts_P, arrived_2P, group.group_name)

    def ours() -> torch.Tensor:
        return dispatcher.dispatch(hidden_TD, weights_TK, dispatcher.plan(slots_TK)).rows_MD

    with torch.no_grad():
        seconds = timed([by_torch, ours], repeats, device, group)
        rows_MD = ours()
    ms, plain_ms = (1e3 * seconds.median(dim=0).values).tolist()
    same = torch.equal(out_MD[: len(rows_MD)], rows_MD)
    return {"tokens": TOKENS, "hidden": hidden, "ms": ms, "all_to_all_ms": plain_ms, "same_rows": same}
