"""Megatron-Core's Muon in pipeline stages and on ranks that hold the same experts, with a learning rate that changes
and a run that goes on from a checkpoint: 4 ranks, every home moved after each step, as in `test_megatron_newer_muon`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron_jobs as jobs
import pytest
import test_megatron_newer_muon as muon
from megatron_jobs import (
    INTERLEAVED,
    STEPS,
    assert_moved_without_a_change,
    attached,
    both,
    leaves_of,
    load,
    moved_by,
    save_into,
    trained,
)
from newer_megatron import on_newer
from ranks import run_ranks

pytestmark = muon.pytestmark
DENSE_FIRST = {"num_layers": 2, "moe_layer_freq": [0, 1]}
STAGED: dict[str, dict[str, Any]] = {
    "muon, interleaved": {**INTERLEAVED, **muon.CASES["muon"]},
    "dist_muon, a stage without an MoE layer": {**DENSE_FIRST, **muon.CASES["dist_muon"]},
    "laid out, a stage without an MoE layer": {
        **DENSE_FIRST,
        **muon.CASES["layer-wise, laid out as Megatron-LM does"],
    },
}
HELD_TWICE = "muon, EP 2 x EDP 2"


class StagedJob(muon.WithMuon, jobs.Job):
    """PP 2 x EP 2."""


class ScheduledJob(muon.MuonJob):
    """Its learning rate falls from step to step, as Megatron's scheduler writes it."""

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            for leaf in leaves_of(self.optimizer):
                for group in leaf.optimizer.param_groups:
                    group["lr"] = 1e-2 / (1 + step)
            seen += super().train(range(step, step + 1))
        return seen


def resumed(folder: str) -> dict[str, Any]:
    """Saved after moves by a job; another one loads, is attached, and goes on with moves of its own."""
    make = partial(ScheduledJob, **muon.CASES["muon"])
    seen = trained(make, move=True, also=save_into(folder))["seen"]
    job = make()
    job.train(range(7, 8))  # Megatron loads what has stepped; all of it is overwritten
    load(job, folder)
    balancer = attached(job, move=True)
    result = {
        "seen": seen + job.train(range(STEPS, 2 * STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": moved_by(balancer),
        "placement": balancer.placement.physical_to_logical.tolist(),
    }
    balancer.close()
    return result


def everything(rank: int, folder: str) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    muon.gathers_of_any_sizes()
    results: dict[str, Any] = {case: both(partial(StagedJob, **options)) for case, options in STAGED.items()}
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    jobs.prepare_small()
    make = partial(ScheduledJob, **muon.CASES["muon"])
    results[HELD_TWICE] = {
        "static": trained(make, move=False, steps=2 * STEPS),
        "moving": resumed(folder),
    }
    results["said"] = muon.said(**muon.CASES["dist_muon"])
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, on_newer, everything, str(tmp_path_factory.mktemp("muon stages")))


@pytest.mark.parametrize("case", [*STAGED, HELD_TWICE])
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    assert assert_moved_without_a_change(results, case) == {"weight", "param", "momentum_buffer"}


def test_layer_wise_muon_is_refused_where_ranks_hold_the_same_experts(results: list[dict[str, Any]]) -> None:
    for of_rank in results:
        assert "optimizer=dist_muon" in of_rank["said"] and "use_layer_wise" in of_rank["said"]
