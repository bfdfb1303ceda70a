"""The transport over NVSHMEM, with a double of it: what every transport must do. NVSHMEM itself: `tests/gpu`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from nvshmem_double import Double
from ranks import run_ranks
from transport_contract import (
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

from eplb_runtime.distributed.transports import TRANSPORTS, nvshmem, windows
from eplb_runtime.distributed.transports.base import Message, TransportError
from eplb_runtime.distributed.transports.nvshmem import Nvshmem

CHEAP = [case for case in CASES if case not in (large_messages, many_small_messages)]


def over_the_double(rank: int, folder: Path) -> tuple[dict, list[str]]:
    windows.MOST_PIECE_BYTES = 64 << 10  # a message of a megabyte goes in many pieces
    double = Double(folder)
    TRANSPORTS["nvshmem"] = partial(Nvshmem, package=double.library())
    said = run_cases(rank, "nvshmem", "gloo", lambda rank: torch.device("cpu"), CHEAP)
    begun = len(double.calls)
    said["two at once"] = two_at_once(rank)
    said["closed before it was looked at"] = closed_before_it_was_looked_at(rank)
    return said, double.calls[:begun]


def two_at_once(rank: int) -> list[int]:
    """Transports of two models in one process, whose messages mix; then of a third. Says how many windows there are."""
    first, second = (TRANSPORTS["nvshmem"](dist.group.WORLD, "gloo", torch.device("cpu"), 30.0) for _ in range(2))
    first.warm_up(soon())
    second.warm_up(soon())
    windows = [len(nvshmem._windows)]
    to, source = (rank + 1) % RANKS, (rank - 1) % RANKS
    arrived = [torch.empty(200_000, dtype=torch.uint8) for _ in range(2)]
    pending = [
        transport.post([Message(to, torch.full_like(into, 10 * number + rank))], [Message(source, into)])
        for number, (transport, into) in enumerate(zip((first, second), arrived, strict=True))
    ]
    for each in pending:
        each.wait(soon())
    assert [set(into.tolist()) for into in arrived] == [{source}, {10 + source}]
    first.close()
    third = TRANSPORTS["nvshmem"](dist.group.WORLD, "gloo", torch.device("cpu"), 30.0)
    third.warm_up(soon())
    exchange_with_all(rank, second, others(rank), [70_000])
    exchange_with_all(rank, third, others(rank), [70_000])
    for transport in (second, third):
        transport.close()
    return [*windows, len(nvshmem._windows)]


def closed_before_it_was_looked_at(rank: int) -> list[str]:
    """Rank 0 sends to the others and closes, while their threads stand still; then of two messages only one is sent."""
    said = []
    for messages in (1, 2):
        transport = TRANSPORTS["nvshmem"](dist.group.WORLD, "gloo", torch.device("cpu"), 30.0)
        transport.warm_up(soon())
        arrived = [torch.empty(1000, dtype=torch.uint8) for _ in range(messages)]
        if rank == 0:
            mine = torch.arange(1000).to(torch.uint8)
            transport.post([Message(peer, mine) for peer in others(rank)], []).wait(soon())
            transport.close()
            tell(f"closed {messages}")
        else:
            with transport._state:
                pending = transport.post([], [Message(0, into) for into in arrived])
                hear(f"closed {messages}")
            try:
                pending.wait(soon())
                said.append("here" if torch.equal(arrived[0], torch.arange(1000).to(torch.uint8)) else "wrong")
            except TransportError as error:
                said.append(str(error))
            transport.close()
        dist.barrier()
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict, list[str]]]:
    return run_ranks(RANKS, over_the_double, tmp_path_factory.mktemp("heaps"))


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.__name__)
def test_contract(ranks: list, case: Case) -> None:
    wrong = "".join(said[case.__name__] for said, _ in ranks)
    assert not wrong, wrong


def test_each_transport_in_use_has_a_window_of_its_own_and_leaves_it_to_the_next(ranks: list) -> None:
    assert [said["two at once"] for said, _ in ranks] == [[2, 2]] * RANKS


def test_what_a_rank_wrote_before_it_closed_is_here(ranks: list) -> None:
    for said, _ in ranks[1:]:
        assert said["closed before it was looked at"] == ["here", "EP rank 0 has given up"]


def test_a_note_follows_its_piece_only_when_that_is_there(ranks: list) -> None:
    """Of two writes in a row, one is a note: between a piece and its note everything is waited for."""
    for _, calls in ranks:
        pieces = [index for index, call in enumerate(calls) if call == "quiet"]
        assert pieces and all(calls[index - 1] == "put" and calls[index + 1] == "put" for index in pieces)


def test_a_model_on_a_cpu_is_refused() -> None:
    assert "GPU" in nvshmem.why_not(torch.device("cpu"))


def test_a_missing_package_is_one_line_that_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_there(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(nvshmem, "import_module", not_there)
    with pytest.raises(TransportError, match=r"nvshmem4py .*: pip install 'eplb-runtime\[nvshmem-cu12\]'") as said:
        nvshmem.load()
    assert "\n" not in str(said.value)
