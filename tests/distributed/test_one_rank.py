"""An EP group of one rank: the bits of the exchange that there was, and the host never waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import SLOTS, Batch, there_and_back
from host_waits import ON_CPUS_ALONE, HostWaitsError, no_waits
from moe_models import batch_of, make_model
from ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.moe.dispatch.all_to_all import AllToAll, OneRank
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.layer import ExpertParallelLayer
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


def refused(rank: int) -> str:
    with pytest.raises(ValueError, match="one rank") as found:
        OneRank(DispatchContext.of(dist.group.WORLD, SLOTS))
    return str(found.value)


def test_more_ranks_are_refused() -> None:
    assert all("has 2" in said for said in run_ranks(2, refused))


# -- attached models ---------------------------------------------------------------------------------------------------

JOBS = {
    "plain": {},
    "biases": {"family": "gpt_oss"},
    "checkpointing": {"checkpointing": "each layer"},
    "checkpointing, reentrant": {"checkpointing": "each layer, reentrant"},
    "padding": {"padding": True},
    "compiled": {"compiled": True},
    "experts in a loop": {"implementation": "eager"},
}
WAITING = ("experts in a loop",)
"""Those whose own experts want numbers on the host."""
FIRST_ROWS = (*ON_CPUS_ALONE, "_sorting_changes_nothing")


def watch_layers() -> None:
    """From here on, no layer's forward may wait."""
    forward = ExpertParallelLayer._forward

    def watched(self: ExpertParallelLayer, *args: object) -> torch.Tensor:
        with no_waits(FIRST_ROWS):
            return forward(self, *args)

    ExpertParallelLayer._forward = watched


def move(balancer: eplb.Balancer, by: int) -> None:
    """Every expert ``by`` slots further."""
    old = balancer.placement
    map_ = np.roll(old.physical_to_logical, by, axis=1)
    balancer._rebalancer._migrate(eplb.Placement(map_, old.num_experts, 1, map_.argsort(axis=1), old.epoch + 1))
    assert balancer.placement.epoch == old.epoch + 1


def train(
    rank: int,
    kind: str,
    *,
    family: str = "olmoe",
    implementation: str = "grouped_mm",
    checkpointing: str = "",
    padding: bool = False,
    compiled: bool = False,
) -> dict:
    """Losses, outputs of evaluations and the state after steps with migrations.

    Args:
        kind: has ``"exchange"``: all goes by it, as it did; ``"watched"``: no layer and no backward pass may wait.
    """
    if "exchange" in kind:
        choosing.OneRank = AllToAll
    model = make_model(family, experts=8, layers=1)
    model.set_experts_implementation(implementation)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing.endswith("reentrant")})
        model.enable_input_require_grads()
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = eplb.attach(model, optimizer, config=eplb.BalancerConfig(policy="static", guard="off"))
    if "watched" in kind:
        watch_layers()
    backward = no_waits if "watched" in kind else nullcontext
    losses, outputs = [], []

    def evaluate(ids: torch.Tensor) -> None:
        model.eval()
        with torch.no_grad():
            outputs.append(model(input_ids=ids, use_cache=False).logits)
        model.train()

    model.train()
    for step in range(2):
        ids = batch_of(rank, step)
        mask = (torch.arange(ids.shape[1]) < ids.shape[1] - 3).expand(ids.shape).long() if padding else None
        loss = model(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
        if step == 1:
            evaluate(ids)
        with backward():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        move(balancer, 1 + 2 * step)
        evaluate(ids[:1, :5])
    load = balancer._runtime.counter.peek().sum(0)
    state = eplb.logical_state_dict(model, optimizer)
    balancer.close()
    return {"losses": losses, "outputs": outputs, "state": dict(state), "load": load}


def jobs(rank: int, kind: str) -> dict[str, dict]:
    """One after another: what is patched stays patched."""
    asked = {"exchange": JOBS, "watched": set(JOBS) - set(WAITING), "free": WAITING}[kind]
    return {name: train(rank, kind, **JOBS[name]) for name in asked}


@cache
def trained(kind: str) -> dict[str, dict]:
    return run_ranks(1, jobs, kind)[0]


def same(one: dict, other: dict) -> bool:
    return (
        one["losses"] == other["losses"]
        and all(map(torch.equal, one["outputs"], other["outputs"]))
        and torch.equal(one["load"], other["load"])
        and one["state"].keys() == other["state"].keys()
        and all(torch.equal(one["state"][name], other["state"][name]) for name in one["state"])
    )


@pytest.mark.parametrize("job", [name for name in JOBS if name not in WAITING])
def test_an_attached_model_never_waits_and_has_the_bits_of_the_exchange(job: str) -> None:
    assert same(trained("watched")[job], trained("exchange")[job])


@pytest.mark.parametrize("job", WAITING)
def test_experts_that_want_numbers_get_them(job: str) -> None:
    assert same(trained("free")[job], trained("exchange")[job])
