"""Megatron-Core's Muon in pipeline stages and on ranks that hold the same experts, with a learning rate that changes
and a run that goes on from a checkpoint: 4 ranks, every home moved after each step, as in `test_megatron_newer_muon`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_megatron_newer_muon as muon
import test_megatron_parallelisms as parallelisms
import test_megatron_stages as stages
from newer_megatron import on_newer
from ranks import run_ranks
from test_megatron_stages import EXPERTS, STEPS, attached, differing, forget_state, whole

import eplb_runtime as eplb

pytestmark = muon.pytestmark
DENSE_FIRST = {"moe_layer_freq": [0, 0, 1, 1]}
STAGED: dict[str, dict[str, Any]] = {
    "muon, interleaved": {**stages.INTERLEAVED, **muon.CASES["muon"]},
    "dist_muon, a stage without an MoE layer": {**DENSE_FIRST, **muon.CASES["dist_muon"]},
    "laid out, a stage without an MoE layer": {
        **DENSE_FIRST,
        **muon.CASES["layer-wise, laid out as Megatron-LM does"],
    },
}
HELD_TWICE = "muon, EP 2 x EDP 2"


class StagedJob(muon.WithMuon, stages.Job):
    """PP 2 x EP 2."""


class ScheduledJob(muon.MuonJob):
    """Its learning rate falls from step to step, as Megatron's scheduler writes it."""

    def train(self, steps: range) -> list[tuple[Any, ...]]:
        seen = []
        for step in steps:
            for leaf in muon.leaves_of(self.optimizer):
                for group in leaf.optimizer.param_groups:
                    group["lr"] = 1e-2 / (1 + step)
            seen += super().train(range(step, step + 1))
        return seen


def trained(
    make: Callable[[], Any], move: bool, spoil: Callable[[eplb.Balancer], None] = lambda _: None, steps: int = STEPS
) -> dict[str, Any]:
    job = make()
    balancer = attached(job, move)
    spoil(balancer)
    result = {
        "seen": job.train(range(steps)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def three(make: Callable[[], Any]) -> dict[str, Any]:
    return {
        "static": trained(make, move=False),
        "moving": trained(make, move=True),
        "control": trained(make, move=True, spoil=forget_state),
    }


def state_of(job: Any, loading: bool) -> dict[str, Any]:
    metadata = {"singleton_local_shards": False}
    (model,) = job.models
    of_model = model.module.sharded_state_dict(metadata=metadata)
    of_optimizer = job.optimizer.sharded_state_dict(of_model, is_loading=loading, metadata=metadata)
    return {"model": of_model, "optimizer": of_optimizer}


def resumed(folder: Path, make: Callable[[], Any]) -> dict[str, Any]:
    """Saved after moves by a job; another one loads, is attached, and goes on with moves of its own."""
    from megatron.core import dist_checkpointing

    job = make()
    balancer = attached(job, move=True)
    seen = job.train(range(STEPS))
    stages.save(state_of(job, loading=False), folder)
    balancer.close()
    job = make()
    job.train(range(7, 8))  # Megatron loads what has stepped; all of it is overwritten
    state = dist_checkpointing.load(state_of(job, loading=True), str(folder))
    job.models[0].load_state_dict(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    balancer = attached(job, move=True)
    result = {
        "seen": seen + job.train(range(STEPS, 2 * STEPS)),
        "tensors": job.tensors(balancer.placement),
        "moved": sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts")),
    }
    balancer.close()
    return result


def everything(rank: int, folder: str) -> dict[str, Any]:
    stages.prepare()
    muon.gathers_of_any_sizes()
    results: dict[str, Any] = {
        case: three(lambda options=options: StagedJob(**options)) for case, options in STAGED.items()
    }
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallelisms.prepare()

    def make() -> ScheduledJob:
        return ScheduledJob(**muon.CASES["muon"])

    results[HELD_TWICE] = {
        "static": trained(make, move=False, steps=2 * STEPS),
        "moving": resumed(Path(folder), make),
        "control": trained(make, move=True, spoil=forget_state, steps=2 * STEPS),
    }
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, on_newer, everything, str(tmp_path_factory.mktemp("muon stages")))


@pytest.mark.parametrize("case", [*STAGED, HELD_TWICE])
def test_experts_move_and_no_bit_changes(results: list[dict[str, Any]], case: str) -> None:
    static = whole([of_rank[case]["static"] for of_rank in results])
    for of_rank in results:
        assert of_rank[case]["moving"]["seen"] == of_rank[case]["static"]["seen"]
    moved = results[0][case]["moving"]["moved"]
    experts = [key for key in static if key[0] != "dense"]
    print(f"{case}: {len(experts)} expert tensors, {len(static)} in all, {moved} moves")
    assert results[0][case]["static"]["moved"] == 0 < moved
    assert {key[1] for key in experts} == set(range(EXPERTS))
    assert {key[3] for key in experts} == {"weight", "param", "momentum_buffer"}
    assert differing(static, whole([of_rank[case]["moving"] for of_rank in results])) == []
    assert differing(static, whole([of_rank[case]["control"] for of_rank in results])) != [], "state that stays shows"
