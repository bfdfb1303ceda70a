"""Trainings of torchtitan with a token dispatcher of its own, on `titan_dispatch_double`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import titan_dispatch_double
import torch
from titan import Run, get_ready
from torch import Tensor
from torch.distributed.tensor import DTensor

LONG = 256
"""Of texts that ranks share: torch cuts masks in blocks of 128, and each rank has whole ones."""


@dataclass(frozen=True)
class Job:
    """One training.

    Args:
        backend: its ``moe_comm_backend``.
        capacity: ``non_blocking_capacity_factor``.
        multiple: experts want rows of a multiple of so many, as torchtitan's quantised ones do.
        checkpointing: of activations, torchtitan's name for its way.
        validates: between any two steps.
        options: of ``config.parallelism``, besides EP.
    """

    backend: str
    family: str = "qwen3"
    ep: int = 4
    top_k: int = 2
    capacity: float | None = None
    multiple: int = 0
    checkpointing: str = ""
    validates: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def change(self, config: Any) -> None:
        from torchtitan.components.quantization.utils import swap_token_dispatcher
        from torchtitan.components.validate import Validator
        from torchtitan.distributed import activation_checkpoint
        from torchtitan.models.common.config_utils import make_token_dispatcher_config
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan_moe import Texts
        from torchtitan_on_cpu import with_context_parallelism

        titan_dispatch_double.forget_buffers()
        torch.use_deterministic_algorithms(False)
        for layer in config.model_spec.model.layers:
            if getattr(layer, "moe", None) is not None:
                layer.moe.router.top_k = self.top_k
                layer.moe.routed_experts.token_dispatcher = make_token_dispatcher_config(
                    num_experts=layer.moe.num_experts,
                    top_k=self.top_k,
                    comm_backend=self.backend,  # as the model's moe_comm_backend
                    non_blocking_capacity_factor=self.capacity,
                )
        if self.multiple:
            for _, _, routed, _ in list(config.model_spec.model.traverse(GroupedExperts.Config)):
                swap_token_dispatcher(routed, self.multiple)
        if self.checkpointing:
            config.activation_checkpoint = getattr(activation_checkpoint, self.checkpointing).Config()
        if self.validates:
            config.validator = Validator.Config(enable=True, freq=1, steps=1, dataloader=Texts.Config())
        config.debug.deterministic = self.backend == "deepep"
        for name, value in self.options.items():
            setattr(config.parallelism, name, value)
        if "pipeline_parallel_degree" in self.options:
            config.training.local_batch_size = 4
        if "context_parallel_degree" in self.options:
            with_context_parallelism(config)
            config.training.seq_len = LONG

    def run(self, folder: Path, balanced: bool | None, **options: Any) -> Run:
        return Run(self.family, self.ep, folder, balanced, change=self.change, **options)


def begin() -> None:
    get_ready()
    titan_dispatch_double.use()


def gathered(run: Run) -> dict[str, Tensor]:
    """Weights, buffers and optimizer state, whole, rows of experts by logical expert. Collective."""
    parts, balancer = run.trainer.model_parts, run.balancer
    layer_of = {} if balancer is None else balancer.layer_of_parameter
    found: dict[str, Tensor] = {}
    for number, part in enumerate(parts):
        stage = "" if balancer is None else part.__dict__["_eplb_runtime_stage"].prefix
        for name, parameter in part.named_parameters():
            tensors = {"": parameter.detach()}
            for optimizer in run.trainer.optimizers.optimizers:
                tensors |= {f" {key}": value for key, value in optimizer.state.get(parameter, {}).items()}
            for key, value in tensors.items():
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                if stage + name in layer_of and whole.ndim:
                    experts_LRH = balancer.placement.homes_LRH  # in the order of the rows
                    rows = torch.tensor(experts_LRH[layer_of[stage + name]]).reshape(-1).long()
                    whole = torch.empty_like(whole).index_copy_(0, rows, whole)
                found[f"{number}.{name.replace('_checkpoint_wrapped_module.', '')}{key}"] = whole.clone()
        for name, buffer in part.named_buffers():
            found[f"{number}.{name}"] = (buffer.full_tensor() if isinstance(buffer, DTensor) else buffer).clone()
    return found
