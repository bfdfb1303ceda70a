"""Carry tokens to the slots that were picked for them and bring the results back in logical top-k order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.distributed as dist

from ..watch import Meeting
from .all_to_all import AllToAll
from .base import Dispatcher
from .lanes import Lanes

DISPATCHERS: Mapping[str, Callable[[dist.ProcessGroup, int, dist.ProcessGroup, Meeting, Lanes], Dispatcher]] = {
    "all_to_all": AllToAll
}
"""``BalancerConfig.dispatch`` -> what makes the dispatcher: from the EP group, the slots a rank has, its group
for counts, what makes sure that they are in the same forward, and the ways of their exchanges."""
