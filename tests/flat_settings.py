"""Configs of flat settings, as tables of cases have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from eplb_runtime.config import BalancerConfig, DispatchConfig, MigrationConfig

OF_DISPATCH = {"dispatch": "name", "dispatch_dtype": "dtype", "dispatch_sms": "sms"} | {
    own.name: own.name for own in fields(DispatchConfig) if own.name not in ("name", "dtype", "sms")
}
OF_MIGRATION = [own.name for own in fields(MigrationConfig)]
NAMES = {own.name for own in fields(BalancerConfig)} - {"migration"} | {*OF_DISPATCH, *OF_MIGRATION}


def config_from_settings(settings: Mapping[str, Any]) -> BalancerConfig:
    """The config of all settings by their own names, but ``"dispatch"``, ``"dispatch_dtype"``, ``"dispatch_sms"``."""
    top = {name: value for name, value in settings.items() if name not in (*OF_DISPATCH, *OF_MIGRATION)}
    dispatch = {inner: settings[name] for name, inner in OF_DISPATCH.items() if name in settings}
    migration = {name: settings[name] for name in OF_MIGRATION if name in settings}
    if isinstance(dispatch.get("name"), DispatchConfig):  # vars() of a config has its parts
        top["dispatch"] = dispatch.pop("name")
    if dispatch:
        top["dispatch"] = DispatchConfig(**dispatch)
    if migration:
        top["migration"] = MigrationConfig(**migration)
    return BalancerConfig(**top)
