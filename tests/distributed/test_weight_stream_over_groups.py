"""Weights leave models whose experts several EP groups hold, whole, sliced by `fully_shard` or divided by rows, models
of all families, and pipeline stages: 4 ranks. Most models and placements are those of `test_export`, where no expert is
at its first place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from support.seen import same
from test_export import Job, attached, whole_model
from test_pipeline_stages import make_stages
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks

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


def streamed(balancer: eplb.Balancer, bucket_bytes: int = 10_000, **options: Any) -> dict[str, torch.Tensor]:
    stream = balancer.named_logical_tensors(bucket_bytes=bucket_bytes, **options)
    return {name: tensor.clone() for name, tensor in stream}


def exported(job: Job) -> dict[str, Any]:
    balancer = attached(job)._eplb_runtime_balancer
    everyone, one = streamed(balancer, 30_000), streamed(balancer, 30_000, rank=3)
    said = balancer.verify_export(everyone)
    first = next(iter(balancer.named_logical_tensors().experts))
    with pytest.raises(eplb.checkpoint.ExportError) as raised:
        balancer.verify_export({**everyone, first: everyone[first] + 1})
    balancer.close()
    return {"all": everyone, "one": one, "said": said, "wrong": str(raised.value)}


def of_divided_rows(rank: int) -> dict[str, Any]:
    """Each EP rank's homes over two ranks, moved after a step."""
    import test_divided_rows as rows

    model, optimizer, balancer = rows.build(rows.Job(ranks=4, parts=2))
    (model(rows.batch_of(rank, 0)) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()
    stream = streamed(balancer)
    whole = {}
    for name, parameter in model.named_parameters():
        layer = balancer.layer_of_parameter.get(name)
        whole[name] = parameter.full_tensor() if layer is None else balancer.gather_experts(layer, parameter)
    said = balancer.verify_export(stream)
    moved = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    balancer.close()
    return {"all": stream, "whole": whole, "said": said, "moved": moved}


def of_stages(rank: int) -> dict[str, Any]:
    """Two stages x EP 2: under names that both stages have, and under names of their own."""
    number, config = rank // 2, eplb.BalancerConfig(guard="off", interval=None)
    ranks = Ranks(ep=(2 * number, 2 * number + 1), stages=(number,))
    stage = make_stages((2, 1))[number]
    balancer = eplb.attach(stage, None, config=config, ranks=ranks)
    with pytest.raises(eplb.checkpoint.ExportError) as raised:
        balancer.named_logical_tensors()
    balancer.close()
    named = nn.ModuleDict({f"stage{number}": make_stages((2, 1))[number]})
    balancer = eplb.attach(named, None, config=config, ranks=ranks)
    here = balancer.placement
    order = np.stack([np.roll(np.arange(here.num_experts), 3)] * here.num_layers)
    moved = eplb.Placement(order, here.num_experts, 2, np.argsort(order, axis=1))
    balancer.load_state_dict({"step": 0, "placement": moved.to_json()})
    stream = streamed(balancer)
    state = {key.removeprefix("model."): value for key, value in eplb.logical_state_dict(named).items()}
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, state)
    whole = {key: value for of_rank in everyone for key, value in of_rank.items()}
    verified = balancer.verify_export(stream)
    balancer.close()
    return {"refused": str(raised.value), "all": stream, "whole": whole, "said": verified}


def everything(rank: int) -> dict[str, dict[str, Any]]:
    found = {name: exported(job) for name, job in JOBS.items()}
    return {**found, "divided rows": of_divided_rows(rank), "stages": of_stages(rank)}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(4, everything)


@pytest.mark.parametrize("name", JOBS)
def test_the_stream_is_what_the_library_would_write(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    whole = reference(JOBS[name])
    for rank, of_rank in enumerate(results):
        assert same(of_rank[name]["all"], whole)
        assert same(of_rank[name]["one"], whole if rank == 3 else {})


@pytest.mark.parametrize("name", ["divided rows", "stages"])
def test_divided_rows_and_stages_leave_whole(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    for of_rank in results:
        assert same(of_rank[name]["all"], of_rank[name]["whole"])
        assert "equal to the model's" in of_rank[name]["said"]
    assert results[0]["divided rows"]["moved"] > 0
    assert {key.split(".")[0] for key in results[0]["stages"]["all"]} == {"stage0", "stage1"}


@pytest.mark.parametrize("name", JOBS)
def test_it_is_verified_and_a_wrong_expert_is_noticed(results: list[dict[str, dict[str, Any]]], name: str) -> None:
    for of_rank in results:
        assert "those of all 16 experts" in of_rank[name]["said"]
        assert "experts that are not the model's: layer 0: " in of_rank[name]["wrong"]
        assert of_rank[name]["wrong"] == results[0][name]["wrong"]
