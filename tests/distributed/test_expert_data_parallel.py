"""Several EP groups hold the same experts: their ranks keep one placement, and whoever strays is noticed in time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
import torch.distributed as dist
from flat_settings import config_from_settings
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.seen import digests
from support.shuffle import plan_by, plan_newest, plan_shuffle

import eplb_runtime as eplb
from eplb_runtime.events import RebalanceAborted, RebalanceCommitted
from eplb_runtime.migration.difference import apply, difference
from eplb_runtime.migration.engine import Phase

EXPERTS = 8
Injection = Callable[[int, eplb.Balancer], None]


@cache
def ep_group_of(rank: int) -> dist.ProcessGroup:
    """EP 2: ranks 0 and 1 are one EP group, 2 and 3 the next."""
    return [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)][rank // 2]


def nothing(rank: int, balancer: eplb.Balancer) -> None:
    pass


def all_homes_change_places(rank: int, balancer: eplb.Balancer) -> None:
    plan_by(balancer, plan_shuffle)


def train(rank: int, policy: str, inject: Injection, overlap: bool = False) -> dict:
    model = make_model("olmoe", experts=EXPERTS, top_k=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    settings = {"interval": 2, "policy": policy, "gate": "always", "dense_gradients": "allreduce", "overlap": overlap}
    balancer = eplb.attach(model, optimizer, config=config_from_settings(settings), ep_group=ep_group_of(rank))
    inject(rank, balancer)
    for step in range(8):
        training.step(model, optimizer, batch_of(rank, step) % 12 + 12 * ((step // 4) % 7))
    result = {
        "state": digests(eplb.logical_state_dict(model, optimizer)),
        "placement": balancer.placement.digest(),
        "aborted": [event.cause for event in balancer.events.of_type(RebalanceAborted)],
        "committed": len(balancer.events.of_type(RebalanceCommitted)),
    }
    balancer.close()
    return result


def fixed_and_shuffled(rank: int) -> list[dict]:
    return [train(rank, "static", inject) for inject in (nothing, all_homes_change_places)]


def another_plan_for_the_second_group(rank: int, balancer: eplb.Balancer) -> None:
    """Both its ranks receive the first plan that moves anything with two experts exchanged and a digest that fits."""
    done = []

    def alter(message: bytearray) -> None:
        fields = json.loads(bytes(message))
        if done or not fields.get("placement"):
            return
        done.append(True)
        current = balancer.placement
        placement = apply(current, fields["placement"])
        map_, home = placement.physical_to_logical.copy(), placement.home.copy()
        a, b = map_[0, 0], map_[0, -1]
        map_[0, [0, -1]] = b, a
        home[0, [a, b]] = home[0, [b, a]]
        other = eplb.Placement(map_, EXPERTS, 2, home, placement.epoch)
        fields["placement"], fields["digest"] = difference(current, other), other.digest()
        message[:] = json.dumps(fields).encode()

    plan_by(balancer, plan_newest)
    if rank >= 2:
        balancer._rebalancer._engine.probe = lambda phase, subject: alter(subject) if phase is Phase.PLANNED else None


def differences(one: Sequence[dict], other: Sequence[dict]) -> list[str]:
    return [
        name for a, b in zip(one, other, strict=True) for name in a["state"] if a["state"][name] != b["state"][name]
    ]


def on_four_ranks(rank: int) -> dict[str, dict]:
    return {
        "static": train(rank, "static", nothing),
        "between steps": train(rank, "static", all_homes_change_places),
        "beside steps": train(rank, "static", all_homes_change_places, overlap=True),
        "another plan": train(rank, "incremental", another_plan_for_the_second_group),
    }


@pytest.fixture(scope="module")
def trained() -> dict[str, list[dict]]:
    ranks = run_ranks(4, on_four_ranks)
    return {name: [of_rank[name] for of_rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("when", ["between steps", "beside steps"])
def test_migration_changes_no_bit(trained: dict[str, list[dict]], when: str) -> None:
    results = trained[when]
    assert results[0]["committed"] >= 2
    assert len({result["placement"] for result in results}) == 1
    assert differences(trained["static"], results) == []


@pytest.mark.long
def test_migration_changes_no_bit_where_three_ranks_hold_an_expert() -> None:
    static, results = zip(*run_ranks(6, fixed_and_shuffled), strict=True)
    assert results[0]["committed"] >= 3 and results[0]["aborted"] == []
    assert differences(static, results) == []


def test_a_group_with_another_plan_is_noticed_before_anything_moves(trained: dict[str, list[dict]]) -> None:
    results = trained["another plan"]
    for result in results:
        assert result["aborted"] == ["rank 2, 3 has another plan than rank 0"]
        assert result["committed"] >= 1
    assert differences(trained["static"], results) == []


def start_or_restore_apart(rank: int) -> list[str]:
    start = eplb.Placement.initial(2, EXPERTS, 2)
    other = eplb.Placement(start.physical_to_logical[:, ::-1], EXPERTS, 2, start.home[:, ::-1])
    said = []
    model = make_model("olmoe", experts=EXPERTS)
    mine = start if rank < 2 else other
    with pytest.raises(ValueError) as refused:
        eplb.attach(model, config=eplb.BalancerConfig(initial_placement=mine), ep_group=ep_group_of(rank))
    said.append(str(refused.value))
    balancer = eplb.attach(model, ep_group=ep_group_of(rank))
    for state in ({"step": 8, "placement": mine.to_json()}, {"step": 8 + rank, "placement": other.to_json()}):
        with pytest.raises(RuntimeError) as refused:
            balancer.load_state_dict(state)
        said.append(str(refused.value))
    narrow = eplb.Placement.initial(2, EXPERTS, 4 if rank == 3 else 2)
    with pytest.raises((RuntimeError, ValueError)) as refused:
        balancer.load_state_dict({"step": 8, "placement": narrow.to_json()})
    said.append(str(refused.value))
    with pytest.raises((RuntimeError, ValueError)) as refused:
        balancer.load_state_dict(
            {"placement": other.to_json()} if rank == 1 else {"step": 8, "placement": other.to_json()}
        )
    said.append(str(refused.value))
    assert balancer.placement.digest() == start.digest()

    def fail(phase: Phase, subject: object) -> None:
        if phase is Phase.VERIFIED and rank == 0:
            raise OSError("the device went away")

    balancer._rebalancer._engine.probe, probe = fail, balancer._rebalancer._engine.probe
    with pytest.raises(RuntimeError, match="could not be restored"):
        balancer.load_state_dict({"step": 8, "placement": other.to_json()})
    balancer._rebalancer._engine.probe = probe
    assert balancer.placement.digest() == start.digest()
    # The same step once more: what was decided then does not count now.
    balancer.load_state_dict({"step": 8, "placement": other.to_json()})
    assert balancer.placement.digest() == other.digest()
    balancer.close()
    return said


def test_ranks_that_start_or_are_restored_apart_are_told_so_and_nothing_changes() -> None:
    every = run_ranks(4, start_or_restore_apart)
    for said in every:
        assert not any("\n" in line for line in said)
        assert "rank 2, 3 has another initial_placement in its config than rank 0" in said[0]
        assert said[1].endswith("rank 2, 3 has another usable saved state than rank 0")
        assert said[2].endswith("rank 1, 2, 3 has another usable saved state than rank 0")
    assert "EP size" in every[3][3] or "ranks" in every[3][3]
    assert every[0][3].endswith("no usable saved state on rank 3")
    assert "not what state_dict() gave" in every[1][4] and every[0][4].endswith("no usable saved state on rank 1")
