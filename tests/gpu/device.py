"""The device of these tests, and how their ranks meet on it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import util
from typing import Any

import pytest
import torch
from support.moe_models import batch_of, make_model
from support.ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.distributed.transports import nixl, symmetric
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted

DEVICE = torch.device("cuda", 0)
NCCL = "cpu:gloo,cuda:nccl"
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""In the environment of ranks that share a GPU and open each other's memory."""


def share_one_gpu(rank: int) -> None:
    """Let NCCL ranks use the same GPU, before its first communicator: since 2.30 it has a switch for that, older ones
    take ranks with different host ids for different machines and talk through the loopback interface."""
    os.environ.update(NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_HOSTID=f"host{rank}", NCCL_SOCKET_IFNAME="lo")
    os.environ.update(NCCL_IB_DISABLE="1", NCCL_NVLS_ENABLE="0", NCCL_MAX_CTAS="8")


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
    return {"cuda_ipc": lambda: symmetric.why_not(DEVICE), "nixl": nixl.why_not}.get(transport, str)()


def on_gpu(rank: int) -> torch.device:
    """The current device of a rank from here on; its results are repeatable."""
    device = device_of(rank)
    use(device)
    return device


def use(device: torch.device) -> None:
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


@contextmanager
def no_host_sync() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ranks_on_gpu(size: int, function: Callable[..., Any], *args: Any, backend: str = NCCL) -> list:
    """What a function gives on each rank; skips where NCCL takes one rank on a GPU, and there are too few."""
    try:
        return run_ranks(size, function, *args, backend=backend, start_method="spawn", **SHARED)
    except AssertionError as error:
        if torch.cuda.device_count() < size and "Duplicate GPU" in str(error):
            pytest.skip(f"{torch.cuda.device_count()} GPU, and NCCL {torch.cuda.nccl.version()} takes one rank on each")
        raise


def goes_on(balancer: eplb.Balancer, step: int) -> bool:
    return step < 24


def trained(rank: int, jobs: Sequence[tuple[Any, ...]]) -> list[dict]:
    """One `train` after the other: a start of ranks costs more than a job."""
    return [train(rank, *job) for job in jobs]


def train(rank: int, settings: dict[str, Any], experts: int = 8, until: Callable[..., bool] = goes_on) -> dict:
    """Train a small model; each third of two dozen steps has other tokens. ``until`` is called with balancer and step
    ahead of each step, which is left out where it gives False. Gives ``losses``, the whole ``state``, the number of
    ``committed`` migrations, and the causes of ``aborted`` ones."""
    device = on_gpu(rank)
    model = make_model("olmoe", experts=experts, layers=2, top_k=2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    usual = {"interval": 4, "policy": "static", "gate": "always", "dense_gradients": "allreduce"}
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(**{**usual, **settings}))
    losses: list[float] = []
    while until(balancer, len(losses)):
        ids = (batch_of(rank, len(losses)) % 12 + 12 * (len(losses) // 8 % 7)).to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        balancer.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state = {name: tensor.cpu() for name, tensor in eplb.logical_state_dict(model, optimizer).items()}
    balancer.close()
    committed, aborted = map(balancer.events.of_type, (RebalanceCommitted, RebalanceAborted))
    return {"losses": losses, "state": state, "committed": len(committed), "aborted": [one.cause for one in aborted]}


def different(one: dict, other: dict) -> list[str]:
    """Names of what two ranks of `train` differ in."""
    assert one["state"].keys() == other["state"].keys()
    found = [name for name in one["state"] if not torch.equal(one["state"][name], other["state"][name])]
    return found + (["losses"] if one["losses"] != other["losses"] else [])
