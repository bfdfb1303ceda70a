"""The package offers its public names and no others, each the very object of its room."""

from __future__ import annotations

import importlib

import pytest

import eplb_runtime


@pytest.mark.parametrize("name", eplb_runtime.__all__)
def test_every_public_name_is_the_rooms_own(name: str) -> None:
    value = getattr(eplb_runtime, name)
    assert getattr(importlib.import_module(value.__module__), name) is value
    assert name in dir(eplb_runtime)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'rebalance'"):
        _ = eplb_runtime.rebalance
