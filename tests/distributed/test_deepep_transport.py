"""The transport over DeepEP, with a double of its buffer: what every transport must do where all ranks post each round.
DeepEP itself: `tests/gpu`."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import deepep_double
from support import transport_contract as contract
from support.ranks import run_ranks
from support.transport_contract import RANKS, Case, hear, others, random_bytes, run_cases, soon, tell

from eplb_runtime.config import DispatchConfig
from eplb_runtime.distributed.transports import TRANSPORTS, deepep
from eplb_runtime.distributed.transports.base import Message, Transport, TransportError
from eplb_runtime.distributed.transports.deepep import ROW_BYTES, DeepEP
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPDispatcher

CPU = torch.device("cpu")
CALLS: list[str] = []
"""Collective calls of this rank's buffer, as they begin."""


class Buffer(deepep_double.ForAnyNumber):
    """Writes down what goes when."""

    def dispatch(self, x: Any, *arguments: Any, **named: Any) -> Any:
        CALLS.append("experts" if x.shape[1] * 2 == ROW_BYTES else "tokens")
        return super().dispatch(x, *arguments, **named)

    def combine(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        CALLS.append("back")
        return super().combine(x, *arguments, **named)


PACKAGE = SimpleNamespace(Buffer=Buffer)


def exchange(rank: int, transport: Transport, size: int = 5000) -> torch.Tensor:
    """Post one message to the next rank and one from the rank before; the latter's memory."""
    into = transport.empty(size).fill_(7)
    to, source = Message((rank + 1) % RANKS, random_bytes(rank, size, CPU)), Message((rank - 1) % RANKS, into)
    transport.post([to], [source]).wait(soon())
    return into


def a_rank_without_messages_takes_part(rank: int, transport: Transport) -> None:
    into = transport.empty(3 * ROW_BYTES + 1)
    payload = random_bytes(3, into.numel(), CPU)
    transport.post([Message(1, payload)] if rank == 0 else [], [Message(0, into)] if rank == 1 else []).wait(soon())
    assert rank != 1 or torch.equal(into, payload)


def a_rank_that_comes_after_others_gave_up_does_not_call_deepep(rank: int, transport: Transport) -> None:
    CALLS.clear()
    transport.wait_at_most(0.5)
    if rank == 2:
        hear("0 has given up")
        hear("1 has given up")
    with pytest.raises(TransportError, match="not every rank has come to this round in time"):
        transport.post([], [])
    with pytest.raises(TransportError, match="carries no experts any more: not every rank has come"):
        transport.post([], [])
    tell(f"{rank} has given up")
    assert not CALLS


def ranks_that_mean_other_messages_say_so_alike(rank: int, transport: Transport) -> None:
    CALLS.clear()
    sends = [Message(1, random_bytes(0, 10, CPU))] if rank == 0 else []
    with pytest.raises(TransportError, match="EP rank 0 sends 10 bytes where EP rank 1 waits for 11"):
        transport.post(sends, [Message(0, transport.empty(11))] if rank == 1 else []).wait(soon())
    assert not CALLS


def experts_go_by_the_buffer_of_tokens(rank: int, transport: Transport) -> None:
    deepep.imported = lambda *_: PACKAGE
    carrier = DeepEPDispatcher(DispatchContext.of(dist.group.WORLD, 2), DispatchConfig("deepep"))
    assert transport._buffer is carrier._buffer()  # type: ignore[attr-defined]
    CALLS.clear()
    rows = torch.full((3, 16), float(rank + 1), dtype=torch.bfloat16)
    arrived = carrier.dispatch(rows, torch.ones(3, 1), carrier.plan(torch.tensor([[0], [2], [4]])))
    assert torch.equal(exchange(rank, transport), random_bytes((rank - 1) % RANKS, 5000, CPU))
    assert torch.equal(carrier.combine(arrived.rows_MD, arrived), rows)
    assert CALLS == ["tokens", "experts", "back"]


def large_messages_go_in_equally_many_calls_on_every_rank(rank: int, transport: Transport) -> None:
    """Rank 0 sends 50 rows to each other rank, and nobody else sends any."""
    CALLS.clear()
    payload, into = random_bytes(0, 50 * ROW_BYTES, CPU), transport.empty(50 * ROW_BYTES)
    sends = [Message(peer, payload) for peer in others(0)] if rank == 0 else []
    transport.post(sends, [Message(0, into)] if rank else []).wait(soon())
    assert rank == 0 or torch.equal(into, payload)
    assert CALLS == ["experts"] * -(-50 // (20 // RANKS))  # of 20 rows at most, as many for each rank


def a_rank_that_alone_cannot_warm_up_fails_on_all(rank: int, transport: Transport) -> None:
    """Before anybody makes a buffer, which waits for every rank; then all begin anew."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(TransportError, match="rank 1: torch"):
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: rank == 1)
        transport.warm_up(soon())
    transport.warm_up(soon())
    assert torch.equal(exchange(rank, transport), random_bytes((rank - 1) % RANKS, 5000, CPU))


CASES: list[Case] = [
    a_rank_that_alone_cannot_warm_up_fails_on_all,
    contract.messages_of_a_pair_arrive_in_order,
    contract.messages_of_any_size,
    contract.empty_messages_between_others,
    contract.messages_to_itself,
    contract.several_posts_at_once_in_any_order_of_waiting,
    contract.what_is_done_stays_done_after_an_abort,
    a_rank_without_messages_takes_part,
    a_rank_that_comes_after_others_gave_up_does_not_call_deepep,
    ranks_that_mean_other_messages_say_so_alike,
    experts_go_by_the_buffer_of_tokens,
    large_messages_go_in_equally_many_calls_on_every_rank,
]


def over_the_double(rank: int) -> dict[str, Any]:
    deepep.CHUNK_BYTES = 20 * ROW_BYTES  # a message of a megabyte goes in several calls
    TRANSPORTS["deepep"] = partial(DeepEP, package=PACKAGE)
    said = run_cases(rank, "deepep", "gloo", lambda rank: CPU, CASES)
    assert deepep_double.HOST_WAITS == [], "never on the host with the interpreter locked"
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(RANKS, over_the_double)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(ranks: list[dict[str, Any]], case: Case) -> None:
    wrong = "".join(said[case.__name__] for said in ranks)
    assert not wrong, wrong
