"""Several EP groups hold the same experts: their ranks keep one placement, and whoever strays is noticed in time."""

from __future__ import annotations

import json
from typing import Any

from moe_models import make_model
from ranks import run_ranks
from support.seen import differing, said_by
from support.shuffle import plan_newest
from test_bits import Job, ep_group, train_all

import eplb_runtime as eplb
from eplb_runtime.migration.engine import Phase

EXPERTS = 16


def another_plan_for_the_second_group(rank: int, balancer: eplb.Balancer) -> None:
    """Both its ranks receive the first plan that moves anything with two experts exchanged."""
    done = []

    def alter(message: bytearray) -> None:
        fields = json.loads(bytes(message))
        if done or not fields.get("placement"):
            return
        done.append(True)
        placement = eplb.Placement.from_json(fields["placement"])
        map_, home = placement.physical_to_logical.copy(), placement.home.copy()
        a, b = map_[0, 0], map_[0, -1]
        map_[0, [0, -1]] = b, a
        home[0, [a, b]] = home[0, [b, a]]
        fields["placement"] = eplb.Placement(map_, EXPERTS, 2, home, placement.epoch).to_json()
        message[:] = json.dumps(fields).encode()

    if rank >= 2:
        balancer.rebalancer._engine.probe = lambda phase, subject: alter(subject) if phase is Phase.PLANNED else None


def test_a_group_with_another_plan_is_noticed_before_anything_moves() -> None:
    job = Job(plan_newest, steps=8, interval=2, begin=another_plan_for_the_second_group)
    for static, result in run_ranks(4, train_all, Job(steps=8), job):
        assert result["aborted"] == ["rank 2, 3 has another plan than rank 0"]
        assert result["moved"] >= 1 and differing(static["seen"], result["seen"]) == []


def start_or_restore_apart(rank: int) -> list[str]:
    start = eplb.Placement.initial(2, EXPERTS, 2)
    other = eplb.Placement(start.physical_to_logical[:, ::-1], EXPERTS, 2, start.home[:, ::-1])
    model, mine = make_model("olmoe", experts=EXPERTS), start if rank < 2 else other
    config = eplb.BalancerConfig(initial_placement=mine)
    said = [said_by(lambda: eplb.attach(model, config=config, ep_group=ep_group()))]
    balancer = eplb.attach(model, ep_group=ep_group())
    narrow = eplb.Placement.initial(2, EXPERTS, 4 if rank == 3 else 2)
    right = {"step": 8, "placement": other.to_json()}
    states: list[dict[str, Any]] = [{**right, "placement": mine.to_json()}, {**right, "step": 8 + rank}]
    states += [
        {**right, "placement": narrow.to_json()},
        {"placement": other.to_json()} if rank == 1 else right,
    ]
    said += [said_by(lambda state=state: balancer.load_state_dict(state)) for state in states]
    assert balancer.placement.digest() == start.digest()

    def fail(phase: Phase, subject: object) -> None:
        if phase is Phase.VERIFIED and rank == 0:
            raise OSError("the device went away")

    balancer.rebalancer._engine.probe, probe = fail, balancer.rebalancer._engine.probe
    assert "could not be restored" in said_by(lambda: balancer.load_state_dict(right))
    balancer.rebalancer._engine.probe = probe
    assert balancer.placement.digest() == start.digest()
    # The same step once more: what was decided then does not count now.
    balancer.load_state_dict(right)
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
