"""DeepEP between nodes, in its double: four ranks as two nodes of two. The real one's nodes have eight.

What is special there: tokens of nodes are counted, handles look otherwise, sums run over a node first, in bfloat16, and
rows to be summed are multiples of 512 bytes.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import deepep_double
import pytest
import torch
import torch.distributed as dist
from dispatch_contract import BATCHES, SLOTS, Batch, assert_as_reference, assert_rows_in_order, there_and_back
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training
from support.shuffle import wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.config import ConfigError, DispatchConfig
from eplb_runtime.distributed.transports import TRANSPORTS, deepep_package
from eplb_runtime.distributed.transports.deepep import DeepEP
from eplb_runtime.moe.dispatch import choosing, float8
from eplb_runtime.moe.dispatch.all_to_all import AllToAll
from eplb_runtime.moe.dispatch.base import DispatchContext
from eplb_runtime.moe.dispatch.deepep import DeepEPByRank, DeepEPDispatcher
from eplb_runtime.moe.dispatch.deepep_buffer import DeepEPBuffer

pytestmark = pytest.mark.long

ORDERS = {"logical": DeepEPDispatcher, "by_rank": DeepEPByRank}
CASES = {name: batch for name, batch in BATCHES.items() if len(batch.tokens) == 4} | {
    "bfloat16": Batch((5, 4, 0, 3), dtype=torch.bfloat16, weights_dtype=torch.float32, top_k=4),
    "none on a node": Batch((5, 4, 0, 0), dtype=torch.bfloat16, weights_dtype=torch.float32, top_k=3),
}


def cases_of(order: str) -> dict[str, Batch]:
    if order == "logical":
        return CASES
    return {name: replace(batch, dtype=torch.bfloat16, weights_dtype=torch.float32) for name, batch in CASES.items()}


def nodes_of_two() -> None:
    deepep_package.imported = deepep_double.imported
    deepep_package.RANKS_OF_A_NODE = deepep_double.NODE = 2


def over(order: str, in_float8: bool = False) -> DeepEPDispatcher:
    config = DispatchConfig("deepep", combine_order=order, dtype="float8" if in_float8 else "model")
    return ORDERS[order](DispatchContext.of(dist.group.WORLD, SLOTS), config)


def without_metadata(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "metadata"}


def all_of_it(rank: int) -> dict[Any, Any]:
    nodes_of_two()
    found: dict[Any, Any] = {}
    for order in ORDERS:
        for name, batch in cases_of(order).items():
            first = there_and_back(over(order), batch, rank)
            again = there_and_back(over(order), batch, rank, metadata=first["metadata"])
            found[order, name] = without_metadata(first)
            found[order, name, "again"] = without_metadata(again)
            if order == "logical":
                found[name, "all_to_all"] = without_metadata(
                    there_and_back(AllToAll(DispatchContext.of(dist.group.WORLD, SLOTS)), batch, rank)
                )
        found[order, "float8"] = rounded(rank, order)
    found["buffers"] = len(deepep_double._between_nodes)
    with pytest.raises(ConfigError) as refused:
        choice = DeepEPBuffer(dist.group.WORLD, SLOTS, 22)
        choice.layout(torch.zeros(1, 1, dtype=torch.int64))
    found["refused"] = str(refused.value)
    return found


def rounded(rank: int, order: str) -> bool:
    """Whether hidden states that travel in float8 end as those that were rounded before."""
    generator = torch.Generator().manual_seed(rank)
    hidden, weights = torch.randn(4, 128, generator=generator).bfloat16(), torch.rand(4, 3, generator=generator)
    slots, outs = torch.tensor([[0, 7, 3]] * 4) % (4 * SLOTS), []
    before = float8.unpack(float8.pack(hidden, None), torch.arange(4))
    for in_float8, given in ((True, hidden), (False, before)):
        dispatcher = over(order, in_float8)
        arrived = dispatcher.dispatch(given, weights, dispatcher.plan(slots))
        outs.append(dispatcher.combine(arrived.rows_MD * 2, arrived))
    return torch.equal(*outs)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_ranks(4, all_of_it)


@pytest.mark.parametrize(("order", "case"), [(order, case) for order in ORDERS for case in cases_of(order)])
def test_values_gradients_and_the_order_of_rows(ranks: list, order: str, case: str) -> None:
    batch = cases_of(order)[case]
    results = [dict(result[order, case]) for result in ranks]
    for result in results:
        result["out"] = result["out"].to(batch.weights_dtype or batch.dtype)
    assert_as_reference(results, batch, **({"rtol": 0.1, "atol": 0.5} if batch.dtype == torch.bfloat16 else {}))
    if case in ("uneven", "bfloat16"):
        assert_rows_in_order([result[order, case] for result in ranks], batch)
    for result in ranks:
        for name, value in result[order, case].items():
            assert same(value, result[order, case, "again"][name]), name


def same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.parametrize("case", CASES)
def test_in_logical_order_every_bit_is_that_of_all_to_all(ranks: list, case: str) -> None:
    for result in ranks:
        for name, value in result[case, "all_to_all"].items():
            assert same(result["logical", case][name], value), name


@pytest.mark.parametrize("order", ORDERS)
def test_in_float8_too(ranks: list, order: str) -> None:
    assert all(result[order, "float8"] for result in ranks)


def test_there_is_one_buffer_and_a_second_one_is_refused(ranks: list) -> None:
    for result in ranks:
        assert result["buffers"] == 1
        assert "by NVSHMEM, which this process has started between ranks [0, 1, 2, 3]" in result["refused"]


def train(rank: int, **settings: Any) -> dict[str, torch.Tensor]:
    model = make_model("olmoe", experts=8, layers=2).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=1, lag=0, gate="always", **settings, moving=True)
    wait_until_compiled(balancer)
    model.train()
    found: dict[str, torch.Tensor] = {}
    for step in range(2):
        ids = batch_of(rank, step)[:, : None if rank else 5] % 12
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    found["moved"] = torch.tensor(balancer.placement.epoch)
    found.update(eplb.logical_state_dict(model, optimizer))
    balancer.close()
    return found


JOBS: dict[str, dict[str, Any]] = {
    "tokens": {"dispatch": "deepep"},
    "tokens and experts": {"dispatch": "deepep", "transport": "deepep"},
    "copies": {"dispatch": "deepep", "replica_slots": 1, "split_least_tokens": 0},
}


def trained(rank: int) -> dict[str, list[str]]:
    """What differs from the same job over torch.distributed."""
    nodes_of_two()
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    deepep_package.why_not = lambda device=None: ""
    choosing.lacks = lambda *_: ""
    TRANSPORTS["deepep"] = partial(DeepEP, package=deepep_double)
    found = {}
    for job, settings in JOBS.items():
        plain = {name: value for name, value in settings.items() if name not in ("dispatch", "transport")}
        expected, seen = train(rank, **plain), train(rank, **settings)
        assert expected.keys() == seen.keys() and int(seen["moved"]) == 2
        found[job] = [name for name in seen if not torch.equal(expected[name], seen[name])]
    return found


@pytest.fixture(scope="module")
def jobs() -> list[dict[str, list[str]]]:
    return run_ranks(4, trained)


@pytest.mark.parametrize("job", JOBS)
def test_a_training_has_the_bits_of_one_over_torch_distributed(jobs: list, job: str) -> None:
    assert [result[job] for result in jobs] == [[]] * 4
