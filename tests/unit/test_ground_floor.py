"""Settings, topology and events: values that refuse what cannot work, and a log that no listener can break."""

from __future__ import annotations

import pytest
from flat_settings import config_from_settings

from eplb_runtime.config import BalancerConfig, ConfigError, MigrationConfig
from eplb_runtime.events import EventLog, LoadMeasured, RebalanceAborted, RebalanceCommitted
from eplb_runtime.placement import Placement
from eplb_runtime.topology import Topology


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("interval", 0, "interval=0: give at least 1"),
        ("lag", 50, "lag=50 must be less than interval=50"),
        ("replica_slots", -1, "replica_slots=-1"),
        ("max_moves", -1, "max_moves=-1"),
        ("timeout_seconds", 0, "timeout_seconds=0: give a positive number of seconds"),
        ("max_pause_seconds", -2, "max_pause_seconds=-2"),
        ("moe_share", 1.5, "moe_share=1.5"),
        ("policy", "best", "policy='best' is unknown; choose one of: incremental, static"),
        ("gate", "never", "gate='never' is unknown"),
        ("split", "random", "split='random' is unknown"),
        ("transport", "pigeon", "transport='pigeon' is unknown"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_with_one_line(setting: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_from_settings({setting: value})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_equal_settings_describe_themselves_alike_and_others_do_not() -> None:
    placement = Placement.initial(2, 8, 2)
    one = BalancerConfig(initial_placement=placement)
    assert one.describe() == BalancerConfig(initial_placement=Placement.initial(2, 8, 2)).describe()
    assert one.describe() != BalancerConfig().describe()
    assert BalancerConfig(interval=7).describe() != BalancerConfig(interval=8).describe()


def test_window_and_horizon_follow_the_interval_unless_given() -> None:
    assert (BalancerConfig(interval=10).window_steps, BalancerConfig(interval=10).horizon) == (40, 100)
    assert (
        BalancerConfig(window=3).window_steps,
        BalancerConfig(migration=MigrationConfig(horizon_steps=7)).horizon,
    ) == (3, 7)


def test_a_topology_knows_nodes_and_links() -> None:
    topology = Topology(8, 4, intra_node_bandwidth=100.0, inter_node_bandwidth=10.0)
    assert topology.num_nodes == 2
    assert [topology.node_of(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert (topology.bandwidth(0, 3), topology.bandwidth(3, 4)) == (100.0, 10.0)
    assert Topology(6).ranks_per_node == 6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0,), "at least one rank"),
        ((8, 3), "ranks_per_node=3 does not divide num_ranks=8"),
        ((8, 4, -1.0), "intra_node_bandwidth=-1.0"),
        ((8, 4, 1.0, 0.0), "inter_node_bandwidth=0.0"),
    ],
)
def test_a_topology_that_cannot_be_is_refused(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Topology(*arguments)


def test_a_listener_that_raises_hurts_neither_the_job_nor_the_others(caplog: pytest.LogCaptureFixture) -> None:
    log, heard = EventLog(), []

    def broken(event: object) -> None:
        raise RuntimeError("listener")

    log.subscribe(broken)
    log.subscribe(heard.append)
    event = RebalanceAborted(step=3, epoch=1, phase="staged", cause="checksum")
    log.emit(event)
    assert heard == [event]
    assert "RebalanceAborted" in caplog.text


def test_the_log_keeps_the_last_events_by_type() -> None:
    log = EventLog(capacity=3)
    for step in range(5):
        log.emit(RebalanceAborted(step, 0, "planned", "x"))
    log.emit(RebalanceCommitted(9, 1, "d", 2, 3, 0.1))
    assert [event.step for event in log.of_type(RebalanceAborted)] == [3, 4]
    assert [event.name for event in log][-1] == "RebalanceCommitted"
    assert log.of_type(RebalanceCommitted)[0].to_dict()["event"] == "RebalanceCommitted"


def test_old_measurements_keep_one_row_in_the_log() -> None:
    """So a long job of many layers does not grow; what listeners get is whole."""
    log, heard = EventLog(capacity=8, most_detail=12), []
    log.subscribe(heard.append)
    for step in range(12):
        log.emit(LoadMeasured(step, 2, ((1.0 + step, 2.0), (3.0 + step, 4.0))))
        log.emit(RebalanceAborted(step, epoch=1, phase="staged", cause="checksum"))
    assert [(event.step, event.imbalance) for event in log.of_type(LoadMeasured)] == [
        (8, ((10.0, 3.0),)),
        (9, ((10.0, 2.0), (12.0, 4.0))),
        (10, ((11.0, 2.0), (13.0, 4.0))),
        (11, ((12.0, 2.0), (14.0, 4.0))),
    ]
    assert len(log.of_type(RebalanceAborted)) == 4
    assert [event.imbalance[1][0] for event in heard[::2]] == [3.0 + step for step in range(12)]


def test_a_measurement_that_is_larger_than_the_log_keeps_one_row() -> None:
    log = EventLog(capacity=2, most_detail=3)
    log.emit(LoadMeasured(1, 2, ((1.0, 2.0), (3.0, 4.0))))
    assert [event.imbalance for event in log.of_type(LoadMeasured)] == [((2.0, 3.0),)]
