"""While the planner is being compiled homes move all the same, by plans of NumPy and schedules of the interpreter."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.balancer import decision, rebalancer
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted, RebalancePlanned
from eplb_runtime.migration.cycles import cut_into_permutations, first_fit, follow_slots

RANKS, STEPS = 3, 12
MIGRATES = (cut_into_permutations, first_fit, follow_slots)


def train(rank: int, policy: str, replica_slots: int, steps: int, release: threading.Event | None = None) -> Any:
    """Losses, the whole state by expert, and the balancer, closed."""
    model = make_model("olmoe", experts=12, top_k=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    balancer = training.attach(model, optimizer, interval=3, policy=policy, gate="always", replica_slots=replica_slots)
    if release is None:
        wait_until_compiled(balancer)
    losses = []
    for step in range(steps):
        if release is not None and step == steps // 2:
            compiled = [bool(function.signatures) for function in MIGRATES]
            release.set()
            wait_until_compiled(balancer)
        losses.append(training.step(model, optimizer, batch_of(rank, step) % 12 + 12 * ((step // 3) % 3)))
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    return losses, state, balancer.events, compiled if release is not None else None


def held_back_and_not(rank: int, held: tuple[int, ...]) -> dict[str, Any]:
    """Ranks that are held compile in the middle of the training; the others at once."""
    results: dict[str, Any] = {}
    compile_apart = decision.compile_apart
    rebalancer.COMPILED_SOON_SECONDS = 0.0
    for replica_slots in (0, 1):
        release = threading.Event()
        if rank in held:
            decision.compile_apart = lambda policy, ended, release=release: release.wait()
        losses, state, events, compiled = train(rank, "incremental", replica_slots, STEPS, release)
        decision.compile_apart = compile_apart
        planned, committed = events.of_type(RebalancePlanned), events.of_type(RebalanceCommitted)
        results[f"replicas {replica_slots}"] = {
            "compiled": compiled,
            "reasons": [event.reason for event in planned],
            "judged": [event.judged_plans for event in planned],
            "moves": [event.step for event in committed],
            "aborted": [event.cause for event in events.of_type(RebalanceAborted)],
            "losses": losses,
        }
        if replica_slots == 0:
            decision.compile_apart = for_static = Mock()
            fixed_losses, fixed, *_ = train(rank, "static", 0, STEPS)
            decision.compile_apart = compile_apart
            same = losses == fixed_losses and all(torch.equal(fixed[name], state[name]) for name in fixed)
            results["same"] = same and len(fixed) > 10 and not for_static.called
    return results


@pytest.mark.parametrize("held", [(1,), (0, 1, 2)], ids=["one rank", "all ranks"])
def test_experts_move_before_anything_is_compiled(held: tuple[int, ...]) -> None:
    results = run_ranks(RANKS, held_back_and_not, held)
    for rank, result in enumerate(results):
        assert result["same"]
        for replica_slots in (0, 1):
            one = result[f"replicas {replica_slots}"]
            assert one["aborted"] == []
            early = [step for step in one["moves"] if step <= STEPS // 2]
            of_first = results[0][f"replicas {replica_slots}"]["moves"]
            assert early and early == [step for step in of_first if step <= STEPS // 2]
            assert "homes only" in one["reasons"][0]
            assert one["judged"][:2] == [0, 1], "the first plan is judged, whatever has made it"
            assert "homes only" not in one["reasons"][-1], "the planner took over when it was compiled"
        if rank in held:
            assert not any(result["replicas 0"]["compiled"]), "control: nothing of a migration was compiled"
        elif held == (1,):
            assert all(result["replicas 0"]["compiled"])
