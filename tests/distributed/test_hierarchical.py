"""Dispatch that crosses to a node once: in logical order the bits of the plain all-to-all. One job of four ranks, taken
for two nodes of two. What every dispatcher promises is in `test_dispatch`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from dispatch_contract import BATCHES, SLOTS, Batch, there_and_back
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from torch.utils._python_dispatch import TorchDispatchMode

import eplb_runtime as eplb
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.hierarchical import Hierarchical

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
