"""What a job says of the replicas that its rebalances placed is what its placements say."""

from __future__ import annotations

from pathlib import Path

import torch
from moe_models import batch_of, make_model
from ranks import run_ranks
from support import training

from eplb_runtime.events import RebalanceCommitted
from eplb_runtime.observe.run_folder import state_of_run
from eplb_runtime.observe.summary import summary_of
from eplb_runtime.placement import EMPTY


def train(rank: int, run: str) -> dict[str, object]:
    """The placement after each step, and what was said of each rebalance."""
    model = make_model("olmoe", experts=8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    balancer = training.attach(model, optimizer, interval=3, gate="always", replica_slots=1, run=run)
    model.train()
    replicas = [balancer.placement.replicas_LRK]
    for step in range(10):
        training.step(model, optimizer, batch_of(rank, step))
        replicas.append(balancer.placement.replicas_LRK)
    table, committed = str(balancer), balancer.events.of_type(RebalanceCommitted)
    balancer.close()
    return {"replicas": replicas, "told": [event.placed_replicas for event in committed], "table": table} | {
        "lines": [event.brief() for event in committed]
    }


def test_replicas_that_rebalances_placed_are_counted_in_each_view(tmp_path: Path) -> None:
    for result in run_ranks(2, train, str(tmp_path / "run")):
        pairs = zip(result["replicas"], result["replicas"][1:], strict=False)
        placed = [int(((now != before) & (now != EMPTY)).sum()) for before, now in pairs if (now != before).any()]
        assert placed and result["told"] == placed
        assert f"{placed[0]} replica" in result["lines"][0] and "placed" in result["lines"][0]
        assert f"{sum(placed)} replicas placed" in result["table"]
    summary = summary_of(state_of_run(tmp_path / "run"))
    assert summary["placed_replicas"] == sum(placed)
