"""Settings, topology and events: values that refuse what cannot work, and a log that no listener can break."""

import copy
import doctest
import importlib
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.training import config_from_settings

import eplb_runtime
from eplb_runtime import Topology, events
from eplb_runtime.config import BalancerConfig, ConfigError, DispatchConfig, MigrationConfig
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


WITH_EXAMPLES = "events placement planner.api planner.drop_in topology"
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


# -- Settings: at most 18 at the top, nested ones for the rest, and a line for each that cannot work or has no effect


WITHOUT_EFFECT: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"bytes_per_step": 1000}, "give overlap=True", {"overlap": True}),
    ({"bytes_per_step": 1000, "overlap": True, "staging_bytes": 999}, "more staging_bytes", {"staging_bytes": 1000}),
    ({"dispatch_sms": 24}, "dispatch='deepep'", {"dispatch": "deepep"}),
    ({"dispatch_sms": 24, "dispatch": "hierarchical"}, "or leave it out", {"dispatch": "auto"}),
    ({"overlap": True, "transport": "deepep"}, "between steps only", {"overlap": False}),
    ({"replica_transport": "copy_engine"}, "give replica_slots=1", {"replica_slots": 1}),
    ({"combine_order": "by_rank"}, "choose another dispatch", {"dispatch": "hierarchical"}),
    ({"dispatch_dtype": "float8"}, "only 'deepep'", {"dispatch": "deepep"}),
    ({"low_latency_tokens": 64}, "they need", {"dispatch": "deepep", "combine_order": "by_rank"}),
    ({"listen_token": "a" * 8}, "listen=8080", {"listen": 0}),
    ({"interval": None, "lag": 0}, "rebalance() decides and commits at once", {"interval": 20}),
    ({"interval": None, "lag": 5}, "lag=5 with interval=None", {"interval": 20}),
    ({"interval": None, "overlap": True}, "rebalance() migrates before it returns", {"interval": 20}),
    ({"dispatch": "hierarchical", "combine_order": "by_rank", "kernels": False}, "a pass for each", {"kernels": True}),
]
"""Settings, what the refusal says, and what lets them have an effect."""
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"interval": 0}, "interval=0: give a whole number of at least 1"),
    ({"lag": 50}, "lag=50 must be less than interval=50"),
    ({"replica_slots": -1}, "replica_slots=-1"),
    ({"max_moves": -1}, "max_moves=-1"),
    ({"max_pause_seconds": -2}, "max_pause_seconds=-2"),
    ({"moe_share": 1.5}, "moe_share=1.5"),
    ({"policy": "best"}, "policy='best' is unknown; choose one of: incremental, static"),
    ({"interval": "50"}, "interval='50': give a whole number"),
    ({"interval": True}, "interval=True: give a whole number"),
    ({"overlap": 1}, "overlap=1: give True or False"),
    ({"replica_transport": "deepep"}, "replica_transport='deepep' is unknown; choose one of: torch, copy_engine"),
    ({"kernels": "yes"}, "kernels='yes': give True or False"),
    ({"timeout_seconds": "30"}, "timeout_seconds='30': give a number of seconds above 0"),
    ({"window": 2**70}, "below 2**60"),
    ({"timeout_seconds": float("nan")}, "give a number of seconds above 0"),
    ({"moe_share": "half"}, "moe_share='half': give a share"),
    ({"policy": 3}, "policy=3 is unknown"),
    ({"transport": np.zeros((40, 40))}, "is unknown; choose one of: torch"),
    ({"rank_speed": "1,1"}, "rank_speed='1,1': give numbers above 0"),
    ({"rank_speed": []}, "give numbers above 0"),
    ({"timeout_seconds": 10**400}, "give a number of seconds above 0"),
    ({"listen": 80.5}, "listen=80.5: give a port"),
    ({"run": 5}, "run=5: give a folder"),
    ({"listen": 0, "listen_token": 12345678}, "listen_token must be"),
    ({"dispatch": 3}, "dispatch=3 is unknown; choose one of: all_to_all"),
    ({"migration": 3}, "migration=3: give MigrationConfig(...)"),
]


def refusal(make: Any, settings: Mapping[str, Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        make(**settings)
    line = str(refused.value)
    assert line and "\n" not in line and len(line) < 500
    return line


@pytest.mark.parametrize(("settings", "said", "mend"), WITHOUT_EFFECT)
def test_a_setting_without_effect_is_refused_and_accepted_where_it_has_one(
    settings: dict[str, Any], said: str, mend: dict[str, Any]
) -> None:
    assert said in refusal(lambda **given: config_from_settings(given), settings)
    assert config_from_settings({**settings, **mend}) != config_from_settings(mend)


@pytest.mark.parametrize(("settings", "said"), WRONG)
def test_a_value_of_the_wrong_type_is_refused_in_a_line(settings: dict[str, Any], said: str) -> None:
    assert said in refusal(lambda **given: config_from_settings(given), settings)


def test_the_static_policy_stands_beside_anything() -> None:
    lively = {"gate": "always", "overlap": True, "max_moves": 3, "bytes_per_step": 1000, "transport": "nixl"}
    assert replace(config_from_settings(lively), policy="static").gate == "always"


def test_names_that_are_not_known_get_the_place_of_theirs_or_those_that_there_are() -> None:
    assert refusal(BalancerConfig, {"lag": 0}) == "BalancerConfig has no setting 'lag'; MigrationConfig has it"
    assert "BalancerConfig has it" in refusal(MigrationConfig, {"overlap": True})
    assert "there are: name, " in refusal(DispatchConfig, {"smss": 3})


def test_configs_are_copied_saved_and_read_again() -> None:
    config = BalancerConfig(
        replica_slots=1,
        overlap=True,
        rank_speed=(1.0, 0.5),
        dispatch=DispatchConfig("deepep", combine_order="by_rank", num_sms=24),
        migration=MigrationConfig(transport="auto", bytes_per_step=1000),
    )
    again = replace(replace(config, interval=7), interval=50)
    for same in (again, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.described() == config.described() and hash(same) == hash(config)


OTHERS: dict[str, Any] = {
    "interval": 7,
    "window": 3,
    "transport": "nixl",
    "lag": 0,
    "dispatch": "hierarchical",
    "kernels": False,
    "staging_bytes": 1000,
}


@pytest.mark.parametrize("name", OTHERS)
def test_ranks_that_differ_in_a_setting_describe_themselves_differently(name: str) -> None:
    usual = {"replica_slots": 1}
    assert config_from_settings({**usual, name: OTHERS[name]}).described() != config_from_settings(usual).described()


def test_without_an_interval_the_window_counts_decisions_and_the_horizon_is_the_last_gap() -> None:
    alone, steady = BalancerConfig(interval=None), BalancerConfig(interval=64)
    assert (alone.horizon, alone.window_rows(0)) == (None, 4)
    assert (steady.horizon, steady.window_rows(2)) == (640, 128)
    alone = BalancerConfig(interval=None, window=7, migration=MigrationConfig(horizon_steps=30))
    assert (alone.window_rows(0), alone.horizon) == (7, 30)
    assert alone.described()["interval"] == "None"
