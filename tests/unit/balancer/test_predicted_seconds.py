"""What a plan is said to save: in seconds of steps that were timed, and not a word before; and what came true of it."""

from __future__ import annotations

import json
from collections import deque
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eplb_runtime.balancer.decision import DecisionMaker, Measurement
from eplb_runtime.config import BalancerConfig, MigrationConfig
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.planner.track_record import TrackRecord
from eplb_runtime.topology import Topology
from eplb_runtime.utils.worker import Worker

LOAD = np.array([[[90, 80, 70, 60, 4, 3, 2, 1]]], dtype=np.int64)


def maker_of(config: BalancerConfig) -> Any:
    """A decision maker of two ranks that plans, without a job."""
    maker: Any = object.__new__(DecisionMaker)
    maker._config, maker.planner, maker._topology = config, plan, Topology(2, 1)
    maker._sources, maker._steps_per_bucket, maker._last_gap = None, 0, 50
    maker._track_record = TrackRecord(1, None)
    maker.history, maker.share = deque(), SimpleNamespace(value=0.4)
    maker._job = SimpleNamespace(ep_size=2, edp_ranks=(0,), stages=(0,), layers_of_stage=(1,))
    maker._planning, maker._overdue, maker._found = Worker("planner of a test"), None, None
    return maker


@pytest.mark.parametrize("step_seconds, is_known", [(0.0, False), (2.0, True)])
def test_no_seconds_are_predicted_before_a_step_is_timed(step_seconds: float, is_known: bool) -> None:
    maker = maker_of(BalancerConfig(gate="always"))
    measured = Measurement(Any, Placement.initial(1, 8, 2), (), step_seconds, 0.01, home_bytes=1 << 20)
    made = json.loads(maker._make_plan(LOAD, measured, False))
    assert made["decision"] == "rebalance" and made["seconds_spent"] > 0
    assert (made["seconds_saved"] is not None) == is_known


def test_plans_made_while_code_is_compiled_are_judged_like_others() -> None:
    def judged(load: np.ndarray, compiling: bool) -> dict[str, Any]:
        """The summary of the decision after a plan, made while code is compiled or not."""
        maker = maker_of(BalancerConfig(gate="always"))
        for counted in (LOAD, load):
            maker.history.extend(counted)
            measured = Measurement(Any, Placement.initial(1, 8, 2), (), 2.0, 0.01, home_bytes=1 << 20)
            made = json.loads(maker._plan(measured, counted, compiling))
            assert made["decision"] == "rebalance" and ("homes only" in made["reason"]) == compiling
        maker._planning.close(0.0)
        return made

    for compiling in (False, True):
        same, other = judged(LOAD, compiling), judged(np.full_like(LOAD, 40), compiling)
        assert (same["judged_plans"], same["judged_decisions"]) == (1, 1)
        assert same["true_seconds"] == pytest.approx(same["predicted_seconds"]) and same["predicted_seconds"] > 0
        assert other["true_seconds"] == 0 < other["predicted_seconds"], "control: even load came"


def test_a_plan_that_comes_late_is_weighed_anew_at_the_next_decision() -> None:
    """Its search is not begun again where it still pays; where it does not, or more would move than may, it is."""

    def next_decision(load: np.ndarray, **options: Any) -> tuple[dict[str, Any], int]:
        """The summary of the decision after one whose search took too long, and how often a search began."""
        maker = maker_of(BalancerConfig(gate="always", timeout_seconds=2.0))
        begun, go_on = [], Event()

        def slow(*args: Any, **terms: Any) -> Any:
            begun.append(terms)
            go_on.wait()
            return plan(*args, **terms)

        maker.planner = slow
        measured = Measurement(Any, Placement.initial(1, 8, 2), (), 2.0, 0.01, home_bytes=1 << 20)
        maker.history.extend(LOAD)
        assert "took longer than 1 s" in json.loads(maker._plan(measured, LOAD, False))["failure"]
        assert "still busy" in json.loads(maker._plan(measured, LOAD, False))["failure"]
        assert maker._track_record._promises == [], "nobody has carried it out"
        go_on.set()
        maker._overdue.result(60.0)
        maker.history.clear()
        maker.history.extend(load)
        maker._config = BalancerConfig(gate="always", migration=MigrationConfig(**options))
        made = json.loads(maker._plan(measured, load, False))
        assert maker._found is None
        assert len(maker._track_record._promises) == (made["decision"] == "rebalance")
        maker._planning.close(0.0)
        return made, len(begun)

    again, begun = next_decision(LOAD)
    assert begun == 1 and again["decision"] == "rebalance" and "found by an earlier search" in again["reason"]
    assert again["imbalance_after"] < again["imbalance_before"]
    limited, begun = next_decision(LOAD, max_moves=2)
    assert begun == 2 and limited["moves"] <= 2 and "earlier search" not in limited["reason"]
    even, begun = next_decision(np.full_like(LOAD, 40))
    assert begun == 2 and even["decision"] == "stay"


def found_late(gate: Any, compiling: bool = False) -> tuple[Any, list[Any], Placement]:
    """A decision maker that holds what a search of ours found late; its searches since then; the current placement."""
    maker, begun, current = maker_of(BalancerConfig(gate=gate)), [], Placement.initial(1, 8, 2)
    policy = "swaps" if compiling else "incremental"
    maker._found = plan(LOAD, Topology(2, 1), slots_per_rank=4, current=current, policy=policy)
    assert maker._found.decision == "rebalance"

    def searches(*args: Any, **terms: Any) -> Any:
        begun.append(terms)
        return plan(*args, **terms)

    maker.planner = searches
    return maker, begun, current


def decided(maker: Any, load: np.ndarray, current: Placement, compiling: bool = False) -> dict[str, Any]:
    maker.history.extend(load)
    measured = Measurement(Any, current, (), 2.0, 0.01, home_bytes=1 << 20)
    summary: dict[str, Any] = json.loads(maker._plan(measured, load, compiling))
    assert maker._found is None
    maker._planning.close(0.0)
    return summary


def test_a_late_plan_from_another_placement_is_searched_for_anew() -> None:
    maker, begun, _ = found_late("always")
    order = np.array([[0, 1, 2, 4, 3, 5, 6, 7]], dtype=np.int32)  # a restored one; the late plan would gain there, too
    restored = Placement(order, 8, 2, order.argsort(axis=1).astype(np.int32))
    made = decided(maker, LOAD, restored)
    assert len(begun) == 1 and "earlier search" not in made["reason"] and made["decision"] == "rebalance"


def test_a_late_plan_that_cannot_be_weighed_is_searched_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise FloatingPointError("no such number")

    maker, begun, current = found_late("payoff")
    monkeypatch.setattr("eplb_runtime.balancer.decision.plan_again", fails)
    made = decided(maker, LOAD, current)
    assert len(begun) == 1 and made["decision"] == "rebalance" and "failure" not in made


def test_a_late_plan_is_taken_while_code_is_compiled() -> None:
    maker, begun, current = found_late("always", compiling=True)
    made = decided(maker, LOAD, current, compiling=True)
    assert not begun and "homes only" in made["reason"] and "earlier search" in made["reason"]
