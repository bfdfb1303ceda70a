"""The example that survives the death of a rank says beforehand when torchrun was started so that it will not."""

from __future__ import annotations

import pytest
from examples import FOLDER, load_example
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

DISABLED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@pytest.fixture(autouse=True)
def _examples_import_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)


def with_master_port(monkeypatch: pytest.MonkeyPatch, restarts: int, disabled: bool) -> str:
    """What it says as torchrun's ``--master-port`` starts it."""
    monkeypatch.setenv(DISABLED, str(int(disabled)))
    torchruns = StaticTCPRendezvous("localhost", 1, 0, 1, "test", 1)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(torchruns.use_agent_store))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", str(restarts))
    said: str = load_example("resume").why_no_second_life()
    assert "\n" not in said
    return said


def test_it_says_that_a_master_port_makes_the_variable_useless(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"--master-port ignores {DISABLED}" in with_master_port(monkeypatch, 1, True)
    assert f"give it {DISABLED}=1" in with_master_port(monkeypatch, 1, False)


def test_it_says_nothing_where_a_second_life_can_connect_or_none_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_master_port(monkeypatch, 0, True) == ""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert load_example("resume").why_no_second_life() == ""
