"""Loss scaling for float16: a step is skipped on every rank or on none.

Each rank looks at the gradients of its own experts, so an overflow may show on one rank alone. Torch's GradScaler would
skip the step on that rank and take it on others. Gradients that replicas hold back are reduced before they are
unscaled.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState

from ..balancer import Balancer


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for an attached model; use it in the same way.

    Args:
        balancer: the one that ``attach`` gave.
        options: of torch's: ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``, ``enabled``.
    """

    def __init__(self, balancer: Balancer, **options: Any) -> None:
        super().__init__(balancer.runtime.device.type, **options)
        self._balancer = balancer

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce gradients over ranks, divide them by the scale, and agree on whether any is infinite or NaN."""
        if not self._enabled:
            return
        self._balancer.reduce_gradients()
        super().unscale_(optimizer)
        # As torch's ShardedGradScaler does it for FSDP, whose flag has a shape that fused optimizers cannot take.
        found: dict[torch.device, torch.Tensor] = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        device = self._balancer.runtime.device
        anywhere = torch.stack([torch.zeros((), device=device), *(flag.to(device) for flag in found.values())]).amax()
        dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._balancer.runtime.groups.everyone)
        for key in found or [device]:
            found[key] = anywhere.to(key)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step as torch's does. Fused optimizers, which would unscale by themselves, get the result that the ranks
        agreed on. If one of several optimizers has an overflow, the others step."""
        if self._enabled and self._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            self.unscale_(optimizer)
        with self._balancer.optimizer_hooks.around_step(optimizer):
            return super().step(optimizer, *args, **kwargs)
