"""Settings: at most 18 at the top, nested ones for the rest, and a line for each that cannot work or has no effect."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flat_settings import config_from_settings

from eplb_runtime.config import BalancerConfig, ConfigError, DispatchConfig, MigrationConfig

WITHOUT_EFFECT: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"bytes_per_step": 1000}, "give overlap=True", {"overlap": True}),
    ({"bytes_per_step": 1000, "overlap": True, "staging_bytes": 999}, "more staging_bytes", {"staging_bytes": 1000}),
    ({"dispatch_sms": 24}, "dispatch='deepep'", {"dispatch": "deepep"}),
    ({"dispatch_sms": 24, "dispatch": "hierarchical"}, "or leave it out", {"dispatch": "auto"}),
    ({"split_least_tokens": 0}, "give replica_slots=1", {"replica_slots": 1}),
    ({"copies_by": "copy_engine"}, "give replica_slots=1", {"replica_slots": 1}),
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
    ({"copies_by": "deepep"}, "copies_by='deepep' is gone: leave copies_by out, or choose 'copy_engine'"),
    ({"transport": "shm"}, "transport='shm' is gone; gloo does it: leave transport out"),
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
    assert (
        refusal(DispatchConfig, {"most_tokens": 64})
        == "DispatchConfig has no setting 'most_tokens'; gone: leave it out"
    )
    assert "gone: leave it out, each layer" in refusal(BalancerConfig, {"shared_between_layers": True})


def test_configs_are_copied_saved_and_read_again() -> None:
    config = BalancerConfig(
        replica_slots=1,
        overlap=True,
        rank_speed=(1.0, 0.5),
        dispatch=DispatchConfig("deepep", combine_order="by_rank", sms=24, split_least_tokens=8),
        migration=MigrationConfig(transport="auto", bytes_per_step=1000),
    )
    again = replace(replace(config, interval=7), interval=50)
    for same in (again, copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert same == config and same.described() == config.described() and hash(same) == hash(config)


OTHERS: dict[str, Any] = {
    "interval": 7,
    "window": 3,
    "split_least_tokens": 8,
    "transport": "nixl",
    "lag": 0,
    "dispatch": "hierarchical",
    "kernels": False,
    "staging_bytes": 1000,
    "move_gradients": True,
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
