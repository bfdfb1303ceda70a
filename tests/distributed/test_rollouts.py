"""Generating and training in turn on one model: the rollout's routing is declared, and moving changes no bit."""

from __future__ import annotations

import torch
from examples import load_example
from ranks import run_ranks

import eplb_runtime as eplb

ROUNDS = 4


def both(rank: int) -> list[tuple]:
    """Losses, logical state, experts moved: first with fixed experts, then moved by what is declared."""
    found = []
    for policy in ("static", "incremental"):
        config = eplb.BalancerConfig(policy=policy, interval=None, gate="always", dense_gradients="allreduce")
        losses, balancer, model = load_example("rollouts").train(config, ROUNDS, rank)
        moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
        found.append((losses, eplb.logical_state_dict(model), moved))
        balancer.close()
    return found


def test_rollouts_plan_the_experts_and_change_no_bit() -> None:
    for static, moving in run_ranks(2, both):
        assert static[2] == 0 < moving[2]
        assert moving[0] == static[0]
        assert moving[1].keys() == static[1].keys()
        assert all(torch.equal(moving[1][name], tensor) for name, tensor in static[1].items())
