"""Megatron-Core's newest supported version does what the installed one does in the tests beside this one."""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import megatron_jobs as jobs
import pytest
import test_megatron as bare
import test_megatron_cases as megatron_cases
import test_megatron_settings as settings
import test_megatron_stages as stages
import torch
from examples import FOLDER, load_example
from megatron_jobs import SmallJob, assert_moved_without_a_change, both
from newer_megatron import NEWER, WHY_NOT, on_newer
from ranks import run_ranks

pytestmark = pytest.mark.skipif(not NEWER.is_dir(), reason=WHY_NOT)
WAYS = ("distributed optimizer, all-gather", "grouped experts")
STAGES = "interleaved"
REPEATED = "a layer of MTP that is passed twice"
PARALLELISM = "tensor and sequence parallelism"
OLDER = "moe_use_legacy_grouped_gemm"  # 0.16.1 has it


def on_two_ranks(rank: int, folder: str) -> dict[str, Any]:
    results: dict[str, Any] = {"job": settings.live_job(rank, folder), "defaults": defaults(rank)}
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for way in WAYS:
        results[f"{way}, static"] = bare.trained(way, move=False)
        results[f"{way}, moving"] = bare.trained(way, move=True)
    results["saved"] = bare.saved_and_loaded(Path(folder))
    results["saved, static"] = bare.trained("optimizer of float16, shared experts", move=False)
    return results


def parallel_and_repeated(rank: int) -> dict[str, Any]:
    """Repeated: one layer that predicts a second token and a third, so that its experts are passed twice."""
    repeated = partial(SmallJob, mtp_num_layers=2, mtp_use_repeated_layer=True, moe_router_topk=3)
    return {**megatron_cases.on_a_rank(rank, "parallelisms", [PARALLELISM]), REPEATED: both(repeated)}


def on_four_ranks(rank: int) -> dict[str, Any]:
    jobs.prepare(pipeline_model_parallel_size=2)
    return {STAGES: both(partial(jobs.Job, **stages.CASES[STAGES]))}


def defaults(rank: int) -> dict[str, tuple[Any, Any]]:
    """Settings with other defaults in Megatron than here (Megatron's first), and those that it does not have."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    load_example("megatron_gpt")
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from eplb_runtime.hosts.megatron.settings import DEFAULTS, DTYPES

    kinds = (DistributedDataParallelConfig, OptimizerConfig, TransformerConfig)
    theirs = {field.name: field.default for kind in kinds for field in fields(kind)}
    theirs |= {name: str(theirs[name]).removeprefix("torch.") for name in DTYPES}
    theirs["expert_tensor_parallel_size"] = 1  # None is the tensor-parallel size
    return {
        name: (theirs.get(name, "missing"), default)
        for name, default in DEFAULTS.items()
        if name != OLDER and theirs.get(name, "missing") != default
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(2, on_newer, on_two_ranks, str(tmp_path_factory.mktemp("newer")))


@pytest.mark.parametrize("way", WAYS)
def test_moving_experts_changes_no_bit(pairs: list[dict[str, Any]], way: str) -> None:
    for of_rank in pairs:
        static, moving = of_rank[f"{way}, static"], of_rank[f"{way}, moving"]
        assert static[2] == 0 < moving[2] and moving[0] == static[0] and moving[3] == static[3]
    static, moving = bare.whole(pairs, f"{way}, static"), bare.whole(pairs, f"{way}, moving")
    assert static.keys() == moving.keys() and any("exp_avg_sq" in str(key) for key in static)
    assert [key for key in static if not torch.equal(static[key], moving[key])] == []


def test_checkpoints_are_in_logical_order(pairs: list[dict[str, Any]]) -> None:
    for of_rank in pairs:
        static, saved = of_rank["saved, static"][0], of_rank["saved"]
        assert saved["alone"][0][0] == static[2][0] and saved["elsewhere"] == static[2:]
        assert saved["there"] != [sorted(row) for row in saved["there"]]


@pytest.mark.long
def test_experts_move_under_sequence_parallelism_and_in_a_layer_that_is_passed_twice() -> None:
    results = run_ranks(2, on_newer, parallel_and_repeated)
    assert_moved_without_a_change(results, PARALLELISM)
    megatron_cases.assert_parallel_counted(results, PARALLELISM)
    assert_moved_without_a_change(results, REPEATED)


@pytest.mark.long
def test_experts_of_stages_move_and_no_bit_changes() -> None:
    assert_moved_without_a_change(run_ranks(4, on_newer, on_four_ranks), STAGES)


def test_a_live_job_and_its_command_line_have_the_same_settings(pairs: list[dict[str, Any]]) -> None:
    for of_rank in pairs:
        assert of_rank["job"]["live"] == of_rank["job"]["written"] != of_rank["job"]["other"]
        assert "fp8_recipe=delayed" in of_rank["job"]["said"]


def test_defaults_are_megatrons(pairs: list[dict[str, Any]]) -> None:
    assert pairs[0]["defaults"] == {}
