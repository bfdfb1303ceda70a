"""DeepEP with `most_tokens`, in its double: the bits of DeepEP without, and the host never waits for the device.

What nobody has written is not a number here: in the double's memory, and in what grouped products leave out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from importlib import util
from itertools import product
from typing import Any

import deepep_double
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import BATCHES, SLOTS, Batch, experts_here, there_and_back
from host_waits import ON_CPUS_ALONE, HostWaitsError, no_waits
from moe_models import batch_of, make_model
from ranks import run_ranks
from torch.nn import functional

import eplb_runtime as eplb
from eplb_runtime.config import ConfigError, DispatchConfig, config_from_settings
from eplb_runtime.distributed.step_tag import OutOfStepError
from eplb_runtime.distributed.transports import deepep_package
from eplb_runtime.moe.dispatch import choosing
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPByRank, DeepEPDispatcher
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.layer import ExpertParallelLayer
from eplb_runtime.moe.routing.splitter import OnDevice
from eplb_runtime.planner.shuffle import plan_shuffle

ORDERS = {"logical": DeepEPDispatcher, "by_rank": DeepEPByRank}
MODEL, IN_FLOAT8 = False, True
WAYS = list(product(ORDERS, (MODEL, IN_FLOAT8)))
NAMES = ("out", "hidden", "weights", "experts")
MOST = 11
DOUBLES = ("deepep_double", "triton.runtime.interpreter")


def cases() -> dict[str, Batch]:
    found = {name: batch for name, batch in BATCHES.items() if len(batch.tokens) > 1}
    return {
        name: replace(batch, dtype=torch.bfloat16, weights_dtype=torch.float32) for name, batch in found.items()
    } | {f"{name}, float64": found[name] for name in ("uneven", "many choices a token", "nothing at all")}


def over(group: dist.ProcessGroup, order: str, most_tokens: int, in_float8: bool = False) -> DeepEPDispatcher:
    deepep_package.imported = deepep_double.imported
    dtype = "float8" if in_float8 else "model"
    config = DispatchConfig("deepep", combine_order=order, dtype=dtype, most_tokens=most_tokens)
    return ORDERS[order](DispatchContext.of(group, SLOTS), config)


class _NotANumber(torch.autograd.Function):
    """Rows past the last slot's are not numbers, in what comes or in what goes back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, ends: torch.Tensor, forward: bool) -> torch.Tensor:
        ctx.ends, ctx.forward = ends, forward
        return _without_numbers(rows, ends) if forward else rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (grad if ctx.forward else _without_numbers(grad, ctx.ends)), None, None


def _without_numbers(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    past = torch.arange(len(rows)) >= ends[-1]
    return rows.masked_fill(past.unsqueeze(1), float("nan"))


class Grouped:
    """Grouped products that leave what is past the last slot as it is found."""

    def takes_spare_rows(self, rows: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
        return True

    def __call__(self, rows: torch.Tensor, counts: SlotCounts, parameters: Sequence[torch.Tensor]) -> torch.Tensor:
        ends = counts.offsets_S
        rows = _NotANumber.apply(rows, ends, False)
        out = torch.einsum("md,mde->me", rows, parameters[0][counts.slot_of_rows(len(rows))].detach())
        # The same numbers, whose gradient reaches parameters as a grouped product's does: from rows of slots alone.
        there = ~counts.is_spare(len(rows)).unsqueeze(1)
        given = torch.where(there, rows.detach(), 0)
        of_parameters = torch.einsum("md,mde->me", given, parameters[0][counts.slot_of_rows(len(rows))])
        out = out + torch.where(there, of_parameters - of_parameters.detach(), 0)
        return _NotANumber.apply(out, ends, True)


def stepped(dispatcher: DeepEPDispatcher, batch: Batch, rank: int, metadata: Any = None) -> dict[str, Any]:
    """As `there_and_back`, by `Grouped`, and nothing waits."""
    hidden, slots, weights = batch.of(rank)
    experts = experts_here(batch, rank)
    with no_waits((*ON_CPUS_ALONE, *DOUBLES)):
        arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots) if metadata is None else metadata)
        out = LocalExperts(Grouped(), lambda: [experts])(arrived.rows_MD, arrived.counts_S, arrived.weights_M)
        out = dispatcher.combine(out, arrived)
        if out.requires_grad:
            out.square().sum().backward()
    return {
        "out": out.detach(),
        "hidden": hidden.grad,
        "weights": weights.grad,
        "experts": experts.grad,
        "metadata": arrived.metadata,
    }


def equal(one: dict, other: dict) -> list[str]:
    """What differs."""
    return [
        name
        for name in NAMES
        if (one[name] is None) != (other[name] is None)
        or (one[name] is not None and not torch.equal(one[name], other[name]))
    ]


def compared(rank: int) -> dict[Any, Any]:
    """What differs from DeepEP without `most_tokens`; batches of two ranks run on two pairs."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = pairs[rank // 2], rank % 2
    found: dict[Any, Any] = {}
    for (order, in_float8), (name, batch) in product(WAYS, cases().items()):
        if in_float8 or (order == "by_rank" and batch.dtype != torch.bfloat16):
            continue
        group, mine = (dist.group.WORLD, rank) if len(batch.tokens) == 4 else (pair, place)
        plain, host_free = over(group, order, 0), over(group, order, MOST)
        expected = there_and_back(plain, batch, mine)
        exact = there_and_back(host_free, batch, mine)
        spare = stepped(host_free, batch, mine)
        again = stepped(host_free, batch, mine, spare["metadata"])
        reference = stepped(plain, batch, mine, expected["metadata"])
        found[order, name] = equal(expected, exact), equal(reference, spare), equal(reference, again)
        rows = [one["rows"] for one in (expected, exact)]
        found[order, name, "rows"] = rows[0] is rows[1] is None or all(map(torch.equal, *rows))
    for order in ORDERS:
        found[order, "float8"] = rounded(pair, place, order)
        found[order, "too many"] = refused(pair, place, order)
    return found


def rounded(group: dist.ProcessGroup, rank: int, order: str) -> bool:
    hidden, weights = torch.randn(4 + rank, 128).bfloat16(), torch.rand(4 + rank, 3)
    slots = torch.tensor([[0, 5, 3]]).expand(4 + rank, 3)
    outs = []
    for most in (0, MOST):
        dispatcher = over(group, order, most, in_float8=True)
        arrived = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots))
        outs.append(dispatcher.combine(arrived.rows_MD * 2, arrived))
    return torch.equal(*outs)


def refused(group: dist.ProcessGroup, rank: int, order: str) -> tuple[str, list[str]]:
    """What a batch that is too large is told, and what was sent of it."""
    dispatcher = over(group, order, MOST)
    deepep_double.CALLS.clear()
    hidden, weights = torch.randn(MOST + 1, 128).bfloat16(), torch.rand(MOST + 1, 2)
    with pytest.raises(ConfigError) as error:
        dispatcher.dispatch(hidden, weights, dispatcher.plan(torch.zeros(MOST + 1, 2, dtype=torch.int64)))
    return str(error.value), list(deepep_double.CALLS)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, compared)


ALL = [(order, name) for order, name in product(ORDERS, cases()) if order == "logical" or "float64" not in name]


@pytest.mark.parametrize(("order", "case"), ALL)
def test_every_bit_is_that_of_deepep_without_and_the_host_never_waits(ranks: list, order: str, case: str) -> None:
    for result in ranks[: len(cases()[case].tokens)]:
        assert result[order, case] == ([], [], []), "experts that want exact rows; grouped products; the same way again"
        assert result[order, case, "rows"]


@pytest.mark.parametrize("order", ORDERS)
def test_in_float8_too(ranks: list, order: str) -> None:
    assert all(result[order, "float8"] for result in ranks)


@pytest.mark.parametrize("order", ORDERS)
def test_a_batch_that_is_larger_than_promised_is_refused_before_anything_is_sent(ranks: list, order: str) -> None:
    for result in ranks:
        said, sent = result[order, "too many"]
        assert said.startswith("a batch of 12 tokens with most_tokens=11: give the largest batch") and sent == []


# -- attached models ---------------------------------------------------------------------------------------------------

JOBS: dict[str, dict[str, Any]] = {
    "olmoe": {},
    "by rank": {"combine_order": "by_rank"},
    "biases": {"family": "gpt_oss"},
    "float8": {"dispatch_dtype": "float8", "width": 128},
    "checkpointing": {"checkpointing": True},
    "experts in a loop": {"implementation": "eager"},
}
WAITING = ("experts in a loop",)
STEPS = 2
"""Experts move after each."""


def leave_no_numbers_behind() -> None:
    """From here on, grouped products give what is not a number past the last slot's rows, and as their gradient."""
    grouped_mm = functional.grouped_mm

    def poisoned(one: torch.Tensor, other: torch.Tensor, *, offs: torch.Tensor, **options: Any) -> torch.Tensor:
        if other.dim() == 2:
            return grouped_mm(one, other, offs=offs, **options)
        one = _NotANumber.apply(one, offs, False)
        return _NotANumber.apply(grouped_mm(one, other, offs=offs, **options), offs, True)

    functional.grouped_mm = poisoned


def watch_layers() -> None:
    """From here on, no layer's forward may wait."""
    forward = ExpertParallelLayer._forward

    def watched(self: ExpertParallelLayer, *args: Any) -> torch.Tensor:
        with no_waits((*ON_CPUS_ALONE, *DOUBLES, "_sorting_changes_nothing")):
            return forward(self, *args)

    ExpertParallelLayer._forward = watched


def train(
    rank: int,
    most_tokens: int,
    watched: bool,
    *,
    family: str = "olmoe",
    implementation: str = "grouped_mm",
    checkpointing: bool = False,
    width: int = 32,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    """State and losses after steps in which experts move, rank 1 with fewer tokens."""
    choosing.lacks = lambda *_: ""
    deepep_package.imported = deepep_double.imported
    leave_no_numbers_behind()
    model = make_model(family, experts=8, layers=2, width=width).bfloat16()
    model.set_experts_implementation(implementation)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = config_from_settings(
        {
            "interval": 1,
            "lag": 0,
            "gate": "always",
            "dispatch": "deepep",
            "most_tokens": most_tokens,
            "dense_gradients": "allreduce",
            "guard": "off",
            **settings,
        }
    )
    balancer = eplb.attach(model, optimizer, config=config)
    balancer._plan_with(plan_shuffle)
    balancer._wait_until_compiled()
    if watched:
        watch_layers()
    model.train()
    found: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        ids = batch_of(rank, step)[:, : None if rank == 0 else 5] % 12
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with no_waits((*ON_CPUS_ALONE, *DOUBLES)) if watched else nullcontext():
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
        model.eval()
        with torch.no_grad():
            found[f"evaluation {step}"] = model(input_ids=ids[:1], use_cache=False).logits
        model.train()
    assert balancer.placement.epoch == STEPS
    found.update(eplb.logical_state_dict(model, optimizer))
    balancer.close()
    return found


def both(rank: int, job: str) -> list[str]:
    """What differs between a job with `most_tokens` and one without."""
    tokens = batch_of(0, 0).numel()
    without = train(rank, 0, False, **JOBS[job])
    with_most = train(rank, tokens + 3, job not in WAITING, **JOBS[job])
    assert without.keys() == with_most.keys()
    return [name for name in without if not torch.equal(without[name], with_most[name])]


def jobs(rank: int) -> dict[str, list[str]]:
    forward, grouped_mm = ExpertParallelLayer._forward, functional.grouped_mm
    found = {}
    for job in JOBS:
        found[job] = both(rank, job)
        ExpertParallelLayer._forward, functional.grouped_mm = forward, grouped_mm
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, list[str]]]:
    return run_ranks(2, jobs)


@pytest.mark.parametrize("job", JOBS)
def test_an_attached_model_has_the_bits_of_deepep_without(trained: list, job: str) -> None:
    assert [result[job] for result in trained] == [[], []]


@pytest.mark.skipif(util.find_spec("triton") is None, reason="no triton: pip install triton")
def test_with_copies_the_device_splits() -> None:
    """The bits of a split on the host, which waits."""
    for of_rank in run_ranks(2, with_copies, TRITON_INTERPRET="1"):
        for different, split, waits in of_rank:
            assert different == []
            assert split > 0
            assert "the host would wait" in waits


def with_copies(rank: int) -> list[tuple[list[str], int, str]]:
    """Without and with activation checkpointing: what differs from a job without `most_tokens`; how often the device
    has split; and what is said where the host splits and must not."""
    forward, grouped_mm = ExpertParallelLayer._forward, functional.grouped_mm
    found = []
    for checkpointing in (False, True):
        found.append(one_with_copies(rank, checkpointing))
        ExpertParallelLayer._forward, functional.grouped_mm = forward, grouped_mm
    return found


def one_with_copies(rank: int, checkpointing: bool) -> tuple[list[str], int, str]:
    from eplb_runtime.hosts.attaching import attach as attaching
    from eplb_runtime.moe.kernel_selection import Kernels
    from eplb_runtime.moe.routing import kernels, sources_kernel

    splits = []

    def split(*args: Any, **options: Any) -> torch.Tensor:
        splits.append(args[2])
        return sources_kernel.sent_by_rank(*args, **options)

    by_kernels = {"count": kernels.count_by_blocks, "deal": kernels.deal_by_kernels}
    tokens = batch_of(0, 0).numel() + 3
    settings = {"replica_slots": 1, "split_least_tokens": 0, "checkpointing": checkpointing}
    forward, grouped_mm = ExpertParallelLayer._forward, functional.grouped_mm
    without = train(rank, 0, False, **settings)
    functional.grouped_mm = grouped_mm
    on_device = OnDevice(sources_kernel.layers_on_device, split)
    attaching.kernels_for = lambda *sizes: Kernels(**by_kernels, split=on_device)
    with_most = train(rank, tokens, True, kernels=True, **settings)
    ExpertParallelLayer._forward, functional.grouped_mm = forward, grouped_mm
    attaching.kernels_for = lambda *sizes: Kernels(**by_kernels)
    with pytest.raises(HostWaitsError) as waits:
        train(rank, tokens, True, kernels=True, **settings)
    assert without.keys() == with_most.keys()
    return [name for name in without if not torch.equal(without[name], with_most[name])], len(splits), str(waits.value)


def in_other_forwards(rank: int) -> str:
    choosing.lacks = lambda *_: ""
    deepep_package.imported = deepep_double.imported
    model = make_model("olmoe", experts=8, layers=2).bfloat16()
    config = eplb.BalancerConfig(dense_gradients="allreduce", dispatch=eplb.DispatchConfig("deepep", most_tokens=64))
    balancer = eplb.attach(model, torch.optim.AdamW(model.parameters()), config=config)
    model.train(rank == 0)
    with pytest.raises(OutOfStepError) as error:
        model(input_ids=batch_of(rank, 0), use_cache=False)
    balancer.close()
    return str(error.value)


def test_ranks_in_different_forwards_are_told_so() -> None:
    for said in run_ranks(2, in_other_forwards):
        assert "rank 1 in the forward of MoE layer 0 in evaluation" in said
