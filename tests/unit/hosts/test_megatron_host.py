"""What the Megatron host reads of Megatron's modules, optimizers and sharded state; one process, no groups."""

import importlib.util
import inspect
from typing import Any

import pytest
import torch
from torch import nn

from eplb_runtime.hosts.attaching.description import AttachError
from eplb_runtime.load.clock import ExpertClock

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed: pip install '.[megatron]'"
)


class Experts(nn.Module):
    """Parameters by any names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            inside = self
            *path, own = name.split(".")
            for part in path:
                if part not in inside._modules:
                    inside.add_module(part, nn.Module())
                inside = inside._modules[part]
            inside.register_parameter(own, nn.Parameter(torch.zeros(2)))


def test_megatron_still_has_what_the_host_takes_the_place_of() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.optimizer import ChainedOptimizer
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.moe.moe_layer import MoELayer

    def arguments(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)[1:]

    assert arguments(MoELayer.route) == ["hidden_states", "padding_mask"]
    assert arguments(MoELayer.preprocess) == ["hidden_states", "probs", "routing_map"]
    assert arguments(MoELayer.postprocess) == ["output", "shared_expert_output"]
    for experts in (SequentialMLP, TEGroupedMLP):
        assert arguments(experts.sharded_state_dict) == ["prefix", "sharded_offsets", "metadata"]
    assert arguments(DistributedOptimizer._get_main_param_and_optimizer_states) == ["model_param"]
    names = ["model_sharded_state_dict", "is_loading", "sharding_type", "metadata"]
    assert arguments(DistributedOptimizer.sharded_state_dict) == names
    assert arguments(ChainedOptimizer.step) == arguments(ChainedOptimizer.get_grad_norm) == []


def installed(**own: Any) -> Any:
    """A layer of the host's, in the place of Megatron's."""
    from types import SimpleNamespace

    from eplb_runtime.hosts.megatron.layer import install

    config = SimpleNamespace(
        overlap_moe_expert_parallel_comm=False,
        moe_router_topk=2,
        num_moe_experts=4,
        moe_token_dispatcher_type="alltoall",
    )
    experts = SimpleNamespace(sharded_state_dict=None, parameters=lambda: iter([torch.zeros(1)]))
    own = {name: lambda *_: None for name in ("route", "preprocess", "postprocess")} | own
    layer = SimpleNamespace(config=config, experts=experts, local_expert_indices=[0, 1], **own)
    install(layer, SimpleNamespace(expert_clock=ExpertClock()))  # type: ignore[arg-type]
    return layer


def test_what_a_newer_megatron_routes_by_besides_reaches_its_router() -> None:
    """It gives the ids of tokens, too, of which layers with hash routing choose experts."""
    from eplb_runtime.hosts.megatron.layer import watch

    layer = installed(route=lambda hidden, mask=None, input_ids=None: (mask, input_ids))
    assert layer.route(None, "padding", "ids") == layer.route(None, "padding", input_ids="ids") == ("padding", "ids")
    chosen = torch.ones(3, 4, dtype=torch.bool)
    layer.route = lambda hidden, mask=None, input_ids=None: (input_ids, chosen)
    layer.cudagraph_tensor_store = None
    seen: list[Any] = []
    watch(layer, lambda *shown: seen.append(shown), ExpertClock())
    assert layer.route(torch.zeros(3, 8), None, "ids") == ("ids", chosen)
    assert seen == [(chosen, 8, 2)]


def test_tensors_that_tensor_parallelism_cuts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from eplb_runtime.checkpoint import CheckpointError
    from eplb_runtime.hosts.attaching.description import MoELayer
    from eplb_runtime.hosts.megatron import saved_state

    monkeypatch.setattr(saved_state.parallel_state, "get_tensor_model_parallel_world_size", lambda: 2)
    experts = Experts("linear_fc1.weight0", "linear_fc1.weight1")
    model = nn.ModuleDict({"experts": experts})
    slots = {"linear_fc1.weight*": ("linear_fc1.weight0", "linear_fc1.weight1")}
    layer = MoELayer("experts", experts, 4, slots["linear_fc1.weight*"], None, lambda layer: None, slots=slots)
    with pytest.raises(CheckpointError, match=r"inside balancer.logical_order\(\) by the converter"):
        saved_state.weights([layer], model, 0)


def test_an_optimizer_whose_norm_would_follow_the_order_of_slots_is_refused() -> None:
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import ChainedOptimizer, FP32Optimizer

    from eplb_runtime.hosts.megatron.optimizers import StepByMegatron

    def stepped(*parameters: nn.Parameter, is_expert: bool) -> Any:
        optimizer = FP32Optimizer.__new__(FP32Optimizer)  # made whole, it wants CUDA
        optimizer.optimizer = torch.optim.Adam([{"params": list(parameters), "is_expert_parallel": is_expert}])
        optimizer.config = OptimizerConfig()
        return optimizer

    expert, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    apart = [stepped(other, is_expert=False), stepped(expert, is_expert=True)]
    experts = {"experts.0": ("experts", expert)}
    assert StepByMegatron(ChainedOptimizer(apart), experts).param_groups == [{"params": [expert]}]
    with pytest.raises(AttachError, match="FP32Optimizer would clip by a norm that depends on where experts are"):
        StepByMegatron(ChainedOptimizer([stepped(other, expert, is_expert=False)]), experts)
    with pytest.raises(AttachError, match="no chain with an optimizer of its own for experts"):
        StepByMegatron(apart[1], experts)
