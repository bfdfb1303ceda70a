"""DeepEP itself between two ranks, beside the same dispatch over all-to-all. Function, not speed: one GPU is enough."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist
from device import DEVICE, on_gpu, ranks_on_gpu
from support.transport_contract import random_bytes, soon

from eplb_runtime.config import BalancerConfig, DispatchConfig
from eplb_runtime.distributed.transports import TRANSPORTS, deepep
from eplb_runtime.distributed.transports.base import Message
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPDispatcher, pack, unpack
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.topology import Topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(bool(deepep.why_not()), reason=deepep.why_not()),
]
RANKS, SLOTS, WIDTH, TOP_K = 2, 4, 1024, 4
ORDERS = "logical", "by_rank"


@pytest.fixture(autouse=True)
def with_deepep() -> None:
    if lacks := choosing.why_not_deepep(BalancerConfig(), Topology(RANKS, RANKS), SLOTS, DEVICE):
        pytest.skip(lacks)


def over(order: str, dtype: Literal["float8", "model"] = "model", **settings: int) -> DeepEPDispatcher:
    config = DispatchConfig("deepep", combine_order=order, dtype=dtype, **settings)
    return DeepEPDispatcher(DispatchContext.of(dist.group.WORLD, SLOTS), config)


def step(
    order: str | None, rank: int, device: torch.device, tokens: int, dtype: torch.dtype, in_float8: str = ""
) -> list[torch.Tensor]:
    """Output and gradients of a forward, and of one that goes the same way again; None: over all-to-all.

    Args:
        in_float8: hidden states are rounded ``"before"`` they are dispatched, or ``"on the way"``.
    """
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, WIDTH, generator=generator).to(device, dtype)
    if in_float8 == "before":
        rows = pack(hidden, 1, in_float8=True)
        hidden = unpack(rows, torch.arange(tokens, device=device), WIDTH)
    hidden.requires_grad_()
    slots = torch.stack([torch.randperm(RANKS * SLOTS, generator=generator)[:TOP_K] for _ in range(tokens)])
    weights = torch.rand(tokens, TOP_K, generator=generator).to(device).requires_grad_()
    experts = torch.randn(SLOTS, WIDTH, generator=torch.Generator().manual_seed(100 + rank)).to(device, dtype)
    dispatcher = AllToAll(DispatchContext.of(dist.group.WORLD, SLOTS))
    if order is not None:
        dispatcher = over(order, "float8" if in_float8 == "on the way" else "model")

    def compute(rows: torch.Tensor, counts: SlotCounts, parameters: list[torch.Tensor]) -> torch.Tensor:
        return rows * parameters[0][counts.slot_of_rows(len(rows))]

    found, metadata = [], None
    for _ in range(2):
        arrived = dispatcher.dispatch(hidden, weights, metadata or dispatcher.plan(slots.to(device)))
        out = LocalExperts(compute, lambda: [experts])(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
        out = dispatcher.combine(out, arrived)
        grads = torch.autograd.grad(out.float().square().sum(), [hidden, weights])
        found += [one.detach().cpu() for one in (out, *grads)]
        metadata = arrived.metadata
    return found


def both(rank: int, order: str, tokens: tuple[int, ...], dtype: torch.dtype) -> tuple[list, list]:
    job = rank, on_gpu(rank), tokens[rank], dtype
    return step(None, *job), step(order, *job)


@pytest.mark.parametrize("tokens", [(512, 300), (64, 1)], ids=str)
def test_in_logical_order_every_bit_is_that_of_all_to_all(tokens: tuple[int, ...]) -> None:
    job = ("logical", tokens, torch.bfloat16)
    for expected, found in ranks_on_gpu(RANKS, both, *job):
        assert all(map(torch.equal, expected, found))


def in_float8(rank: int, order: str) -> tuple[list, list]:
    job = order, rank, on_gpu(rank), 300, torch.bfloat16
    return step(*job, "before"), step(*job, "on the way")


@pytest.mark.parametrize("order", ORDERS)
def test_float8_on_the_way_is_as_if_hidden_states_had_been_rounded_before(order: str) -> None:
    for expected, found in ranks_on_gpu(RANKS, in_float8, order):
        assert all(map(torch.equal, expected, found))


def small_batches(rank: int, in_float8: bool) -> list[tuple[list, list]]:
    """Rows and results of batches without gradients, by the low-latency kernels and by the others."""
    device = on_gpu(rank)
    dtype: Literal["float8", "model"] = "float8" if in_float8 else "model"
    slow, fast = over("by_rank", dtype), over("by_rank", dtype, low_latency_tokens=64)
    found = []
    for tokens in ((64, 20), (0, 3)):
        generator = torch.Generator().manual_seed(rank)
        hidden = torch.randn(tokens[rank], 2048, generator=generator).to(device, torch.bfloat16)
        slots = torch.rand(tokens[rank], RANKS * SLOTS, generator=generator).argsort(dim=1)[:, :TOP_K].to(device)
        weights = torch.rand(tokens[rank], TOP_K, generator=generator).to(device)
        both = []
        with torch.no_grad():
            for dispatcher in (slow, fast.carrier(hidden, weights)):
                arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots))
                out = dispatcher.combine(arrived.rows_MD, arrived)
                both.append([arrived.rows_MD.cpu(), out.cpu()])
        found.append((both[0], both[1]))
    return found


@pytest.mark.parametrize("in_float8", [False, True])
def test_small_batches_by_the_low_latency_kernels_are_the_same_to_rounding(in_float8: bool) -> None:
    if why := deepep.why_not(low_latency=True):
        pytest.skip(why)  # the kernels would trap, which ends the CUDA context
    for of_rank in ranks_on_gpu(RANKS, small_batches, in_float8):
        for (rows, out), (fast_rows, fast_out) in of_rank:
            torch.testing.assert_close(rows.float(), fast_rows.float(), rtol=0.07 if in_float8 else 0, atol=0)
            torch.testing.assert_close(out.float(), fast_out.float(), rtol=0.05, atol=0.1)


# -- experts by the same buffer ----------------------------------------------------------------------------------------


def experts_between_tokens(rank: int) -> list[bool]:
    """Messages of several sizes, some of more than one call, between tokens by the same buffer."""
    device = on_gpu(rank)
    group = dist.new_group([0, 1], backend="nccl")
    transport = TRANSPORTS["deepep"](group, "nccl", device, 60.0)
    transport.warm_up(soon())
    dispatcher = over("logical")
    hidden = torch.randn(256, WIDTH, device=device, dtype=torch.bfloat16)
    slots, weights = torch.arange(256, device=device).remainder(RANKS * SLOTS).unsqueeze(1), hidden.new_ones(256, 1)
    right = []
    for size in (1, 4097, 100 << 20):
        payload, into = random_bytes(rank, size, device), transport.empty(size)
        pending = transport.post([Message(1 - rank, payload)], [Message(1 - rank, into)])
        pending.wait(soon())
        arrived = [dispatcher.dispatch(hidden, weights, dispatcher.plan(slots)) for _ in range(5)]
        back = [dispatcher.combine(one.rows_MD, one) for one in arrived]
        right += [torch.equal(into, random_bytes(1 - rank, size, device)), *(torch.equal(hidden, one) for one in back)]
    transport.close()
    return right


def test_experts_go_by_the_buffer_of_tokens() -> None:
    for right in ranks_on_gpu(RANKS, experts_between_tokens):
        assert all(right)
