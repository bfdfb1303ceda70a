"""Copies of experts between two ranks by the copy engine itself, through symmetric memory, and by DeepEP itself. One
GPU is enough."""

from __future__ import annotations

import os
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from device import DEVICE, NCCL, device_of, no_host_sync, use
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.distributed import node_memory

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
EXPERTS, STEPS = 8, 6


def copied_both_ways() -> eplb.Placement:
    """Each rank has a copy of an expert of the other."""
    plain = eplb.Placement.initial(2, EXPERTS, 2, 1)
    slots = np.array(plain.physical_to_logical)
    slots[:, [4, 9]] = [5, 1]
    return eplb.Placement(slots, EXPERTS, 2, plain.home)


def train(rank: int, way: str) -> dict:
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    device = device_of(rank)
    use(device)
    model = make_model("olmoe", experts=EXPERTS).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = eplb.BalancerConfig(
        policy="static",
        replica_slots=1,
        copies_by=way,
        initial_placement=copied_both_ways(),
        dense_gradients="allreduce",
        dispatch=eplb.DispatchConfig(split_least_tokens=0),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    model.train()
    losses = [training.step(model, optimizer, batch_of(rank, step).to(device)) for step in range(STEPS)]
    replicas = balancer.runtime.maps.replicas
    torch.cuda.synchronize()
    torch.distributed.barrier()
    with no_host_sync() if way != "torch" else nullcontext():
        replicas.refresh()
        replicas.wait_all()
    state = {name: tensor.cpu() for name, tensor in eplb.logical_state_dict(model, optimizer).items()}
    balancer.close()
    return {"losses": losses, "state": state}


def test_training_is_what_it_is_by_nccl_to_the_bit_and_no_host_waits() -> None:
    if lacks := node_memory.why_not(DEVICE):
        pytest.skip(lacks)
    ways = ("torch", "copy_engine")
    by_torch, by_other = (run_ranks(2, train, one, backend=NCCL, start_method="spawn") for one in ways)
    for one, other in zip(by_torch, by_other, strict=True):
        assert one["losses"] == other["losses"]
        assert [name for name in one["state"] if not torch.equal(one["state"][name], other["state"][name])] == []
