"""State in logical order: what a model and its optimizer hold, whatever ranks and slots it stands on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .balancer import Balancer
from .experts.optimizer_state import is_per_expert


@torch.no_grad()
def logical_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Tensor]:
    """Every parameter and optimizer tensor of a model, flat, on the CPU, equal on every rank. Collective when attached.

    Expert tensors are whole, ``[E, ...]`` in logical order, so runs with different placements (or with no balancer at
    all) can be compared entry by entry.

    Args:
        model: attached or not.
        optimizer: the one that was attached; None: parameters only.

    Returns:
        ``{"model.<parameter>": tensor, "optimizer.<parameter>.<state>": tensor}``.
    """
    balancer: Balancer | None = getattr(model, "_eplb_runtime_balancer", None)
    layer_of = balancer.layer_of_parameter if balancer is not None else {}
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        entries = {f"model.{name}": parameter.detach()}
        if optimizer is not None:
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str):
                if isinstance(state[key], Tensor):
                    entries[f"optimizer.{name}.{key}"] = state[key]
        for key, tensor in entries.items():
            if balancer is not None and name in layer_of and is_per_expert(key, tensor, parameter):
                tensor = balancer.gather_experts(layer_of[name], tensor)
            found[key] = tensor.to("cpu", copy=True)
    return found
