"""torchtitan's own dispatchers (DeepEP, HybridEP, MinimalAsyncEP) with a balancer, which gives them slots in the place of
experts; against the same with experts that stay. What they run on has stand-ins: `titan_dispatch_double`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import titan_dispatch_double
import torch
from ranks import run_ranks
from titan import SAVED, STEPS, Run, different, get_ready, without_state
from torch import Tensor
from torch.distributed.tensor import DTensor

pytest.importorskip("torchtitan", reason="torchtitan's Trainer: pip install '.[torchtitan]'")


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        checkpointing: of activations, torchtitan's name for its way.
        options: of ``config.parallelism``, besides EP.
    """

    backend: str
    family: str = "qwen3"
    ep: int = 4
    top_k: int = 2
    capacity: float | None = None
    multiple: int = 0
    checkpointing: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def change(self, config: Any) -> None:
        from torchtitan.components.quantization.utils import swap_token_dispatcher
        from torchtitan.distributed import activation_checkpoint
        from torchtitan.models.common.config_utils import make_token_dispatcher_config
        from torchtitan.models.common.moe import GroupedExperts

        titan_dispatch_double.forget_buffers()
        torch.use_deterministic_algorithms(False)
        for layer in config.model_spec.model.layers:
            if getattr(layer, "moe", None) is not None:
                layer.moe.router.top_k = self.top_k
                layer.moe.routed_experts.token_dispatcher = make_token_dispatcher_config(
                    num_experts=layer.moe.num_experts,
                    top_k=self.top_k,
                    comm_backend=self.backend,
                    non_blocking_capacity_factor=self.capacity,
                )
        if self.multiple:
            for _, _, routed, _ in list(config.model_spec.model.traverse(GroupedExperts.Config)):
                swap_token_dispatcher(routed, self.multiple)
        if self.checkpointing:
            config.activation_checkpoint = getattr(activation_checkpoint, self.checkpointing).Config()
        config.debug.deterministic = self.backend == "deepep"
        for name, value in self.options.items():
            setattr(config.parallelism, name, value)
        if self.options.get("pipeline_parallel_degree", 1) > 1:
            config.training.local_batch_size = 4


JOBS = {
    "deepep": Job("deepep", checkpointing="SelectiveAC"),
    "hybridep": Job("hybridep", "deepseek_v3", ep=2),
    "hybridep without waits": Job("hybridep", "gpt_oss", capacity=1.0, multiple=16, checkpointing="FullAC"),
    "minimal_async_ep": Job("minimal_async_ep", top_k=3, checkpointing="FullAC"),
    "deepep, tp": Job("deepep", "deepseek_v3", ep=2, options={"tensor_parallel_degree": 2}),
    "hybridep, pp": Job(
        "hybridep", ep=2, options={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"}
    ),
}
CONTROLS = ("deepep", "hybridep", "minimal_async_ep")


def begin() -> None:
    get_ready()
    titan_dispatch_double.use()


def run_of(name: str, folder: Path, balanced: bool | None, **options: Any) -> Run:
    job = JOBS[name]
    return Run(job.family, job.ep, folder, balanced, change=job.change, **options)


def gathered(run: Run) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, whole, rows of experts by logical expert. Collective."""
    layer_of = {} if run.balancer is None else run.balancer.layer_of_parameter
    found: dict[str, Tensor] = {}
    several = len(run.trainer.model_parts) > 1
    for number, part in enumerate(run.trainer.model_parts):
        prefix = f"{number}." if several else ""
        numbers = run.balancer._runtime.job.stages if run.balancer is not None and several else ()
        before = f"stages.{numbers[number]}." if numbers else ""
        for name, parameter in part.named_parameters():
            tensors = {"": parameter.detach()}
            for optimizer in run.trainer.optimizers.optimizers:
                tensors |= {f" {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
            layer = layer_of.get(before + name)
            for key, value in tensors.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if layer is not None and whole.ndim:
                    rows = torch.tensor(run.balancer.placement.homes_LRH[layer]).reshape(-1).long()
                    whole = torch.empty_like(whole).index_copy_(0, rows, whole)
                found[prefix + name.replace("_checkpoint_wrapped_module.", "") + key] = whole.clone()
        for name, buffer in part.named_buffers():
            found[prefix + name] = (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).clone()
    return found


def trained(rank: int, folder: Path, name: str) -> dict[str, Any]:
    """With experts that stay, with experts that move after each step, and with state that does not."""
    begin()
    found: dict[str, Any] = {}
    still = run_of(name, folder, False).train()
    titan_dispatch_double.CALLS.clear()
    moving = run_of(name, folder, True).train()
    found["calls"] = len(titan_dispatch_double.CALLS)
    found["moved"] = moving.moved
    found["logged"] = still.logged, moving.logged
    states = gathered(still), gathered(moving)
    found["tensors"] = len(states[0])
    found["different"] = different(*states)
    if name in CONTROLS:
        left = without_state(run_of(name, folder, True)).train()
        found["control"] = different(states[0], gathered(left))
        left.close()
    still.close()
    moving.close()
    return found
