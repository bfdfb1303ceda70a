"""Dispatch that crosses to a node once: in logical order the bits of the plain all-to-all. One job of four ranks, taken
for two nodes of two. What every dispatcher promises is in `test_dispatch`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import BATCHES, SLOTS, Batch, there_and_back
from host_waits import HostWaitsError, no_waits
from moe_models import VOCABULARY, batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, wait_until_compiled
from torch.utils._python_dispatch import TorchDispatchMode

import eplb_runtime as eplb
from eplb_runtime.events import RebalancePlanned
from eplb_runtime.moe.dispatch.all_to_all import AllToAll, OneRank
from eplb_runtime.moe.dispatch.base import DispatchContext, Dispatcher
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical
from eplb_runtime.moe.experts.compute import LocalExperts, SlotCounts
from eplb_runtime.moe.routing.splitter import RowCounts

ORDERS: tuple[Literal["logical", "by_rank"], ...] = "logical", "by_rank"
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
    for order in ORDERS:
        found[order, "asked for"] = collectives_of(Hierarchical(context, 2, order), rank)
    plain = AllToAll(context)
    for name, batch in COMPARED.items():
        found["all_to_all", name] = without_metadata(there_and_back(plain, batch, rank))
        for nodes, on_node in NODES.items():
            found[nodes, name] = without_metadata(there_and_back(Hierarchical(context, on_node), batch, rank))
    found["asked for"] = collectives_of(plain, rank)
    found["losses"] = {name: losses(rank, config) for name, config in CONFIGS.items()}
    return found


class Syncs(TorchDispatchMode):
    """Counts what would wait for a device: values that are asked for on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return function(*args, **(kwargs or {}))


def collectives_of(dispatcher: AllToAll, rank: int) -> dict[str, int]:
    """Host syncs of a forward and the collectives of one whose way is known."""
    hidden, slots, weights = GROUP_LIMITED.of(rank)
    read, call, called = torch.Tensor.cpu, dist.all_to_all_single, {"numbers read": 0, "collectives": 0}

    def reads(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        called["numbers read"] += 1
        return read(tensor, *args, **options)

    def calls(*args: Any, **options: Any) -> Any:
        called["collectives"] += 1
        return call(*args, **options)

    with pytest.MonkeyPatch.context() as patch, Syncs() as syncs:
        patch.setattr(torch.Tensor, "cpu", reads)
        metadata = dispatcher.dispatch(hidden, weights, dispatcher.plan(slots)).metadata
        patch.setattr(dist, "all_to_all_single", calls)
        arrived = dispatcher.dispatch(hidden, weights, metadata)
        dispatcher.combine(arrived.rows_MD, arrived)
    return {**called, "syncs": syncs.count}


CONFIGS = {
    "all_to_all": eplb.BalancerConfig(dense_gradients="allreduce", replica_slots=1),
    "logical": eplb.BalancerConfig(dense_gradients="allreduce", replica_slots=1, dispatch="hierarchical"),
    "by_rank": eplb.BalancerConfig(
        dense_gradients="allreduce",
        replica_slots=1,
        dispatch=eplb.DispatchConfig("hierarchical", combine_order="by_rank"),
    ),
}


def losses(rank: int, config: eplb.BalancerConfig) -> list[float]:
    """Of an attached model with copies that repeats its forwards."""
    model = make_model("olmoe", experts=8, layers=1, top_k=2)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        balancer = eplb.attach(model, optimizer, config=config)
    assert balancer.topology.ranks_per_node == 2
    model.train()
    found = [training.step(model, optimizer, batch_of(rank, step)) for step in range(2)]
    balancer.close()
    return found


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


def test_a_forward_reads_numbers_once_as_all_to_all_does(ranks: list) -> None:
    """And a way that is known takes two exchanges there; back two by rank, else one."""
    for result in ranks:
        assert result["asked for"] == {"numbers read": 1, "collectives": 3, "syncs": 0}
        assert result["logical", "asked for"] == {"numbers read": 1, "collectives": 4, "syncs": 0}
        assert result["by_rank", "asked for"] == {"numbers read": 1, "collectives": 5, "syncs": 0}


def test_an_attached_model_trains_to_the_same_bits_and_by_rank_to_rounding(ranks: list) -> None:
    for result in ranks:
        found = result["losses"]
        assert found["logical"] == found["all_to_all"]
        assert found["by_rank"] == pytest.approx(found["all_to_all"], rel=1e-3)


# -- An EP group of one rank: the bits of the exchange that there was, and the host never waits for the device


THREE = (0, 1, 2)
ALONE = {
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
    for name, batch in ALONE.items():
        expected = there_and_back(plain, batch, 0)
        found[name] = [equal(expected, one) for one in ways(alone, batch)]
    return found


@cache
def comparison() -> dict[str, list[bool]]:
    return run_ranks(1, compared)[0]


@pytest.mark.parametrize("name", ALONE)
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


# -- Two nodes that ask for different experts: a job counts what comes from where, and experts come near


EXPERTS, LAYERS, INTERVAL, WIDTH, TOP_K = 8, 2, 4, 32, 2


def train(rank: int, ranks_per_node: int, told: bool) -> dict[str, Any]:
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_per_node)
    model = make_model("olmoe", experts=EXPERTS, layers=LAYERS, width=WIDTH, top_k=TOP_K)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    balancer = training.attach(model, optimizer, interval=INTERVAL, gate="always")
    wait_until_compiled(balancer)
    decisions, asked = balancer.rebalancer.decisions, []
    # Between the nodes as slow as makes a token that crosses as dear as a step.
    decisions._topology = replace(decisions._topology, inter_node_bandwidth=1e4)

    def planner(load: np.ndarray, *arguments: Any, **options: Any) -> eplb.Plan:
        made = eplb.plan(load, *arguments, **options if told else {**options, "sources": None})
        tokens, seconds = load.sum(axis=2).mean(), options["cost"].crossing_seconds
        asked.append((options["sources"], seconds, tokens))
        return made

    plan_by(balancer, planner)
    model.train()
    counted = np.zeros((LAYERS, EXPERTS))
    first = 1 + (VOCABULARY // 2 - 1) * (rank // 2)  # each half of the ranks has words of its own
    for step in range(2 * INTERVAL):
        generator = torch.Generator().manual_seed(100 * step + rank)
        ids = torch.randint(first, first + 8, (2, 12), generator=generator)
        model(input_ids=ids, labels=ids).loss.backward()
        if step < INTERVAL:
            counted += balancer.runtime.counter.counts.numpy()
        optimizer.step()
        optimizer.zero_grad()
    events = balancer.events.of_type(RebalancePlanned)
    result = {"counted": counted.tolist(), "reasons": [event.reason for event in events], "asked": []}
    result["asked"] = [(None if s is None else s.tolist(), *others) for s, *others in asked]
    result["homes"] = balancer.placement.home_rank.tolist()
    balancer.close()
    dist.barrier()
    return result


def crossing(results: list[dict[str, Any]]) -> float:
    """The share of tokens that are computed on another node of two ranks than they come from."""
    counted_NLE = np.array([result["counted"] for result in results]).reshape(2, 2, LAYERS, EXPERTS).sum(axis=1)
    node_LE = np.array(results[0]["homes"]) // 2
    away_NLE = np.stack([node_LE != node for node in range(2)])
    return float((counted_NLE * away_NLE).sum() / counted_NLE.sum())


def test_experts_come_near_the_node_that_asks_for_them() -> None:
    told, untold = run_ranks(4, train, 2, True), run_ranks(4, train, 2, False)
    sources, seconds, bucket = told[0]["asked"][0]
    by_node = np.array([result["counted"] for result in told]).reshape(2, 2, LAYERS, EXPERTS).sum(axis=1)
    assert np.array_equal(sources, by_node), "what each node's ranks counted"
    token_bytes = 4 * WIDTH * 4
    assert np.isclose(seconds, LAYERS * bucket / 4 * token_bytes / 1e4), "float32 vectors, there and back, twice"
    assert "tokens that cross nodes" in told[0]["reasons"][0]
    assert crossing(told) < 0.35 < 0.45 < crossing(untold), "control: a plan that does not know it"
    assert all(result["homes"] == told[0]["homes"] for result in told)


def test_one_node_counts_nothing_of_the_kind() -> None:
    sources, seconds, *_ = run_ranks(2, train, 2, True)[0]["asked"][0]
    assert sources is None and seconds == 0.0
