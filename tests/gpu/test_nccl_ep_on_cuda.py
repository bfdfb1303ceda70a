"""`nccl.ep` itself between two ranks: groups that grow, end and start again. What it carries is looked at in
`test_deepep_on_cuda.py`.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, NCCL, device_of, use
from ranks import run_ranks
from transport_contract import soon

from eplb_runtime.dispatch import choosing
from eplb_runtime.dispatch.carried import Carried, CarriedByRank
from eplb_runtime.dispatch.lanes import Lane, Lanes
from eplb_runtime.dispatch.nccl_ep import NcclEPCarrier

RANKS, SLOTS, WIDTH = 2, 3, 1024
WHY = choosing.lacks("nccl_ep", DEVICE, RANKS, RANKS) if torch.cuda.is_available() else "torch sees no CUDA device"
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(bool(WHY), reason=WHY)]


def batches(rank: int, kind: type[Carried], dtype: torch.dtype) -> list[bool]:
    """Whether what experts give back unchanged comes home, forward and backward, while batches grow and shrink."""
    device = device_of(rank)
    use(device)
    lanes = Lanes(Lane(dist.group.WORLD, dist.group.WORLD))
    dispatcher = kind(dist.group.WORLD, SLOTS, lanes=lanes, make_carrier=NcclEPCarrier)
    right = []

    def look(tokens: int) -> None:
        hidden = torch.randn(tokens, WIDTH, device=device, dtype=dtype).requires_grad_()
        slots = torch.rand(tokens, RANKS * SLOTS, device=device).argsort(dim=1)[:, :2]
        arrived = dispatcher.dispatch(hidden, slots, torch.full((tokens, 2), 0.5, device=device))
        out = dispatcher.combine(arrived.rows_MD, arrived.handle)
        (grad,) = torch.autograd.grad(out.sum(), [hidden])
        # Backward leaves weighing to the experts, and there are none: each of two choices has the gradient as it is.
        right.extend([torch.equal(out, hidden), torch.equal(grad, torch.full_like(grad, 2))])

    for tokens in (4 + rank, 40, 0 if rank else 7, 4096, 3):
        look(tokens)
    lanes.open(Lane(dist.new_group([0, 1]), dist.new_group([0, 1])))
    look(64)
    dispatcher.close(soon())
    look(5)
    dispatcher.close(soon())
    return right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_come_home_in_groups_that_grow_end_and_start_again(dtype: torch.dtype) -> None:
    for right in run_ranks(RANKS, batches, Carried, dtype, backend=NCCL, start_method="spawn"):
        assert all(right)


def test_by_rank_too() -> None:
    for right in run_ranks(RANKS, batches, CarriedByRank, torch.bfloat16, backend=NCCL, start_method="spawn"):
        assert all(right)
