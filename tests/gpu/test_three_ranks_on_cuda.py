"""What two ranks cannot show over NCCL: a copy between two of three ranks, and a migration after connections were made
anew. A first call that only some ranks make would never end."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device import NCCL, device_of, use
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.events import BalancingResumed, RebalanceAborted, RebalanceCommitted

pytestmark = pytest.mark.gpu
EXPERTS, RANKS = 6, 3


def one_copy() -> eplb.Placement:
    """Expert 0 lives on rank 0 and is copied to rank 1; rank 2 has nothing to do with copies."""
    plain = eplb.Placement.initial(2, EXPERTS, RANKS, 1)
    map_ = np.array(plain.physical_to_logical)
    map_[:, plain.slots_per_rank + plain.homes_per_rank] = 0
    return eplb.Placement(map_, EXPERTS, RANKS, plain.home)


def train(rank: int, replica_slots: int, moving: bool, steps: int | None) -> dict:
    """So many steps; or with connections made anew after the first one, until some steps after that."""
    device = device_of(rank)
    use(device)
    model = make_model("olmoe", experts=EXPERTS).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = eplb.BalancerConfig(
        interval=2,
        policy="static",
        replica_slots=replica_slots,
        initial_placement=one_copy() if replica_slots else None,
        dense_gradients="allreduce",
        migration=eplb.MigrationConfig(lag=1),
    )
    balancer = eplb.attach(model, optimizer, config=config)
    model.train()
    losses: list[float] = []
    while steps is None or len(losses) < steps:
        resumed = balancer.events.of_type(BalancingResumed)
        if resumed and len(losses) >= resumed[0].step + 5:
            break
        if len(losses) == 1 and steps is None:
            balancer.rebalancer._pause("a test wants new connections")
            if moving:
                plan_by(balancer, plan_shuffle)
        losses.append(training.step(model, optimizer, batch_of(rank, len(losses)).to(device)))
    result = {
        "losses": losses,
        "state": {name: tensor.cpu() for name, tensor in eplb.logical_state_dict(model, optimizer).items()},
        "committed": len(balancer.events.of_type(RebalanceCommitted)),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
    }
    balancer.close()
    return result


def on_three_ranks(replica_slots: int, moving: bool, steps: int | None = None) -> list[dict]:
    try:
        return run_ranks(RANKS, train, replica_slots, moving, steps, backend=NCCL, start_method="spawn")
    except AssertionError as error:
        if torch.cuda.device_count() < RANKS and "Duplicate GPU" in str(error):
            pytest.skip(f"{torch.cuda.device_count()} GPU, and NCCL {torch.cuda.nccl.version()} takes one rank on each")
        raise


def test_a_copy_between_two_of_three_ranks_does_not_hang() -> None:
    for result in on_three_ranks(1, False):
        assert result["aborted"] == [] and len(result["losses"]) >= 6


def test_experts_migrate_after_connections_were_made_anew() -> None:
    moved = on_three_ranks(0, True)
    fixed = on_three_ranks(0, False, len(moved[0]["losses"]))
    for before, after in zip(fixed, moved, strict=True):
        assert (after["committed"] >= 2, after["aborted"]) == (True, [])
        assert after["losses"] == before["losses"]
        assert [name for name in before["state"] if not torch.equal(before["state"][name], after["state"][name])] == []
