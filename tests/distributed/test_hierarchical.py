"""Dispatch that crosses to a node once: in logical order the bits of the plain all-to-all. One job of four ranks, taken
for two nodes of two. What every dispatcher promises is in `test_dispatch`."""

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.dispatch_contract import BATCHES, SLOTS, Batch, there_and_back
from support.host_waits import HostWaitsError, no_waits
from support.job import Job, Run
from support.moe_models import VOCABULARY
from support.ranks import run_ranks

import eplb_runtime as eplb
from eplb_runtime.events import RebalancePlanned
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.routing.slots import RowCounts

pytestmark = pytest.mark.long

GROUP_LIMITED = Batch((6, 3, 0, 5), slots=tuple(range(12)), top_k=8)
IN_BFLOAT16 = replace(GROUP_LIMITED, dtype=torch.bfloat16, weights_dtype=torch.float32)
COMPARED = {"many choices": GROUP_LIMITED, "bfloat16": IN_BFLOAT16, "two choices": BATCHES["uneven"]}
NODES = {"two nodes": 2, "four nodes": 1, "one node": 4}


def without_metadata(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "metadata"}


def all_of_it(rank: int) -> dict[Any, Any]:
    """Everything that is looked at, by name."""
    found: dict[Any, Any] = {}
    context = DispatchContext.of(dist.group.WORLD, SLOTS)
    plain = AllToAll(context)
    for name, batch in COMPARED.items():
        found["all_to_all", name] = without_metadata(there_and_back(plain, batch, rank))
        for nodes, on_node in NODES.items():
            found[nodes, name] = without_metadata(there_and_back(Hierarchical(context, on_node), batch, rank))
    found["losses"] = {name: losses(rank, settings) for name, settings in CONFIGS.items()}
    return found


CONFIGS: dict[str, dict[str, Any]] = {
    "all_to_all": {},
    "logical": {"dispatch": "hierarchical"},
    "by_rank": {"dispatch": "hierarchical", "combine_order": "by_rank"},
    "auto": {"dispatch": "auto", "combine_order": "by_rank"},
}


def losses(rank: int, settings: dict[str, Any]) -> list[float]:
    """Of an attached model with copies that repeats its forwards."""
    settings = {"replica_slots": 1, "interval": 100, "lag": 1, **settings}
    job = Run(rank, Job(layers=1, recompute="layers", planner=eplb.plan, settings=settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        job.attach()
    assert job.balancer.topology.ranks_per_node == 2
    return job.train(2).end().losses


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, all_of_it)


@pytest.mark.parametrize("case", COMPARED)
@pytest.mark.parametrize("nodes", NODES)
def test_in_logical_order_every_bit_is_that_of_all_to_all(ranks: list, nodes: str, case: str) -> None:
    for result in ranks:
        for name, value in result["all_to_all", case].items():
            mine = result[nodes, case][name]
            assert all(map(torch.equal, value, mine)) if isinstance(value, tuple) else torch.equal(value, mine), name


def test_an_attached_model_trains_to_the_same_bits_and_by_rank_to_rounding(ranks: list) -> None:
    for result in ranks:
        found = result["losses"]
        assert found["logical"] == found["auto"] == found["all_to_all"]
        assert found["by_rank"] == pytest.approx(found["all_to_all"], rel=1e-3)


# -- An EP group of one rank: the bits of the exchange that there was, and the host never waits for the device


THREE = (0, 1, 2)
ALONE = {
    "two choices a token": Batch((50,), slots=THREE, top_k=2),
    "a slot without rows": Batch((50,), slots=(0, 2)),
    "the same slot twice": Batch((50,), slots=(2, 2, 0), top_k=3),
    "nothing at all": Batch((0,), slots=THREE),
    "bfloat16, weights in float32": Batch(
        (50,), slots=THREE, top_k=3, dtype=torch.bfloat16, weights_dtype=torch.float32
    ),
    "router weights need no gradient": Batch((9,), slots=THREE, need=("hidden", "experts")),
    "only the router learns": Batch((9,), slots=THREE, need=("weights",)),
    "nothing learns": Batch((9,), slots=THREE, need=()),
}


def ways(dispatcher: Dispatcher, batch: Batch) -> list[dict]:
    """By itself, the same way again, and with counts that are known."""
    sent = np.bincount(batch.of(0)[1].reshape(-1).numpy(), minlength=SLOTS)
    first = there_and_back(dispatcher, batch, 0)
    again = there_and_back(dispatcher, batch, 0, metadata=first["metadata"])
    return [first, again, there_and_back(dispatcher, batch, 0, counts=RowCounts(sent, sent.reshape(1, SLOTS)))]


def differ(one: dict, other: dict) -> list[str]:
    """Names of what has not the same bits."""
    pairs = {name: (one[name], other[name]) for name in ("out", "hidden", "weights", "experts")}
    if one["rows"] is not None:
        pairs |= dict(zip(("rows", "their slots"), zip(one["rows"], other["rows"], strict=True), strict=True))
    return [name for name, (a, b) in pairs.items() if (a is None) != (b is None) or (a is not None and not a.equal(b))]


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


def on_one_rank(rank: int) -> None:
    context = DispatchContext.of(dist.group.WORLD, SLOTS)
    plain, alone = Hierarchical(context, 1), AllToAll(context)
    for name, batch in ALONE.items():
        expected = there_and_back(plain, batch, 0)
        assert [differ(expected, one) for one in ways(alone, batch)] == [[]] * 3, name
    forward_and_backward(alone)
    with pytest.raises(HostWaitsError, match=r"cpu|numpy"):  # the control
        forward_and_backward(plain)


def test_one_rank_alone_has_every_bit_of_the_exchange_and_its_host_never_waits() -> None:
    run_ranks(1, on_one_rank)


# -- Two nodes that ask for different experts: a job counts what comes from where, and experts come near


EXPERTS, LAYERS, INTERVAL, WIDTH, RANKS = 8, 2, 4, 32, 2


def on_nodes_of(rank: int, ranks_per_node: int) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    asked = []

    def planner(load: np.ndarray, *arguments: Any, **options: Any) -> eplb.Plan:
        asked.append((options["sources"], options["cost"].crossing_seconds, load.sum(axis=2).mean()))
        return eplb.plan(load, *arguments, **options)

    def own_words(rank: int, step: int) -> torch.Tensor:
        first, generator = 1 + (VOCABULARY // 2 - 1) * rank, torch.Generator().manual_seed(100 * step + rank)
        return torch.randint(first, first + 8, (2, 12), generator=generator)

    sgd, settings = partial(torch.optim.SGD, lr=0.0), {"interval": INTERVAL, "lag": 1}
    job = Run(rank, Job(optimizer=sgd, planner=planner, settings=settings, batches=own_words)).attach()
    balancer = job.balancer
    # Between the nodes as slow as makes a token that crosses as dear as a step.
    decisions = balancer.rebalancer.decisions
    decisions._topology = replace(decisions._topology, inter_node_bandwidth=1e4)
    counted = np.zeros((LAYERS, EXPERTS))
    for step in range(2 * INTERVAL):
        job.backward(job.forward())
        if step < INTERVAL:
            counted += balancer.runtime.counter.counts.numpy()
        job.update()
    reasons = [event.reason for event in balancer.events.of_type(RebalancePlanned)]
    balancer.close()
    return {"counted": counted, "reasons": reasons, "asked": asked, "homes": balancer.placement.home_rank}


def on_nodes(rank: int) -> list[dict[str, Any]]:
    return [on_nodes_of(rank, 1), on_nodes_of(rank, RANKS)]


def test_experts_come_near_the_node_that_asks_for_them() -> None:
    results = run_ranks(RANKS, on_nodes)
    two_nodes, one_node = results[0]
    sources, seconds, bucket = two_nodes["asked"][0]
    counted_NLE = np.array([apart["counted"] for apart, _ in results])
    assert np.array_equal(sources, counted_NLE), "what each node's ranks counted"
    token_bytes = 4 * WIDTH * 4
    assert np.isclose(seconds, LAYERS * bucket / RANKS * token_bytes / 1e4), "float32 vectors, there and back, twice"
    assert "tokens that cross nodes" in two_nodes["reasons"][0]
    away_NLE = np.stack([two_nodes["homes"] != node for node in range(2)])
    assert (counted_NLE * away_NLE).sum() < 0.35 * counted_NLE.sum(), "half of them, by homes that know nothing of it"
    assert one_node["asked"][0][:2] == (None, 0.0), "one node counts nothing of the kind"
