"""What a plan is said to save: in seconds of steps that were timed, and not a word before."""

from __future__ import annotations

import json
from collections import deque
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


@pytest.mark.parametrize("step_seconds, is_known", [(0.0, False), (2.0, True)])
def test_no_seconds_are_predicted_before_a_step_is_timed(step_seconds: float, is_known: bool) -> None:
    maker: Any = object.__new__(DecisionMaker)
    maker._config, maker.planner, maker._topology = BalancerConfig(gate="always"), plan, Topology(2, 1)
    maker._sources, maker._steps_per_bucket, maker._last_gap = None, 0, 50
    maker._track_record = TrackRecord(1, None)
    maker.history, maker.share = deque(), SimpleNamespace(value=0.4)
    measured = Measurement(Any, Placement.initial(1, 8, 2), (), step_seconds, 0.01, home_bytes=1 << 20)
    load = np.array([[[90, 80, 70, 60, 4, 3, 2, 1]]], dtype=np.int64)
    made = json.loads(maker._make_plan(load, measured, False))
    assert made["decision"] == "rebalance" and made["seconds_spent"] > 0
    assert (made["seconds_saved"] is not None) == is_known
