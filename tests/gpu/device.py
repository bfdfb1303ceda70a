"""The device of these tests, and how their ranks meet on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import util

import torch

from eplb_runtime.distributed import node_memory
from eplb_runtime.distributed.transports import nixl

DEVICE = torch.device("cuda", 0)
NCCL = "cpu:gloo,cuda:nccl"


def share_one_gpu(rank: int) -> None:
    """Let NCCL ranks use the same GPU, before its first communicator: since 2.30 it has a switch for that, older ones
    take ranks with different host ids for different machines and talk through the loopback interface."""
    os.environ.update(
        NCCL_MULTI_RANK_GPU_ENABLE="1",
        NCCL_HOSTID=f"host{rank}",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_IB_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
        NCCL_MAX_CTAS="8",
    )


def device_of(rank: int) -> torch.device:
    """A GPU for each rank if there are enough for all, else the first for all."""
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        return torch.device("cuda", rank)
    share_one_gpu(rank)
    return DEVICE


def why_not(transport: str) -> str:
    """What a transport lacks here; empty: nothing that can be seen without starting it."""
    if transport == "nvshmem":
        return "" if util.find_spec("nvshmem") else "nvshmem4py is not installed"
    return {"cuda_ipc": lambda: node_memory.why_not(DEVICE), "nixl": nixl.why_not}.get(transport, str)()


def use(device: torch.device) -> None:
    """Make it the current device and its results repeatable."""
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
