"""An EP group of one rank: the bits of the exchange that there was, and the host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import SLOTS, Batch, there_and_back
from host_waits import HostWaitsError, no_waits
from ranks import run_ranks

from eplb_runtime.moe.dispatch.all_to_all import AllToAll, OneRank
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.routing.splitter import RowCounts

THREE = (0, 1, 2)
BATCHES = {
    "two choices a token": Batch((50,), slots=THREE, top_k=2),
    "one choice a token": Batch((50,), slots=THREE, top_k=1),
    "all slots": Batch((50,), slots=THREE, top_k=3),
    "everything to one slot": Batch((50,), slots=(1,)),
    "a slot without rows": Batch((50,), slots=(0, 2)),
    "the same slot twice": Batch((50,), slots=(2, 2, 0), top_k=3),
    "one token": Batch((1,), slots=THREE),
    "nothing at all": Batch((0,), slots=THREE),
    "float32": Batch((50,), slots=THREE, top_k=3, dtype=torch.float32),
    "bfloat16": Batch((50,), slots=THREE, top_k=3, dtype=torch.bfloat16),
    "bfloat16, weights in float32": Batch(
        (50,), slots=THREE, top_k=3, dtype=torch.bfloat16, weights_dtype=torch.float32
    ),
    "hidden states need no gradient": Batch((9,), slots=THREE, need=("weights", "experts")),
    "router weights need no gradient": Batch((9,), slots=THREE, need=("hidden", "experts")),
    "only the router learns": Batch((9,), slots=THREE, need=("weights",)),
    "nothing learns": Batch((9,), slots=THREE, need=()),
}
NAMES = ("out", "hidden", "weights", "experts")


def known(batch: Batch) -> RowCounts:
    sent = np.bincount(batch.of(0)[1].reshape(-1).numpy(), minlength=SLOTS)
    return RowCounts(sent, sent.reshape(1, SLOTS))


def ways(dispatcher: Dispatcher, batch: Batch) -> list[dict]:
    """By itself, the same way again, and with counts that are known."""
    first = there_and_back(dispatcher, batch, 0)
    again = there_and_back(dispatcher, batch, 0, metadata=first["metadata"])
    return [first, again, there_and_back(dispatcher, batch, 0, counts=known(batch))]


def equal(one: dict, other: dict) -> bool:
    rows = [of["rows"] for of in (one, other)]
    same_rows = rows[0] is None or all(map(torch.equal, *rows))
    return same_rows and all(
        (one[name] is None and other[name] is None) or torch.equal(one[name], other[name]) for name in NAMES
    )


def compared(rank: int) -> dict[str, list[bool]]:
    group = dist.group.WORLD
    plain, alone = AllToAll(DispatchContext.of(group, SLOTS)), OneRank(DispatchContext.of(group, SLOTS))
    found = {}
    for name, batch in BATCHES.items():
        expected = there_and_back(plain, batch, 0)
        found[name] = [equal(expected, one) for one in ways(alone, batch)]
    return found


@cache
def comparison() -> dict[str, list[bool]]:
    return run_ranks(1, compared)[0]


@pytest.mark.parametrize("name", BATCHES)
def test_every_bit_is_that_of_the_exchange(name: str) -> None:
    assert comparison()[name] == [True] * 3


def grouped(rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.grouped_mm(rows, parameters[0], offs=counts.offsets_S)


def forward_and_backward(dispatcher: Dispatcher) -> None:
    hidden = torch.randn(40, 64).bfloat16().requires_grad_()
    weights = torch.rand(40, 2, requires_grad=True)
    slots = torch.randint(SLOTS, (40, 2))
    experts = torch.randn(SLOTS, 64, 64).bfloat16().requires_grad_()
    with no_waits():
        metadata = None
        for _ in range(2):
            arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots) if metadata is None else metadata)
            out = LocalExperts(grouped, lambda: [experts])(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
            dispatcher.combine(out, arrived).float().square().sum().backward()
            metadata = arrived.metadata


def waits(rank: int) -> list[str]:
    found = []
    for kind in (OneRank, AllToAll):
        try:
            forward_and_backward(kind(DispatchContext.of(dist.group.WORLD, SLOTS)))
            found.append("")
        except HostWaitsError as error:
            found.append(str(error))
    return found


def test_the_host_never_waits_and_did_so_in_the_exchange() -> None:
    ((alone, exchange),) = run_ranks(1, waits)
    assert alone == ""
    assert "cpu" in exchange or "numpy" in exchange
