"""torchtitan's optimizers, whose state its checkpointer has in logical order (`attaching.state_hooks`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override
from torchtitan.config.override import derive

from ..attaching.state_hooks import LogicalOrder


class BalancedOptimizers(OptimizersContainer):
    """torchtitan's optimizers, whose state dict has experts in logical order once a balancer is attached."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    order: LogicalOrder | None = None

    def state_dict(self) -> dict[str, Any]:
        """As `OptimizersContainer.state_dict`. Collective."""
        state = super().state_dict()
        return state if self.order is None else self._in_order(state, self.order.saved)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `OptimizersContainer.load_state_dict`. Collective."""
        if self.order is not None:
            state_dict = self._in_order(state_dict, self.order.loaded)
        super().load_state_dict(state_dict)

    def _in_order(self, state: dict[str, Any], convert: Callable[[int, Tensor, str], DTensor]) -> dict[str, Any]:
        assert self.order is not None
        self.order.barrier("the state of the optimizers")
        changed = dict(state)
        for name, layer in self._experts(self.order):
            # One number for all experts (Adam's step) stays as it is.
            for key in sorted(key for key in state if key.startswith(f"state.{name}.")):
                if isinstance(state[key], Tensor) and state[key].numel() > 1:
                    changed[key] = convert(layer, state[key], key)
        return changed

    def _experts(self, order: LogicalOrder) -> Sequence[tuple[str, int]]:
        """Name and layer of the expert parameters that are trained, as the flat state names them."""
        return [
            (name, layer)
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            if (layer := order.layer_of(parameter)) is not None
        ]


@override(target=OptimizersContainer.Config, description="eplb_runtime: optimizer state in logical order", exact=True)
def balanced_optimizers(config: OptimizersContainer.Config) -> BalancedOptimizers.Config:
    return derive(config, BalancedOptimizers.Config)
