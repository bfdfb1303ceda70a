"""torchtitan's own dispatchers (DeepEP, HybridEP, MinimalAsyncEP) with a balancer, which gives them slots in the place
of experts; against the same with experts that stay. What they run on has a stand-in, `titan_dispatch_double`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import titan_dispatch_double
from ranks import run_ranks
from titan import STEPS, different
from titan_dispatchers import Job, begin, gathered

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

ALL_JOBS = {
    "deepep": Job("deepep", checkpointing="SelectiveAC", validates=True),
    "hybridep": Job("hybridep", "deepseek_v3", ep=2),
    "minimal_async_ep": Job("minimal_async_ep", top_k=3, checkpointing="FullAC"),
    "hybridep without waits, rows in sixteens": Job("hybridep", "gpt_oss", capacity=1.0, multiple=16),
    "deepep, tp 2": Job("deepep", "deepseek_v3", ep=2, options={"tensor_parallel_degree": 2}),
    "hybridep, cp 2": Job("hybridep", options={"context_parallel_degree": 2}),
    "hybridep, pp 2": Job(
        "hybridep", ep=2, options={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    ),
}
JOBS = {name: job for name, job in ALL_JOBS.items() if titan_dispatch_double.HAS_HYBRIDEP or job.backend != "hybridep"}


def trained(rank: int, folder: Path) -> dict[str, Any]:
    """With experts that stay, and with experts that move after each step."""
    begin()
    found: dict[str, Any] = {}
    for name, job in JOBS.items():
        still = job.run(folder, False).train()
        titan_dispatch_double.CALLS.clear()
        moving = job.run(folder, True).train()
        state = gathered(still)
        found[name] = {
            "calls": len(titan_dispatch_double.CALLS),
            "moved": moving.moved,
            "logged": (still.logged, moving.logged),
            "different": different(state, gathered(moving)),
        }
        still.close()
        moving.close()
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, trained, tmp_path_factory.mktemp("dispatchers"))


@pytest.mark.parametrize("name", ALL_JOBS)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(ranks: list[dict[str, Any]], name: str) -> None:
    if name not in JOBS:
        pytest.skip("torchtitan's hybridep is imported with torch 2.14 and newer")
    for of_rank in ranks:
        seen = of_rank[name]
        assert seen["moved"] > 16 * (STEPS - 1)
        assert seen["calls"] > 4 * STEPS, "torchtitan's dispatcher did not carry the tokens"
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["different"] == []
