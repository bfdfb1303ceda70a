"""What an event says of itself is what happened."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_runtime.events import LoadMeasured, RebalanceCommitted, RebalancePlanned, brief
from eplb_runtime.migration.progress import MigrationProgress
from eplb_runtime.placement import Placement
from eplb_runtime.planner import plan
from eplb_runtime.topology import Topology


@pytest.mark.parametrize(
    "experts, replicas, said",
    [
        (0, 0, "replicas changed, no expert moved"),
        (1, 0, "1 expert moved"),
        (4, 0, "4 experts moved"),
        (4, 6, "4 experts moved, 6 replicas placed"),
        (0, 1, "1 replica placed"),
    ],
)
def test_a_commit_that_changed_replicas_alone_is_not_told_as_no_change(experts: int, replicas: int, said: str) -> None:
    event = RebalanceCommitted(10, 3, "00", experts, 0, 0.067, placed_replicas=replicas)
    assert brief(event) == f"epoch 3: {said}, 0.0 MiB came here, 67.0 ms pause"


def test_a_decision_says_once_what_is_forecast_and_what_was_measured() -> None:
    made = plan(np.array([[8.0, 6.0, 1.0, 1.0]]), Topology(2), slots_per_rank=2, current=Placement.initial(1, 4, 2))
    assert made.imbalance_before is not None and made.moved_slots
    before, after = float(made.imbalance_before.mean()), float(made.imbalance_after.mean())
    event = RebalancePlanned(10, 1, made.moved_slots, made.decision, made.reason, before, after, 0.01)
    assert brief(event).startswith("rebalance: forecast imbalance 1.750 -> ")
    assert brief(event).count("1.750 -> ") == 2, "the mean and the worst layer"
    assert "measured imbalance 1.001" in brief(LoadMeasured(10, 5, ((1.001,),)))
    short = RebalancePlanned(10, 1, 2, "rebalance", "asked for", 1.75, 1.125, 0.01)
    assert brief(short) == "rebalance: asked for, forecast imbalance 1.750 -> 1.125"


def test_replica_slots_that_hold_another_expert_are_counted() -> None:
    home = np.array([[0, 1, 3, 4]])
    before = Placement(np.array([[0, 1, 2, 2, 3, 0]]), 4, 2, home)
    after = Placement(np.array([[0, 1, 3, 2, 3, 0]]), 4, 2, home)
    event = MigrationProgress(after).committed(10, 0.0, before)
    assert event.placed_replicas == 1 and event.to_dict()["placed_replicas"] == 1
    assert MigrationProgress(before).committed(10, 0.0, before.without_replicas()).placed_replicas == 2
    assert MigrationProgress(before.without_replicas()).committed(10, 0.0, before).placed_replicas == 0
    assert MigrationProgress(after).committed(10, 0.0, after).placed_replicas == 0
