"""Weights leave models whose experts several EP groups hold, whole or sliced by `fully_shard`, and models of all
families: 4 ranks. The models and placements are those of `test_export`, where no expert is at its first place.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_export import Job, attached, same, whole_model
from transformers.core_model_loading import revert_weight_conversion

JOBS = {
    "two EP groups": Job("qwen3_moe", ep_size=2),
    "two EP groups, stacked": Job("gpt_oss", ep_size=2),
    "sliced": Job("olmoe", ep_size=2, sliced=True),
    "sliced, stacked": Job("gpt_oss", ep_size=2, sliced=True),
    "buffers beside experts": Job("deepseek_v3"),
    "tied": Job("mixtral", tied=True),
}


def reference(job: Job) -> dict[str, torch.Tensor]:
    """The tensors of the folder that the library writes of the whole model."""
    model = whole_model(job)
    state = dict(revert_weight_conversion(model, dict(model.state_dict())))
    return {name: tensor for name, tensor in state.items() if not (job.tied and name == "lm_head.weight")}


def exported(job: Job) -> dict[str, Any]:
    balancer = attached(job)._eplb_runtime_balancer
    everyone = {name: tensor.clone() for name, tensor in balancer.named_logical_tensors(bucket_bytes=30_000)}
    one = {name: tensor.clone() for name, tensor in balancer.named_logical_tensors(bucket_bytes=30_000, rank=3)}
    said = balancer.verify_export(everyone)
    first = next(iter(balancer.named_logical_tensors().experts))
    wrong = {**everyone, first: everyone[first] + 1}
    try:
        line = balancer.verify_export(wrong)
    except RuntimeError as error:
        line = str(error)
    balancer.close()
    return {"all": everyone, "one": one, "said": said, "wrong": line}


def everything(rank: int) -> dict[str, dict[str, Any]]:
    return {name: exported(job) for name, job in JOBS.items()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("name", JOBS)
def test_the_stream_is_what_the_library_would_write(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    whole = reference(JOBS[name])
    for rank, of_rank in enumerate(results):
        assert same(of_rank[name]["all"], whole)
        assert same(of_rank[name]["one"], whole if rank == 3 else {})


@pytest.mark.parametrize("name", JOBS)
def test_it_is_verified_and_a_wrong_expert_is_noticed(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    for of_rank in results:
        assert "those of all 16 experts" in of_rank[name]["said"]
        assert "experts that are not the model's: layer 0: " in of_rank[name]["wrong"]
        assert of_rank[name]["wrong"] == results[0][name]["wrong"]
