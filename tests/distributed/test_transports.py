"""Every transport keeps the contract that the engine relies on (`transport_contract` has the cases), those of GPUs by
doubles of their libraries, which are themselves in `tests/gpu`; ``"auto"`` is one choice for all ranks."""

import logging
import os
import signal
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import torch.distributed as dist
from support import symmetric_memory_double
from support.nvshmem_double import Double
from support.ranks import run_ranks
from support.seen import heard, said_by
from support.transport_contract import (
    CASES,
    RANKS,
    Case,
    exchange_with_all,
    hear,
    large_messages,
    many_small_messages,
    others,
    run_cases,
    soon,
    tell,
)

from eplb_runtime.config import TRANSPORTS as NAMES
from eplb_runtime.distributed import transports
from eplb_runtime.distributed.transports import TRANSPORTS, automatic, nixl, nvshmem, why_rather_not, windows
from eplb_runtime.distributed.transports.base import Message, Transport, TransportError
from eplb_runtime.distributed.transports.deepep import DeepEP
from eplb_runtime.distributed.transports.nvshmem import Nvshmem
from eplb_runtime.distributed.transports.symmetric import CudaIpc, node_of_this_rank

CPU = torch.device("cpu")
HERE = ["torch", "auto", *(["nixl"] if not nixl.why_not() else [])]
"""Those that carry on a CPU and whose packages are there."""
DOUBLES = ("cuda_ipc", "nvshmem")


def believe_in_two_nodes(rank: int, name: str) -> None:
    """The last rank has a node of its own, so that "auto" takes one transport inside a node and another across."""
    if name == "auto":
        os.environ["GROUP_RANK"] = str(rank // 2)


def run_chosen_cases(rank: int, name: str, chosen: set[str], folder: Path) -> dict[str, Any]:
    believe_in_two_nodes(rank, name)
    cases, double = [case for case in CASES if case.__name__ in chosen], Double(folder)
    if name in DOUBLES:
        windows.MOST_PIECE_BYTES = 64 << 10  # a message of a megabyte goes in many pieces
        made = {"cuda_ipc": partial(CudaIpc, package=symmetric_memory_double)}
        made["nvshmem"] = partial(Nvshmem, package=double.library())
        TRANSPORTS[name] = made[name]
        cases = [case for case in cases if case not in (large_messages, many_small_messages)]
    said: dict[str, Any] = run_cases(rank, name, "gloo", lambda rank: CPU, cases)
    if name == "cuda_ipc":
        transports.symmetric.node_of_this_rank = lambda: f"{node_of_this_rank()} {rank}"
        transport = TRANSPORTS[name](dist.group.WORLD, "gloo", CPU, 30.0)
        said["other nodes"] = said_by(lambda: transport.warm_up(soon()))
    if name == "nvshmem":
        said["calls"] = [*double.calls]
        said["closed before it was looked at"] = closed_before_it_was_looked_at(rank)
    return said


@pytest.fixture(scope="module", params=[*HERE, *DOUBLES])
def transport_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def said(
    request: pytest.FixtureRequest, transport_name: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank found in each of the cases that were asked for (``pytest -k``)."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    chosen = {one["case"].__name__ for one in params if one.get("case") in CASES}
    return run_ranks(RANKS, run_chosen_cases, transport_name, chosen, tmp_path_factory.mktemp("heaps"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(said: list[dict[str, Any]], transport_name: str, case: Case) -> None:
    wrong = "".join(of_rank.get(case.__name__, "") for of_rank in said)
    assert not wrong, wrong


@pytest.mark.parametrize("transport_name", ["cuda_ipc"], indirect=True)
def test_ranks_of_several_nodes_are_refused(said: list[dict[str, Any]], transport_name: str) -> None:
    assert all("cannot be opened" in one["other nodes"] and "different ones" in one["other nodes"] for one in said)


@pytest.mark.parametrize("transport_name", ["nvshmem"], indirect=True)
def test_what_a_rank_wrote_before_it_closed_is_here_and_notes_follow_their_pieces(
    said: list[dict[str, Any]], transport_name: str
) -> None:
    """Of two writes in a row, one is a note: between a piece and its note everything is waited for."""
    for of_rank in said[1:]:
        assert of_rank["closed before it was looked at"] == ["", "EP rank 0 has given up"]
    for calls in (of_rank["calls"] for of_rank in said):
        pieces = [index for index, call in enumerate(calls) if call == "quiet"]
        assert pieces and all(calls[index - 1] == "put" and calls[index + 1] == "put" for index in pieces)


def closed_before_it_was_looked_at(rank: int) -> list[str]:
    """Rank 0 sends to the others and closes, while their threads stand still; then of two messages only one is sent."""
    said = []
    for messages in (1, 2):
        transport = made("nvshmem")
        arrived = [torch.empty(1000, dtype=torch.uint8) for _ in range(messages)]
        if rank == 0:
            mine = torch.arange(1000).to(torch.uint8)
            transport.post([Message(peer, mine) for peer in others(rank)], []).wait(soon())
            transport.close()
            tell(f"closed {messages}")
        else:
            with transport.state:
                pending = transport.post([], [Message(0, into) for into in arrived])
                hear(f"closed {messages}")
            said.append(said_by(lambda pending=pending: pending.wait(soon())))
            assert said[-1] or torch.equal(arrived[0], torch.arange(1000).to(torch.uint8))
            transport.close()
        dist.barrier()
    return said


def test_the_config_offers_the_transports_that_there_are() -> None:
    assert set(NAMES) == set(TRANSPORTS)


def made(name: str, seconds: float = 60.0) -> Transport:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    transport = TRANSPORTS[name](group, "gloo", CPU, seconds)
    transport.warm_up(soon())
    return transport


def wait_for_a_rank_that_dies(rank: int, name: str) -> str:
    believe_in_two_nodes(rank, name)
    dist.barrier()  # who is left waits for who is gone at the end: that has to fail at once
    transport = made(name)
    if rank == 2:
        hear("posted 0")
        hear("posted 1")
        os.kill(os.getpid(), signal.SIGKILL)
    pending = transport.post([], [Message(2, transport.empty(1 << 20))])
    tell(f"posted {rank}")
    return said_by(lambda: pending.wait(soon(60.0)))


@pytest.mark.parametrize("name", HERE)
def test_a_peer_that_dies_is_an_error_and_not_a_missed_deadline(name: str) -> None:
    for error in run_ranks(RANKS, wait_for_a_rank_that_dies, name, expect_exit=(0, 1, 2))[:2]:
        assert error and "in time" not in error


def give_up_a_rank_that_stands_still(rank: int, name: str) -> None:
    """Rank 1 has posted what it sends and is stopped, until rank 0 has given it up."""
    transport, store = made(name), dist.distributed_c10d._get_default_store()
    if rank == 1:
        pending = transport.post([Message(0, transport.empty(4 << 20).fill_(1))], [])
        store.set("process", str(os.getpid()))
        said_by(lambda: pending.wait(soon(5.0)))
        tell("went on")
    if rank == 0:
        os.kill(process := int(store.get("process")), signal.SIGSTOP)
        into = transport.empty(4 << 20).fill_(7)
        error = said_by(lambda: transport.post([], [Message(1, into)]).wait(soon(0.5)))
        before = into.clone()
        os.kill(process, signal.SIGCONT)
        hear("went on")
        assert torch.equal(before, into), "it writes nothing later"
        all_there = bool((into == 1).all())
        assert bool(error) != all_there, "either all of it is there, or an error says that it is not"
        assert not error or "in time" in error
    transport.close()


@pytest.mark.parametrize("one_sided", [name for name in HERE if name not in ("torch", "auto")])
def test_a_peer_that_stands_still_is_given_up_and_writes_nothing_later(one_sided: str) -> None:
    run_ranks(2, give_up_a_rank_that_stands_still, one_sided)


def test_a_model_on_a_cpu_is_refused() -> None:
    assert "not on cpu" in why_rather_not("cuda_ipc", CPU)
    for transport in (Nvshmem, DeepEP):
        with pytest.raises(TransportError, match=r"between GPUs, (not|and this model is) on cpu"):
            transport(SimpleNamespace(rank=lambda: 0, size=lambda: 1), "gloo", CPU, 1.0).warm_up(0.0)  # type: ignore[arg-type]


def test_a_missing_package_is_one_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "import_module", Mock(side_effect=ModuleNotFoundError("No module named 'nvshmem'")))
    with pytest.raises(TransportError, match=r"nvshmem4py .*: pip install 'eplb-runtime\[nvshmem-cu12\]'") as said:
        nvshmem.load()
    assert "\n" not in str(said.value)


# -- "auto" ------------------------------------------------------------------------------------------------------------


def test_what_ucx_may_use_is_not_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may read it at that moment. The user's own choice stands."""
    told: list[tuple[str, dict[str, str]]] = []

    def agent(name: str, config: dict[str, Any]) -> SimpleNamespace:
        assert os.environ.get("UCX_TLS") == before and not config["enable_prog_thread"]
        return SimpleNamespace(create_backend=lambda *of: told.append(of))

    api = MagicMock(logger=logging.getLogger("a test's"), nixl_agent=agent, nixl_agent_config=dict)
    monkeypatch.setattr(nixl.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(nixl.importlib, "import_module", lambda name: api)
    for before in (None, "tcp"):
        monkeypatch.delenv("UCX_TLS", raising=False) if before is None else monkeypatch.setenv("UCX_TLS", before)
        nixl.new_agent("a name")
    assert told == [("UCX", {"engine_config": "TLS=^sm"}), ("UCX", {})]


FAILS: list[tuple[int, Any, str]] = [
    (1, symmetric_memory_double, "empty"),
    (2, nixl, "new_agent"),
    (2, nixl.base64, "b64decode"),
    (2, windows, "synchronize"),
    (2, windows.Windows, "_try_out"),
]
"""Number of nodes, and what one rank alone fails in: its own memory, that of others, the device, the first bytes."""


def in_all_places(rank: int) -> tuple[list[str], list[str]]:
    """One node; two that are believed to have RDMA, where UCX takes TCP; then rank 2 fails in each of `FAILS`."""
    windows.MOST_PIECE_BYTES, nixl.rdma_devices, seen = 64 << 10, lambda: ["mlx5_0"], []
    TRANSPORTS["cuda_ipc"] = partial(CudaIpc, package=symmetric_memory_double)
    with heard(logging.INFO) as lines:
        for nodes, *place in ((1,), (2,), *FAILS):
            os.environ["GROUP_RANK"] = str(rank * nodes // 3)
            with pytest.MonkeyPatch.context() as patch:
                if place:
                    patch.setattr(transports.symmetric, "why_not", lambda device: "")
                if place and (rank == 2 or "_try_out" in place):
                    patch.setattr(*place, Mock(side_effect=TransportError("made to fail") if rank == 2 else None))
                group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
                transport = automatic(group, "gloo", CPU, 60.0)
                transport.warm_up(soon())
                exchange_with_all(rank, transport, range(3), [100, 0, 2 << 20])
                seen.append(type(transport).__name__)
                transport.close()
    return seen, [line for line in lines if line.startswith("transport:")]


def test_all_ranks_choose_alike_and_fall_back_together() -> None:
    if nixl.why_not():
        pytest.skip(nixl.why_not())
    results = run_ranks(3, in_all_places)
    assert [seen for seen, _ in results] == [["TorchPointToPoint", "Nixl", *["TorchPointToPoint"] * len(FAILS)]] * 3
    at_first, at_second, *fallen_back = results[0][1]
    assert at_first == "transport: torch (one node; no cuda_ipc: rank 0: it copies between GPUs, not on cpu)"
    assert at_second == "transport: nixl (several nodes)" and len(fallen_back) == len(FAILS)
    assert all(line.startswith("transport: torch (") and "rank 2: made to fail" in line for line in fallen_back)
