"""Models cut into pipeline stages: one job, one plan for all stages. By torch's own schedules: `test_pipelining`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pipeline_models import EXPERTS, HIDDEN, TOP_K, make_stages, micro_batch
from ranks import run_ranks
from support import training

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.events import RebalanceAborted

TOKENS = 24


def one_stage_alone(rank: int) -> list:
    """A plan that changes the layers of one stage only, with replica slots: the others have nothing to do."""
    stage = make_stages((2, 1))[rank // 2]
    ranks = Ranks(ep=(0, 1) if rank < 2 else (2, 3), stages=(rank // 2,))
    balancer = training.attach(
        stage, torch.optim.SGD(stage.parameters(), lr=0.1), ranks=ranks, replica_slots=1, policy="static"
    )
    before = balancer.placement
    map_, home = before.physical_to_logical.copy(), before.home.copy()
    map_[0, [0, -2]], home[0, [0, EXPERTS - 1]] = map_[0, [-2, 0]], home[0, [EXPERTS - 1, 0]]
    balancer.rebalancer._migrate(eplb.Placement(map_, EXPERTS, 2, home, before.epoch + 1))
    aborted = [event.cause for event in balancer.events.of_type(RebalanceAborted)]
    epoch = balancer.placement.epoch
    balancer.close()
    return [epoch, aborted]


def test_a_plan_may_change_one_stage_alone() -> None:
    assert run_ranks(4, one_stage_alone) == [[1, []]] * 4


def load_of_stages(rank: int) -> list:
    """Two stages of one layer on one EP rank each: what was counted, as every rank learns it."""
    stage = make_stages((1, 1))[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.0)
    balancer = training.attach([stage], [optimizer], ranks=Ranks(ep=(rank,), stages=(rank,)), interval=2, lag=1)
    totals: list = []
    decisions = balancer.rebalancer.decisions
    plan = decisions.plan
    decisions.plan = lambda measurement, *more: totals.append(np.stack(decisions.history)) or plan(measurement, *more)
    stage.train()
    for step in range(3):
        ids, _ = micro_batch(rank, step, 0, TOKENS)
        incoming = ids if rank == 0 else torch.ones(TOKENS, HIDDEN, dtype=torch.float64)
        stage(incoming).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    balancer.close()
    return [total.tolist() for total in totals]


def test_one_sum_holds_the_load_of_every_stage() -> None:
    planner, other = run_ranks(2, load_of_stages)
    assert other == []  # rank 0 of the job plans for all
    (load,) = planner
    per_layer = [[sum(layer) for layer in window] for window in load]
    assert per_layer == [[TOKENS * TOP_K] * 2] * 2


def attach_wrongly(rank: int) -> dict[str, str]:
    said = {}

    def refused(case: str, ranks: Ranks, models: int = 1) -> None:
        stages = make_stages((1, 1, 1))
        before = {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}
        with pytest.raises(ValueError) as caught:
            eplb.attach(stages[:models], None, ranks=ranks)
        said[case] = str(caught.value)
        assert before == {name: p.data_ptr() for stage in stages for name, p in stage.named_parameters()}

    refused("a gap", Ranks(ep=(rank,), stages=(0,) if rank == 0 else (2,)))
    refused("no stage named", Ranks(ep=(rank,)), models=2)
    refused("overlap", Ranks(ep=(0, 1) if rank == 0 else (1,)))
    refused("another size", Ranks(ep=(0, 1) if rank < 2 else (2,)))
    refused("divisors", Ranks(gradient_divisor=rank + 1))
    refused("uneven stages", Ranks(ep=(rank,), stages=(0, 1) if rank else (0,)), models=2 if rank else 1)
    return said


def test_ranks_that_contradict_each_other_are_refused_on_all() -> None:
    first, *others = run_ranks(3, attach_wrongly)
    assert all(said == first for said in others)
    assert "stages [0, 2]" in first["a gap"]
    assert "Ranks(stages=...)" in first["no stage named"]
    assert "do not partition" in first["overlap"]
    assert "differ in size" in first["another size"]
    assert "gradient divisors" in first["divisors"]
    assert "stage 0 is held together" in first["uneven stages"]
