"""Every transport keeps the contract that the engine relies on; see `transport_contract` for the cases."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import CASES, RANKS, Case, hear, run_cases, soon, tell

from eplb_runtime.config import TRANSPORTS as NAMES
from eplb_runtime.distributed.transports import TRANSPORTS
from eplb_runtime.distributed.transports.automatic import why_not
from eplb_runtime.distributed.transports.base import Message, TransportError

HERE = [name for name in TRANSPORTS if not why_not(name, torch.device("cpu"))]
"""Those that carry on a CPU and whose packages are there."""


def on_cpu(rank: int) -> torch.device:
    return torch.device("cpu")


def believe_in_two_nodes(rank: int, name: str) -> None:
    """The last rank has a node of its own, so that "auto" takes one transport inside a node and another across."""
    if name == "auto":
        os.environ["GROUP_RANK"] = str(rank // 2)


def run_chosen_cases(rank: int, name: str, chosen: set[str]) -> dict:
    believe_in_two_nodes(rank, name)
    return run_cases(rank, name, "gloo", on_cpu, [case for case in CASES if case.__name__ in chosen])


@pytest.fixture(scope="module", params=HERE)
def transport_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def said(request: pytest.FixtureRequest, transport_name: str) -> list[dict]:
    """What each rank found in each of the cases that were asked for (``pytest -k``)."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return run_ranks(
        RANKS, run_chosen_cases, transport_name, {one["case"].__name__ for one in params if one.get("case") in CASES}
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(said: list[dict], case: Case) -> None:
    wrong = "".join(of_rank[case.__name__] for of_rank in said)
    assert not wrong, wrong


def test_the_config_offers_the_transports_that_there_are() -> None:
    assert set(NAMES) == set(TRANSPORTS)


def wait_for_a_rank_that_dies(rank: int, name: str) -> str:
    believe_in_two_nodes(rank, name)
    dist.barrier()  # who is left waits for who is gone at the end: that has to fail at once
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    transport = TRANSPORTS[name](group, "gloo", torch.device("cpu"), 60.0)
    transport.warm_up(soon())
    if rank == 2:
        hear("posted 0")
        hear("posted 1")
        os.kill(os.getpid(), signal.SIGKILL)
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


def give_up_a_rank_that_stands_still(rank: int, name: str) -> dict[str, object]:
    """Rank 1 has posted what it sends and is stopped, longer than rank 0's deadline."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    transport = TRANSPORTS[name](group, "gloo", torch.device("cpu"), 60.0)
    transport.warm_up(soon())
    store = dist.distributed_c10d._get_default_store()
    said: dict[str, object] = {}
    if rank == 1:
        out = transport.empty(4 << 20).fill_(1)
        pending = transport.post([Message(0, out)], [])
        store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        try:
            pending.wait(soon(5.0))
        except TransportError as error:
            said["error"] = str(error)
        tell("went on")
    if rank == 0:
        process = int(store.get("process"))
        while Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.001)
        into = transport.empty(4 << 20).fill_(7)
        began = time.monotonic()
        try:
            transport.post([], [Message(1, into)]).wait(soon(0.5))
        except TransportError as error:
            said["error"] = str(error)
        said["seconds"] = time.monotonic() - began
        before = into.clone()
        os.kill(process, signal.SIGCONT)
        hear("went on")
        said["untouched"] = torch.equal(before, into)
        said["arrived"] = bool((into == 1).all())
    transport.close()
    return said


@pytest.mark.parametrize("one_sided", [name for name in HERE if name not in ("torch", "auto")])
def test_a_peer_that_stands_still_is_given_up_and_writes_nothing_later(one_sided: str) -> None:
    waited, _ = run_ranks(2, give_up_a_rank_that_stands_still, one_sided)
    assert waited["untouched"]
    assert waited["seconds"] < 5.0
    assert ("error" in waited) != waited["arrived"], "either all of it is there, or an error says that it is not"
    assert "error" not in waited or "in time" in str(waited["error"])
