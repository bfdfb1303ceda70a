"""Settings, topology and events: values that refuse what cannot work, and a log that no listener can break."""

from __future__ import annotations

import doctest
import importlib
import threading
from collections.abc import Sequence

import pytest

import eplb_runtime
from eplb_runtime import Topology, events
from eplb_runtime.events import EventLog, RebalanceAborted, RebalanceCommitted


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
    monkeypatch.setattr(events, "CLOSING_SECONDS", 2.0)
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


# -- Which ranks of an EP group share a host, as the launcher's environment tells it


@pytest.mark.parametrize(
    ("local_world_size", "ep_groups", "ranks_per_node"),
    [
        ("4", [range(8)], 4),
        ("4", [[0, 2, 4, 6], [1, 3, 5, 7]], 2),
        ("4", [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]], 1),
        ("8", [range(4), range(4, 8)], 4),
        ("4", [range(4), range(4, 8)], 4),
        ("6", [range(4), range(4, 8), range(8, 12)], 2),
        ("3", [range(4)], 4),
        ("2", [[0, 2, 1, 3]], 4),
        ("", [[0, 1]], 2),
        (None, [[0, 1]], 2),
    ],
)
def test_ranks_per_node(local_world_size: str | None, ep_groups: Sequence[Sequence[int]], ranks_per_node: int) -> None:
    environ = {} if local_world_size is None else {"LOCAL_WORLD_SIZE": local_world_size}
    topology = Topology.from_launcher(environ, len(ep_groups[0]), ep_groups)
    assert topology.ranks_per_node == ranks_per_node


# -- The package offers its public names and no others, each the very object of its room


WITH_EXAMPLES = "events hosts placement planner.api planner.drop_in topology"
"""Rooms that would lose their examples unnoticed."""


@pytest.mark.parametrize("name", eplb_runtime.__all__)
def test_every_public_name_is_the_rooms_own(name: str) -> None:
    value = getattr(eplb_runtime, name)
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert name in dir(eplb_runtime)


@pytest.mark.parametrize("name", sorted({*eplb_runtime._ROOM_OF.values(), "events"}))
def test_examples_in_docstrings_print_what_they_say(name: str) -> None:
    """Of the modules that define public names."""
    room = importlib.import_module(f"eplb_runtime.{name}")
    public = [getattr(eplb_runtime, public) for public, owner in eplb_runtime._ROOM_OF.items() if owner == name]
    for module in {room.__name__, *(value.__module__ for value in public)}:
        failed, tried = doctest.testmod(importlib.import_module(module))
        assert failed == 0, module
        assert tried > 0 or module.removeprefix("eplb_runtime.") not in WITH_EXAMPLES.split()
