"""Settings, topology and events: values that refuse what cannot work, and a log that no listener can break."""

from __future__ import annotations

import threading

import pytest
from flat_settings import config_from_settings

from eplb_runtime import events
from eplb_runtime.config import ConfigError
from eplb_runtime.events import EventLog, RebalanceAborted, RebalanceCommitted
from eplb_runtime.topology import Topology


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("interval", 0, "interval=0: give at least 1"),
        ("lag", 50, "lag=50 must be less than interval=50"),
        ("replica_slots", -1, "replica_slots=-1"),
        ("max_moves", -1, "max_moves=-1"),
        ("timeout_seconds", 0, "timeout_seconds=0: give a number of seconds above 0"),
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


def test_a_topology_knows_nodes_and_links() -> None:
    topology = Topology(8, 4, intra_node_bandwidth=100.0, inter_node_bandwidth=10.0)
    assert topology.num_nodes == 2
    assert [topology.node_of(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert topology.slowest_bandwidth == 10.0
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
    log.close()
    assert heard == [event]
    assert "RebalanceAborted" in caplog.text


def test_a_listener_that_never_returns_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "CLOSING_SECONDS", 0.5)
    log, heard = EventLog(), []
    log.subscribe(lambda event: threading.Event().wait())
    for step in range(events.MOST_WAITING + 3):
        log.emit(RebalanceAborted(step, 0, "planned", "x"))
    log.subscribe(heard.append)
    log.emit(event := RebalanceAborted(7, 0, "planned", "x"))
    log.close()
    assert heard == [event] and caplog.text.count("misses events") == 1


def test_the_log_keeps_the_last_events_by_type() -> None:
    log = EventLog(capacity=3)
    for step in range(5):
        log.emit(RebalanceAborted(step, 0, "planned", "x"))
    log.emit(RebalanceCommitted(9, 1, "d", 2, 3, 0.1))
    assert [event.step for event in log.of_type(RebalanceAborted)] == [3, 4]
    assert [event.name for event in log][-1] == "RebalanceCommitted"
    assert log.of_type(RebalanceCommitted)[0].to_dict()["event"] == "RebalanceCommitted"
