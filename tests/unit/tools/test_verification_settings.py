"""Settings of the runs that a verification compares."""

from __future__ import annotations

import pytest
from flat_settings import config_from_settings

from eplb_runtime.config import BalancerConfig
from eplb_runtime.hosts.attaching.trial import without_replicas


@pytest.mark.parametrize(
    "of_replicas",
    [{}, {"copies_by": "copy_engine"}, {"initial_placement": "placement.json"}],
    ids=str,
)
def test_runs_without_replicas_leave_out_what_is_of_use_to_replicas_alone(of_replicas: dict) -> None:
    config = config_from_settings({"interval": 7, "replica_slots": 1, **of_replicas})
    assert without_replicas(config) == BalancerConfig(interval=7)


def test_settings_without_replicas_stay() -> None:
    config = BalancerConfig(interval=7, initial_placement="placement.json")
    assert without_replicas(config) is config
