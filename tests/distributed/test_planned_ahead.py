"""A decision is begun ahead of `rebalance()` and made beside what the job does: a rollout, in which all memory is
freed, or a training step. What it moves is what `rebalance()` alone would have moved."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from ranks import run_ranks
from support.seen import said_by
from support.shuffle import plan_by, wait_until_compiled
from test_rebalance_alone import LAYERS, RANKS, Loop
from test_rollout_phases import Phases

import eplb_runtime as eplb

ROUNDS = 3


def watched(loop: Loop) -> tuple[threading.Event, list[int]]:
    """The planner of rank 0 waits for the event that is returned first; bytes of an expert in each decision."""
    go_on, decisions = threading.Event(), loop.balancer.rebalancer.decisions
    planner, add_up, nbytes = decisions.planner, decisions.add_up, []

    def plans(*arguments: Any, **options: Any) -> eplb.Plan:
        assert go_on.wait(60)
        return planner(*arguments, **options)

    def adds_up(measurement: Any, *arguments: Any) -> Any:
        nbytes.append(measurement.home_bytes)
        return add_up(measurement, *arguments)

    decisions.planner, decisions.add_up = plans, adds_up  # type: ignore[method-assign]
    return go_on, nbytes


def rounds(rank: int, ahead: bool) -> dict[str, Any]:
    loop = Loop(rank)
    balancer, digests = loop.balancer, []
    wait_until_compiled(balancer)
    go_on, nbytes = watched(loop)
    for number in range(ROUNDS):
        balancer.suspend()
        phases = Phases(loop.model, loop.optimizer, "data") if number else None  # there is no state before a step
        if phases is not None:
            phases.free()
        balancer.declare(loop.replayed(number))
        go_on.clear()
        before = balancer.placement.digest()
        if ahead:
            balancer.plan_ahead()
        assert balancer.placement.digest() == before
        go_on.set()
        if phases is not None:
            phases.load()
        balancer.resume()
        balancer.rebalance()
        digests.append(balancer.placement.digest())
        loop.train(2)
    return {"digests": digests, "bytes": nbytes, **loop.seen()}


def beside_a_step(rank: int) -> dict[str, Any]:
    """Decisions beside a step, across an export in logical order, and dropped by a planner that fails."""
    loop = Loop(rank, timeout_seconds=20)
    balancer, found = loop.balancer, {}
    wait_until_compiled(balancer)
    loop.train(1)
    balancer.declare(loop.replayed(0))
    balancer.plan_ahead()
    found["again"] = said_by(balancer.plan_ahead)
    found["declare"] = said_by(lambda: balancer.declare(loop.replayed(1)))
    before = balancer.placement.digest()
    loop.train(2)
    found["no boundary moves"] = balancer.placement.digest() == before
    found["moves"] = [balancer.rebalance()]
    balancer.declare(loop.replayed(1))
    balancer.plan_ahead()
    with balancer.logical_order():
        found["inside"] = said_by(balancer.plan_ahead)
    found["moves"].append(balancer.rebalance())
    planner = balancer.rebalancer.decisions.planner

    def fails(*arguments: Any, **options: Any) -> eplb.Plan:
        raise ValueError("no plan")

    plan_by(balancer, fails)
    balancer.declare(loop.replayed(0))
    balancer.plan_ahead()
    found["moves"].append(balancer.rebalance())
    plan_by(balancer, planner)
    balancer.declare(loop.replayed(0))
    found["moves"].append(balancer.rebalance())
    loop.train(1)
    balancer.declare(loop.replayed(1))
    balancer.plan_ahead()
    balancer.load_state_dict(balancer.state_dict())
    declared = balancer.rebalancer.declared
    found["declared still"] = declared is not None and len(declared) == len(loop.replayed(1))
    balancer.plan_ahead()
    balancer.close()  # with a decision in flight
    found["closed"] = said_by(balancer.plan_ahead)
    found["state"] = eplb.logical_state_dict(loop.model)
    return found


def everything(rank: int) -> dict[str, Any]:
    static = Loop(rank, policy="static")
    static.train(2 * ROUNDS)
    return {
        "static": static.seen(),
        "ahead": rounds(rank, True),
        "at once": rounds(rank, False),
        "beside": beside_a_step(rank),
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(RANKS, everything)


def test_what_is_planned_during_a_rollout_is_what_rebalance_would_have_planned(results: list[dict[str, Any]]) -> None:
    for found in results:
        ahead, at_once, static = found["ahead"], found["at once"], found["static"]
        assert ahead["digests"] == at_once["digests"] and len(set(ahead["digests"])) == ROUNDS
        assert ahead["moved"] == at_once["moved"] > 0 and not ahead["dropped"]
        assert ahead["losses"] == at_once["losses"] == static["losses"]
        assert all(static["state"][name].equal(tensor) for name, tensor in ahead["state"].items())


def test_an_expert_has_the_bytes_that_it_has_when_its_state_is_loaded(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert found["ahead"]["bytes"][1:] == found["at once"]["bytes"][1:]
        assert 0 < found["at once"]["bytes"][0] < found["at once"]["bytes"][1], "control: state counts"


def test_rebalance_alone_acts_on_it(results: list[dict[str, Any]]) -> None:
    for found in results:
        beside = found["beside"]
        assert beside["no boundary moves"] and beside["moves"] == [True, True, False, True]
        assert beside["again"] == "plan_ahead() was called before: rebalance() acts on that decision first"
        assert "declare() after plan_ahead()" in beside["declare"] and "inside logical_order()" in beside["inside"]
        assert "plan_ahead() after close()" in beside["closed"]
        assert beside["declared still"], "after load_state_dict(), which dropped the decision for it"
        assert len(beside["state"]) > LAYERS
