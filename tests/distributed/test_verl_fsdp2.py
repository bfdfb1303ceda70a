"""verl's FSDP2 engine: where `shard_experts` goes in what it does to a model, run with verl's own functions that wrap,
offload and export. 4 ranks, EP 2 x EDP 2, homes moved, suspended between steps.

verl's engine itself needs Ray and CUDA: ``build`` does what its ``_build_fsdp_module`` and ``_build_optimizer`` do.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import load_example
from moe_models import batch_of, make_model
from ranks import run_ranks
from support.shuffle import plan_by, plan_shuffle, wait_until_compiled
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import eplb_runtime as eplb

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed: pip install verl"),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="verl imports peft: pip install peft"),
]
EXPERTS, STEPS = 8, 4


def verls() -> Any:
    """verl's functions for FSDP, on a CPU."""
    importlib.import_module("transformers.trainer_pt_utils")
    from test_walks_of_frameworks import Answered

    sys.meta_path.append(Answered())
    functions = importlib.import_module("verl.utils.fsdp_utils")
    functions.get_device_id = lambda: torch.device("cpu")
    functions.get_torch_device = lambda: SimpleNamespace(empty_cache=lambda: None)
    return functions


def build(functions: Any, policy: str) -> tuple[nn.Module, torch.optim.Optimizer, eplb.Balancer]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    everyone, ep_group = init_device_mesh("cpu", (4,)), mesh["ep"].get_group()
    config = eplb.BalancerConfig(interval=None, gate="always", policy=policy)
    fsdp_kwargs = {
        "mesh": everyone,
        "mp_policy": MixedPrecisionPolicy(torch.float32, torch.float32, cast_forward_inputs=True),
        "offload_policy": None,
        "reshard_after_forward": True,
    }
    # On every rank with its weights, as verl's _build_module makes it without use_meta_tensor.
    module = make_model("qwen3_moe", experts=EXPERTS, top_k=2)
    # In the place of full_state, apply_fsdp2 and fsdp2_load_full_state_dict:
    eplb.shard_experts(module, config=config, ep_group=ep_group)
    for layer in module.model.layers:
        of_experts = {**fsdp_kwargs, "mesh": mesh["edp"], "shard_placement_fn": lambda parameter: Shard(1)}
        fully_shard(layer.mlp.experts, **of_experts)
    functions.apply_fsdp2(module, fsdp_kwargs, {})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    return module, optimizer, eplb.attach(module, optimizer, config=config, ep_group=ep_group)


def exported_by_verl(module: nn.Module) -> dict[str, Tensor]:
    """What verl's own ``get_per_tensor_param`` sends."""
    unfuse = importlib.import_module("verl.workers.engine.fsdp.utils").unfuse_moe_params
    whole = (
        (name, tensor.full_tensor()) for name, tensor in module.state_dict().items() if hasattr(tensor, "full_tensor")
    )
    return dict(unfuse(whole, "qwen3_moe"))


def trained(functions: Any, policy: str, rank: int) -> dict[str, Any]:
    module, optimizer, balancer = build(functions, policy)
    if policy != "static":
        wait_until_compiled(balancer)
        plan_by(balancer, plan_shuffle)
    engine = SimpleNamespace(module=module)
    load_example("verl_weights").follow_verl_fsdp(balancer, engine)
    found: dict[str, Any] = {"losses": [], "norms": [], "exports": []}
    module.train()
    for step in range(STEPS):
        ids = batch_of(rank, step)
        loss = module(input_ids=ids, labels=ids).loss
        loss.backward()
        found["norms"].append(balancer.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        named, adapters = engine.get_per_tensor_param()
        found["exports"].append({name: tensor.clone() for name, tensor in named})
        assert adapters is None
        balancer.suspend()
        functions.offload_fsdp_model_to_cpu(module)
        functions.offload_fsdp_optimizer(optimizer)
        functions.load_fsdp_model_to_gpu(module)
        functions.load_fsdp_optimizer(optimizer, torch.device("cpu"))
        balancer.resume()
        if policy != "static":
            balancer.rebalance()
    found["by verl"] = exported_by_verl(module)
    found["said"] = said_by(engine.get_per_tensor_param_shard)
    found["moved"] = sum(event.moved_experts for event in balancer.events if hasattr(event, "moved_experts"))
    found["state"] = eplb.logical_state_dict(module, optimizer)
    balancer.close()
    return found


def said_by(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except RuntimeError as error:
        return str(error)


def everything(rank: int) -> dict[str, Any]:
    functions = verls()
    return {policy: trained(functions, policy, rank) for policy in ("static", "incremental")}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(4, everything)


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def test_training_in_verls_wrapping_is_that_of_experts_that_stay(results: list[dict[str, Any]]) -> None:
    for found in results:
        static, moving = found["static"], found["incremental"]
        assert static["moved"] == 0 < moving["moved"]
        assert static["losses"] == moving["losses"] and static["norms"] == moving["norms"]
        assert differing(static["state"], moving["state"]) == []


def test_verls_weight_update_names_experts_by_their_logical_ids(results: list[dict[str, Any]]) -> None:
    for found in results:
        static, moving = found["static"]["exports"], found["incremental"]["exports"]
        assert [differing(one, other) for one, other in zip(static, moving, strict=True)] == [[]] * STEPS
        assert f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight" in moving[0]
        assert moving[0].keys() == results[0]["static"]["exports"][0].keys()
        assert "update whole weights" in found["incremental"]["said"]


def test_control_verls_own_export_names_a_ranks_experts_as_those_of_another(
    results: list[dict[str, Any]],
) -> None:
    for rank, found in enumerate(results):
        own, right = found["static"]["by verl"], found["static"]["exports"][-1]
        experts = [name for name in own if ".experts." in name]
        assert experts and len(experts) == sum(".experts." in name for name in right) // 2
        wrong = [name for name in experts if not torch.equal(own[name], right[name])]
        assert wrong == ([] if rank % 2 == 0 else experts), "without any move, on the second rank of each EP group"
