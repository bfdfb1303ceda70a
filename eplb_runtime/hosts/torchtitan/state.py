"""torchtitan's optimizers, whose state its checkpointer has in logical order (`attaching.logical_order`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override
from torchtitan.config.override import derive

from ..attaching.logical_order import Convert, LogicalOrder


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

    def _in_order(self, state: dict[str, Any], convert: Convert) -> dict[str, Any]:
        assert self.order is not None
        self.order.barrier("the state of the optimizers")
        changed = dict(state)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if (layer := self.order.layer_of(parameter)) is not None:
                    of_parameter = {key: state[key] for key in state if key.startswith(f"state.{name}.")}
                    changed |= self.order.in_order(of_parameter, layer, "", convert)
        return changed


@override(target=OptimizersContainer.Config, description="eplb_runtime: optimizer state in logical order", exact=True)
def balanced_optimizers(config: OptimizersContainer.Config) -> BalancedOptimizers.Config:
    return derive(config, BalancedOptimizers.Config)
