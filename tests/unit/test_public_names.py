"""The package offers its public names and no others, each the very object of its room."""

from __future__ import annotations

import importlib
import sys

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


def test_without_accelerate_the_trainer_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.partition(".")[0] == "accelerate"] + ["accelerate"]:
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("trainer", "in_step"):
        monkeypatch.delitem(sys.modules, f"eplb_runtime.hosts.{module}", raising=False)
    monkeypatch.delitem(vars(eplb_runtime), "BalancedTrainer", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'eplb-runtime\[trainer\]'"):
        _ = eplb_runtime.BalancedTrainer
