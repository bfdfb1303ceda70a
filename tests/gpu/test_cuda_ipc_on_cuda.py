"""Reading another process's GPU memory: where it lies, with segments that grow too, and freed when its owner does."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, device_of, use
from ranks import run_ranks
from transport_contract import soon

from eplb_runtime.distributed.transports import cuda_memory
from eplb_runtime.distributed.transports.base import Message
from eplb_runtime.distributed.transports.cuda_ipc import CudaIpc

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
NBYTES = 32 << 20


def send_registered_memory_and_free_it(rank: int, segments_grow: bool) -> dict:
    if segments_grow:
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    device = device_of(rank)
    use(device)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    transport = CudaIpc(group, "gloo", device, 60.0)
    transport.warm_up(soon())
    before = torch.cuda.memory_allocated(device)
    weights = torch.nn.Parameter(torch.arange(NBYTES, device=device, dtype=torch.int64).to(torch.uint8).float())
    address, row = weights.data_ptr(), weights.detach().view(torch.uint8)
    transport.register([row])
    into = torch.zeros_like(row)
    other = 1 - rank
    for _ in range(3):
        into.zero_()
        transport.post([Message(other, row)], [Message(other, into)]).wait(soon())
        assert torch.equal(into, row)
    said = {"packed": len(transport._spare), "moved": weights.data_ptr() != address}
    dist.barrier()
    del weights, row, into
    said["kept"] = torch.cuda.memory_allocated(device) - before
    transport.register([])
    transport.close()
    return said


@pytest.mark.parametrize("segments_grow", [False, True], ids=["fixed segments", "expandable segments"])
def test_registered_memory_is_read_in_place_and_is_its_owners_to_free(segments_grow: bool) -> None:
    if cuda_memory.why_not(DEVICE):
        pytest.skip(cuda_memory.why_not(DEVICE))
    for said in run_ranks(2, send_registered_memory_and_free_it, segments_grow, start_method="spawn"):
        assert said["packed"] <= 1, "the one of the first try"
        assert not said["moved"] and said["kept"] < NBYTES
