"""The package offers its public names and no others, each the very object of its room."""

from __future__ import annotations

import doctest
import importlib

import pytest

import eplb_runtime

WITH_EXAMPLES = "events hosts placement planner.drop_in planner.planning topology"
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
