"""Two nodes that ask for different experts: a job counts what comes from where, and experts come near."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from moe_models import VOCABULARY, make_model
from ranks import run_ranks
from support import training
from support.shuffle import plan_by, wait_until_compiled

import eplb_runtime as eplb
from eplb_runtime.events import RebalancePlanned

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
