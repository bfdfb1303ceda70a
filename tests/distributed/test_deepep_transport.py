"""The transport over DeepEP, with a double of its buffer: what every transport must do, and what it must do beside
tokens on the same buffer. DeepEP itself: `tests/gpu`."""

from __future__ import annotations

import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepep_double
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transport_contract import CASES, RANKS, Case, hear, large_messages, many_small_messages, run_cases, soon, tell

from eplb_runtime.distributed.transports import TRANSPORTS, deepep
from eplb_runtime.distributed.transports.base import Message, TransportError
from eplb_runtime.distributed.transports.deepep import DeepEP
from eplb_runtime.distributed.transports.deepep_rows import ROW_BYTES
from eplb_runtime.moe.dispatch.deepep_buffer import BufferCarrier

CHEAP = [case for case in CASES if case not in (large_messages, many_small_messages)]
CPU = torch.device("cpu")


ORDER: list[str] = []
"""Collective calls of this rank's buffer, as they begin."""


class Buffer(deepep_double.ForAnyNumber):
    """Writes down what goes when."""

    begun = threading.Event()

    def dispatch(self, x: Any, *arguments: Any, **named: Any) -> Any:
        ORDER.append("experts" if x.shape[1] * 2 == ROW_BYTES else "tokens")
        Buffer.begun.set()
        return super().dispatch(x, *arguments, **named)

    def combine(self, x: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        ORDER.append("back")
        return super().combine(x, *arguments, **named)


PACKAGE = SimpleNamespace(Buffer=Buffer)


def over_the_double(rank: int) -> dict:
    deepep.CHUNK_BYTES = 20 * ROW_BYTES  # a message of a megabyte goes in several calls
    TRANSPORTS["deepep"] = partial(DeepEP, package=PACKAGE)
    said = run_cases(rank, "deepep", "gloo", lambda rank: CPU, CHEAP)
    said["beside tokens"] = beside_tokens(rank)
    return said


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return run_ranks(RANKS, over_the_double)


@pytest.mark.parametrize("case", CHEAP, ids=lambda case: case.__name__)
def test_contract(ranks: list, case: Case) -> None:
    wrong = "".join(said[case.__name__] for said in ranks)
    assert not wrong, wrong


# -- beside tokens, on one buffer --------------------------------------------------------------------------------------


def beside_tokens(rank: int) -> dict[str, Any]:
    """Only ranks 0 and 1 have messages; tokens go between all three."""
    transport = DeepEP(dist.group.WORLD, "gloo", CPU, 30.0, package=PACKAGE)
    transport.warm_up(soon())
    carrier = BufferCarrier(dist.group.WORLD, 2, 20, package=PACKAGE)
    shared = carrier._shared
    assert transport._buffer is shared.buffer(dist.group.WORLD, 20, None, None), "tokens and experts have one buffer"
    found: dict[str, Any] = {}
    for name, check in (
        ("one call behind", one_call_behind),
        ("many", many_calls),
        ("to several", to_several),
        ("two models", two_models),
    ):
        ORDER.clear()
        dist.barrier()
        found[name] = check(rank, transport, carrier), list(ORDER)
        dist.barrier()
    transport.close()
    return found


def tokens(rank: int, carrier: BufferCarrier) -> bool:
    """A token to each rank and back; whether they came back as they went."""
    rows = torch.full((3, 16), float(rank + 1), dtype=torch.bfloat16)
    arrival = carrier.carry(rows, torch.tensor([[0], [2], [4]]))
    return torch.equal(carrier.back(arrival.rows_UC, arrival.ticket), rows)


def one_call_behind(rank: int, transport: DeepEP, carrier: BufferCarrier) -> bool:
    """Ranks 0 and 1 have begun a call with tokens when experts are to go; rank 2, which posts nothing, has not, and
    says that it is ready before it does."""
    payload, into = torch.arange(50_000).to(torch.uint8), transport.empty(50_000)
    Buffer.begun.clear()
    right: list[bool] = []
    if rank < 2:
        calls = threading.Thread(target=lambda: right.append(tokens(rank, carrier)))
        calls.start()
        Buffer.begun.wait(30)
        message = Message(1 - rank, payload if rank == 0 else into)
        pending = transport.post([message], []) if rank == 0 else transport.post([], [message])
        pending.wait(soon())
        calls.join()
        return right == [True] and (rank == 0 or torch.equal(into, payload))
    turns, ready = carrier._shared.turns, threading.Event()
    hold = turns.hold

    def hold_and_tell(holder: object, deadline: float) -> int:
        held = hold(holder, deadline)
        ready.set()
        return held

    turns.hold = hold_and_tell  # type: ignore[method-assign]
    ready.wait(30)
    turns.hold = hold  # type: ignore[method-assign]
    return tokens(rank, carrier)


def two_models(rank: int, transport: DeepEP, carrier: BufferCarrier) -> tuple[str, bool]:
    """On rank 2 something of another model's is on its way: an exchange waits for that, and ends where it waits too
    long."""
    turns, other = carrier._shared.turns, object()
    payload, into = torch.arange(50_000).to(torch.uint8), transport.empty(50_000)
    if rank == 2:
        turns.hold(other, soon())
        tell("rank 2 is busy")
        with pytest.raises(TransportError, match="another model of this process"):
            turns.hold(transport, 0.0)
        hear("posted")
        assert transport._thread is not None and transport._thread.is_alive()
        turns.release(other)
    hear("rank 2 is busy")
    pending = transport.post([Message(1, payload)] if rank == 0 else [], [Message(0, into)] if rank == 1 else [])
    if rank == 0:
        waited = not pending.poll()
        tell("posted")
    pending.wait(soon())
    return "waited" if rank != 0 or waited else "did not wait", rank != 1 or torch.equal(into, payload)


def to_several(rank: int, transport: DeepEP, carrier: BufferCarrier) -> tuple[bool, int]:
    """Rank 0 sends the same bytes to both others; whether they came, and how many rows rank 0 sent for it."""
    payload, rows = torch.arange(3 * ROW_BYTES).to(torch.uint8), []
    sent = transport._buffer.dispatch

    def counting(x: torch.Tensor, **named: Any) -> Any:
        rows.append(int((named["topk_idx"] >= 0).any(dim=1).sum()))
        return sent(x, **named)

    transport._buffer.dispatch = counting
    into = transport.empty(payload.numel())
    if rank == 0:
        hear("1 waits for it")
        hear("2 waits for it")
        transport.post([Message(1, payload), Message(2, payload)], []).wait(soon())
    else:
        pending = transport.post([], [Message(0, into)])
        transport._log._writer.submit(lambda: tell(f"{rank} waits for it"))
        pending.wait(soon())
    dist.barrier()
    transport._buffer.dispatch = sent
    return rank == 0 or torch.equal(into, payload), sum(rows)


def many_calls(rank: int, transport: DeepEP, carrier: BufferCarrier) -> bool:
    """Two ranks exchange again and again while all make calls with tokens."""
    right = []

    def exchange() -> None:
        for number in range(15):
            payload, into = torch.full((40_000,), 100 * rank + number).to(torch.uint8), transport.empty(40_000)
            transport.post([Message(1 - rank, payload)], [Message(1 - rank, into)]).wait(soon())
            right.append(bool((into == 100 * (1 - rank) + number).all()))
        tell(f"exchanged {rank}")

    thread = threading.Thread(target=exchange)
    if rank < 2:
        thread.start()
    right += [tokens(rank, carrier) for _ in range(60)]
    hear("exchanged 0")
    hear("exchanged 1")
    dist.barrier()
    return all(right)


def test_experts_go_at_the_same_place_among_tokens_on_every_rank(ranks: list) -> None:
    for said in ranks:
        right, order = said["beside tokens"]["one call behind"]
        assert right and order == ["tokens", "experts", "back"]


def test_calls_come_in_one_order_on_every_rank_while_two_of_them_exchange(ranks: list) -> None:
    orders = [said["beside tokens"]["many"] for said in ranks]
    assert all(right for right, _ in orders) and orders[0][1] == orders[1][1] == orders[2][1]
    assert orders[0][1].count("tokens") == orders[0][1].count("back") == 60 and orders[0][1].count("experts") >= 15


def test_what_goes_by_one_buffer_goes_one_model_at_a_time(ranks: list) -> None:
    assert [said["beside tokens"]["two models"][0] for said in ranks] == [("waited", True)] * RANKS


def test_bytes_for_several_ranks_are_sent_once(ranks: list) -> None:
    assert [said["beside tokens"]["to several"][0] for said in ranks] == [(True, 3), (True, 0), (True, 0)]
