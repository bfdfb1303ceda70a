"""What the doctor says of a machine: compiled code, what carries experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eplb_runtime.distributed.transports.base import TransportError
from eplb_runtime.tools.doctor import links, machine
from eplb_runtime.tools.doctor.links import try_transports
from eplb_runtime.tools.launch import process_group


def test_the_cache_of_compiled_code_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(machine, "is_compiled", lambda: False)
    assert "not compiled" in machine.compiled().why and machine.compiled().usable
    monkeypatch.setattr(machine, "is_compiled", lambda: True)
    assert machine.compiled().why == f"compiled, in {tmp_path}"
    monkeypatch.setattr(machine, "compiles", lambda: False)
    assert not machine.compiled().usable


def test_a_transport_says_why_it_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> Any:
        raise TransportError("no such wire\nand more")

    def missing(*arguments: object) -> Any:
        raise ImportError("pip install wire")

    monkeypatch.setattr(links, "TRANSPORTS", {"torch": links.TRANSPORTS["torch"], "broken": broken, "missing": missing})
    with process_group("cpu") as here:
        found = {carrier.name: carrier for carrier in try_transports(here)}
    assert found["torch"].usable and found["torch"].intra_node_gb_per_second is None
    assert (found["broken"].usable, found["broken"].why) == (False, "rank 0: no such wire")
    assert (found["missing"].usable, found["missing"].why) == (False, "rank 0: pip install wire")
