"""Every transport keeps the contract that the engine relies on; see `transport_contract` for the cases."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import CASES, RANKS, Case, hear, run_cases, soon, tell

from eplb_runtime.config import TRANSPORTS as NAMES
from eplb_runtime.migration.transports import TRANSPORTS
from eplb_runtime.migration.transports.base import Message, TransportError


def on_cpu(rank: int) -> torch.device:
    return torch.device("cpu")


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def said(transport_name: str) -> list[dict]:
    return run_ranks(RANKS, run_cases, transport_name, "gloo", on_cpu, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(said: list[dict], case: Case) -> None:
    wrong = "".join(of_rank[case.__name__] for of_rank in said)
    assert not wrong, wrong


def test_the_config_offers_the_transports_that_there_are() -> None:
    assert set(NAMES) == set(TRANSPORTS)


def wait_for_a_rank_that_dies(rank: int, name: str) -> str:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    transport = TRANSPORTS[name](group, "gloo", torch.device("cpu"), 60.0)
    transport.warm_up(soon())
    if rank == 2:
        hear("posted 0")
        hear("posted 1")
        os._exit(1)
    pending = transport.post([], [Message(2, transport.empty(1 << 20))])
    tell(f"posted {rank}")
    try:
        pending.wait(soon(60.0))
    except TransportError as error:
        return str(error)
    return ""


def test_a_peer_that_dies_is_an_error_and_not_a_missed_deadline(transport_name: str) -> None:
    results = run_ranks(RANKS, wait_for_a_rank_that_dies, transport_name, expect_exit=(0, 1, 2))
    for error in results[:2]:
        assert error and "in time" not in error
