"""Weights leave a Megatron model in logical order: 4 ranks, 2 pipeline stages x 2 expert-parallel ranks, two chunks on
each, every home moved. The models are those of `megatron_jobs`.

The reference is read from Megatron's own objects, and put in order by `Balancer.placement` alone.
"""

from __future__ import annotations

from typing import Any

import megatron_jobs
import numpy as np
import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

import eplb_runtime as eplb

pytestmark = megatron_jobs.needs_megatron
EXPERTS, LAYERS, BUCKET = 8, 4, 8_192


def shuffled(like: eplb.Placement) -> eplb.Placement:
    order = np.stack([np.roll(np.arange(EXPERTS), 3 + layer % 2) for layer in range(like.num_layers)])
    return eplb.Placement(order, EXPERTS, 2, np.argsort(order, axis=1))


def layer_of(model: Any, name: str) -> tuple[int, str]:
    """Number of a layer over the whole model, and the rest of a name."""
    head, _, tail = name.partition("layers.")
    index, _, rest = tail.partition(".")
    return model.get_submodule(f"{head}layers.{index}").layer_number - 1, rest


def local_walk(job: Any) -> dict[str, Tensor]:
    """What a framework exports of this rank: layers over the whole model, expert ``ep_rank * E/R + i``."""
    from megatron.core import parallel_state

    first = parallel_state.get_expert_model_parallel_rank() * EXPERTS // 2
    found = {}
    for model in job.models:
        for name, tensor in model.named_parameters():
            bare = name.removeprefix("module.module.")
            if "layers." in name:
                number, rest = layer_of(model, name)
                head, dot, tail = rest.partition("local_experts.")
                if dot:
                    slot, _, own = tail.partition(".")
                    rest = f"{head}local_experts.{first + int(slot)}.{own}"
                bare = f"decoder.layers.{number}.{rest}"
            found[bare] = tensor.detach().clone()
    return found


def of_all_ranks(mine: dict[str, Tensor]) -> dict[str, Tensor]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: tensor for of_rank in everyone for name, tensor in of_rank.items()}


def in_order(walked: dict[str, Tensor], placement: eplb.Placement) -> dict[str, Tensor]:
    """The same tensors under the names of the experts that they are."""
    found = {}
    for name, tensor in walked.items():
        head, dot, tail = name.partition("local_experts.")
        if dot:
            slot, _, own = tail.partition(".")
            layer = int(head.split("layers.")[1].split(".")[0])
            name = f"{head}local_experts.{placement.physical_to_logical[layer, int(slot)]}.{own}"
        found[name] = tensor
    return found


def line_of(work: Any) -> str:
    try:
        return str(work())
    except RuntimeError as error:
        return str(error)


def exported() -> dict[str, Any]:
    import megatron_jobs as jobs

    job = jobs.Job(**jobs.INTERLEAVED, overlap_param_gather=True, overlap_grad_reduce=True, align=True)
    config = eplb.BalancerConfig(interval=None, gate="always")
    balancer = eplb.attach(job.models, job.optimizer, config=config)
    job.train(range(1))
    found: dict[str, Any] = {}
    found["static"] = dict(balancer.named_logical_tensors(bucket_bytes=BUCKET))
    walked = of_all_ranks(local_walk(job))
    found["static, walked"] = walked
    balancer.load_state_dict({"step": 1, "placement": shuffled(balancer.placement).to_json()})
    stream = balancer.named_logical_tensors(bucket_bytes=BUCKET)
    found["experts"] = dict(stream.experts)
    found["moved"] = dict(stream)
    walked = of_all_ranks(local_walk(job))
    found["moved, walked"] = walked
    found["moved, in order"] = in_order(walked, balancer.placement)
    found["one rank"] = dict(balancer.named_logical_tensors(bucket_bytes=BUCKET, rank=2))
    found["said"] = line_of(lambda: balancer.verify_export(found["moved"]))
    found["said of a walk"] = line_of(lambda: balancer.verify_export(local_walk(job)))
    with balancer.logical_order():
        found["said inside"] = line_of(lambda: balancer.verify_export(local_walk(job)))
    found["back"] = balancer.placement.physical_to_logical.tolist()
    found["train"] = [job.train(range(1, 2)), balancer.close()][0]
    return found


def everything(rank: int) -> dict[str, Any]:
    import megatron_jobs as jobs

    jobs.prepare(pipeline_model_parallel_size=2)
    return {"rank": rank, **exported()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


def differing(some: dict[str, Tensor], others: dict[str, Tensor]) -> list[str]:
    assert some.keys() == others.keys()
    return [name for name in some if some[name].dtype != others[name].dtype or not some[name].equal(others[name])]


def test_every_rank_gets_all_stages_in_logical_order(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert differing(found["static"], found["static, walked"]) == []
        assert differing(found["moved"], found["static"]) == []
        assert differing(found["moved"], found["moved, in order"]) == []
        assert list(found["moved"]) == list(results[0]["moved"])
        experts = {(layer, expert) for layer, expert in found["experts"].values()}
        assert experts == {(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)}
        assert "decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight" in found["moved"]
        assert all(name.split(".")[0] in ("decoder", "embedding", "output_layer") for name in found["moved"])


def test_control_a_walk_by_local_index_is_wrong_after_moves(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert set(differing(found["moved, walked"], found["moved"])) == set(found["experts"])


def test_one_rank_of_one_stage_receives_all_stages(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert differing(found["one rank"], found["moved"] if found["rank"] == 2 else {}) == []


def test_verify_export_notices_the_walk_and_finds_it_right_in_logical_order(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert "among them those of all 32 experts" in found["said"]
        assert "a walk by local index" in found["said of a walk"]
        assert "layer 3: 0, 1, 2, 3, 4, 5, 6, 7" in found["said of a walk"]
        assert "among them those of all 32 experts" in found["said inside"]
        assert found["back"] != [list(range(EXPERTS))] * LAYERS
        assert found["train"]
