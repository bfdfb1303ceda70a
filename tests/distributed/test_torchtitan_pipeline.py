"""torchtitan's pipelines with a balancer: stages are one job, and one plan moves experts in all of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from titan import SAVED, STEPS, Run, different, get_ready

from eplb_runtime.events import Event, LoadMeasured
from eplb_runtime.hosts.attaching.description import AttachError

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")

MICRO_BATCHES, SEQUENCE, TOP_K, DATA_RANKS = 4, 64, 2, 2
TOKENS = MICRO_BATCHES * SEQUENCE * TOP_K * DATA_RANKS
"""That each MoE layer routes in a step."""
DENSE_FIRST = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "lm_head"]]
"""Stages of DeepSeek-V3, whose first layer has no experts: nor has the first rank of its pipeline."""
RUNS = {"deepseek_v3": ("1F1B", DENSE_FIRST, 2), "qwen3": ("Interleaved1F1B", None, 3)}
"""Schedule, stages (None: torchtitan's own), and MoE layers."""


def in_stages(family: str, config: Any) -> None:
    schedule, modules, _ = RUNS[family]
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.module_fqns_per_model_part = modules
    config.training.local_batch_size = MICRO_BATCHES
    if family == "qwen3":
        validated(config)


def validated(config: Any) -> None:
    """Between any two steps."""
    from torchtitan.components.validate import Validator
    from torchtitan_moe import Texts

    config.validator = Validator.Config(enable=True, freq=1, steps=1, dataloader=Texts.Config())


def trained(rank: int, folder: Path) -> dict[str, Any]:
    get_ready()
    found: dict[str, Any] = {}
    for family, (_, _, layers) in RUNS.items():
        run = partial(Run, family, 2, folder / family, change=partial(in_stages, family))
        still = run(False).train()
        moving = run(True, **({} if family == "qwen3" else {"saves": True}))
        counted = tokens_counted(moving)
        moving.train()
        found[family] = {
            "logged": (still.logged, moving.logged),
            "different": different(still.state(), moving.state()),
            "moved": moving.moved,
            "layers": moving.balancer.placement.num_layers == layers,
            "counted": counted,
        }
        if family == "deepseek_v3":
            again = run(True, saves=False, load_step=SAVED).train()
            found["again"] = again.logged == still.logged[SAVED:], different(still.state(), again.state())
            again.close()
        still.close()
        moving.close()
    found["refused"] = refused(folder)
    return found


def tokens_counted(run: Run) -> list[set[int]]:
    """In each step from now on: how many each layer has counted, over all ranks."""
    counted: list[set[int]] = []

    def measured(event: Event) -> None:
        if isinstance(event, LoadMeasured):
            counted.append(set(event.load.sum(axis=-1).reshape(-1).tolist()))

    run.balancer.events.subscribe(measured)
    return counted


def refused(folder: Path) -> str:
    """Somebody else makes the stages."""

    def mistake(config: Any) -> None:
        in_stages("deepseek_v3", config)
        config.model_spec.pipelining_fn = config.model_spec.pipelining_fn.args[0]

    try:
        Run("deepseek_v3", 2, folder / "refused", False, mistake=mistake)
    except AttachError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(4, trained, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("family", RUNS)
def test_trajectories_are_equal_with_every_home_moved_after_each_step(ranks: Any, family: str) -> None:
    for found in ranks:
        seen = found[family]
        assert seen["moved"] > 16 * (STEPS - 1) and seen["layers"]
        still, moving = seen["logged"]
        assert len(still) == STEPS and still == moving
        assert all(norm > 0.3 for _, _, norm in still), "clipping was not active"
        assert seen["different"] == []


@pytest.mark.parametrize("family", RUNS)
def test_what_torch_runs_through_stages_to_learn_shapes_counts_nowhere(ranks: Any, family: str) -> None:
    for found in ranks:
        assert found[family]["counted"] == [{TOKENS}] * STEPS


def test_a_run_resumed_from_its_checkpoint_is_the_run_that_went_on(ranks: Any) -> None:
    assert all(found["again"] == (True, []) for found in ranks)


def test_stages_that_somebody_else_has_made_are_refused(ranks: Any) -> None:
    assert all("leave config.model_spec.pipelining_fn as it sets it" in found["refused"] for found in ranks)
