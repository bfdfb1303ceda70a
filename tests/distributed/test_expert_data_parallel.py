"""Several EP groups hold the same experts: their ranks keep one placement, and whoever strays is noticed in time."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import make_model
from ranks import run_ranks
from support.seen import differing, same
from support.shuffle import plan_newest
from test_bits import Job, ep_group_of, train_over_edp
from test_export import Job as Exported
from test_export import attached, whole_model
from test_mirrored_pipeline import make_stages
from torch import nn
from transformers.core_model_loading import revert_weight_conversion

import eplb_runtime as eplb
from eplb_runtime.distributed.ranks import Ranks
from eplb_runtime.migration.engine import Phase

EXPERTS = 16


def another_plan_for_the_second_group(rank: int, balancer: eplb.Balancer) -> None:
    """Both its ranks receive the first plan that moves anything with two experts exchanged."""
    done = []

    def alter(message: bytearray) -> None:
        fields = json.loads(bytes(message))
        if done or not fields.get("placement"):
            return
        done.append(True)
        placement = eplb.Placement.from_json(fields["placement"])
        map_, home = placement.physical_to_logical.copy(), placement.home.copy()
        a, b = map_[0, 0], map_[0, -1]
        map_[0, [0, -1]] = b, a
        home[0, [a, b]] = home[0, [b, a]]
        fields["placement"] = eplb.Placement(map_, EXPERTS, 2, home, placement.epoch).to_json()
        message[:] = json.dumps(fields).encode()

    if rank >= 2:
        balancer.rebalancer._engine.probe = lambda phase, subject: alter(subject) if phase is Phase.PLANNED else None


def test_a_group_with_another_plan_is_noticed_before_anything_moves() -> None:
    job = Job(plan_newest, steps=8, interval=2, begin=another_plan_for_the_second_group)
    for static, result in run_ranks(4, train_over_edp, Job(steps=8), job):
        assert result["aborted"] == ["rank 2, 3 has another plan than rank 0"]
        assert result["moved"] >= 1 and differing(static["seen"], result["seen"]) == []


def start_or_restore_apart(rank: int) -> list[str]:
    start = eplb.Placement.initial(2, EXPERTS, 2)
    other = eplb.Placement(start.physical_to_logical[:, ::-1], EXPERTS, 2, start.home[:, ::-1])
    said = []
    model = make_model("olmoe", experts=EXPERTS)
    mine = start if rank < 2 else other
    with pytest.raises(ValueError) as refused:
        eplb.attach(model, config=eplb.BalancerConfig(initial_placement=mine), ep_group=ep_group_of(rank))
    said.append(str(refused.value))
    balancer = eplb.attach(model, ep_group=ep_group_of(rank))
    for state in ({"step": 8, "placement": mine.to_json()}, {"step": 8 + rank, "placement": other.to_json()}):
        with pytest.raises(RuntimeError) as refused:
            balancer.load_state_dict(state)
        said.append(str(refused.value))
    narrow = eplb.Placement.initial(2, EXPERTS, 4 if rank == 3 else 2)
    with pytest.raises((RuntimeError, ValueError)) as refused:
        balancer.load_state_dict({"step": 8, "placement": narrow.to_json()})
    said.append(str(refused.value))
    with pytest.raises((RuntimeError, ValueError)) as refused:
        balancer.load_state_dict(
            {"placement": other.to_json()} if rank == 1 else {"step": 8, "placement": other.to_json()}
        )
    said.append(str(refused.value))
    assert balancer.placement.digest() == start.digest()

    def fail(phase: Phase, subject: object) -> None:
        if phase is Phase.VERIFIED and rank == 0:
            raise OSError("the device went away")

    balancer.rebalancer._engine.probe, probe = fail, balancer.rebalancer._engine.probe
    with pytest.raises(RuntimeError, match="could not be restored"):
        balancer.load_state_dict({"step": 8, "placement": other.to_json()})
    balancer.rebalancer._engine.probe = probe
    assert balancer.placement.digest() == start.digest()
    # The same step once more: what was decided then does not count now.
    balancer.load_state_dict({"step": 8, "placement": other.to_json()})
    assert balancer.placement.digest() == other.digest()
    balancer.close()
    return said


def test_ranks_that_start_or_are_restored_apart_are_told_so_and_nothing_changes() -> None:
    every = run_ranks(4, start_or_restore_apart)
    for said in every:
        assert not any("\n" in line for line in said)
        assert "rank 2, 3 has another initial_placement in its config than rank 0" in said[0]
        assert said[1].endswith("rank 2, 3 has another usable saved state than rank 0")
        assert said[2].endswith("rank 1, 2, 3 has another usable saved state than rank 0")
    assert "EP size" in every[3][3] or "ranks" in every[3][3]
    assert every[0][3].endswith("no usable saved state on rank 3")
    assert "not what state_dict() gave" in every[1][4] and every[0][4].endswith("no usable saved state on rank 1")


# -- Weights leave models whose experts several EP groups hold, whole, sliced by `fully_shard` or divided by rows, mod


JOBS = {
    "two EP groups": Exported("qwen3_moe", ep_size=2),
    "two EP groups, stacked": Exported("gpt_oss", ep_size=2),
    "sliced": Exported("olmoe", ep_size=2, sliced=True),
    "sliced, stacked": Exported("gpt_oss", ep_size=2, sliced=True),
    "buffers beside experts": Exported("deepseek_v3"),
    "tied": Exported("mixtral", tied=True),
}


def reference(job: Exported) -> dict[str, torch.Tensor]:
    """The tensors of the folder that the library writes of the whole model."""
    model = whole_model(job)
    state = dict(revert_weight_conversion(model, dict(model.state_dict())))
    return {name: tensor for name, tensor in state.items() if not (job.tied and name == "lm_head.weight")}


def streamed(balancer: eplb.Balancer, bucket_bytes: int = 10_000, **options: Any) -> dict[str, torch.Tensor]:
    stream = balancer.named_logical_tensors(bucket_bytes=bucket_bytes, **options)
    return {name: tensor.clone() for name, tensor in stream}


def exported(job: Exported) -> dict[str, Any]:
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
