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
from eplb_runtime.config import BalancerConfig
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
    maker._planning, maker._overdue = Worker("planner of a test"), None
    return maker


@pytest.mark.parametrize("step_seconds, is_known", [(0.0, False), (2.0, True)])
def test_no_seconds_are_predicted_before_a_step_is_timed(step_seconds: float, is_known: bool) -> None:
    maker = maker_of(BalancerConfig(gate="always"))
    measured = Measurement(Any, Placement.initial(1, 8, 2), (), step_seconds, 0.01, home_bytes=1 << 20)
    made = maker._make_plan(LOAD, measured, False)
    assert made.decision == "rebalance" and made.seconds_spent > 0
    assert np.isfinite(made.seconds_saved) == is_known


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


def test_a_plan_that_comes_late_is_not_carried_out() -> None:
    maker = maker_of(BalancerConfig(gate="always", timeout_seconds=2.0))
    go_on = Event()

    def slow(*args: Any, **terms: Any) -> Any:
        go_on.wait()
        return plan(*args, **terms)

    maker.planner = slow
    measured = Measurement(Any, Placement.initial(1, 8, 2), (), 2.0, 0.01, home_bytes=1 << 20)
    maker.history.extend(LOAD)
    assert "took longer than 1 s" in json.loads(maker._plan(measured, LOAD, False))["failure"]
    assert "still busy" in json.loads(maker._plan(measured, LOAD, False))["failure"]
    go_on.set()
    maker._overdue.result(60.0)
    assert maker._track_record._promises == [], "nobody has carried it out"
    assert json.loads(maker._plan(measured, LOAD, False))["decision"] == "rebalance"
    assert len(maker._track_record._promises) == 1
    maker._planning.close(0.0)
