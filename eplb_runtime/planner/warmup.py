"""Compile the planner's kernels before they are needed.

Compiled code is kept on the disk (`utils.jit`): only the first run on a machine takes seconds.
"""

from __future__ import annotations

import numpy as np

from ..moe.routing.sources import split_for_rank
from ..moe.routing.tables import SplitTables
from ..placement import Placement
from ..topology import Topology
from .planning import plan
from .policies import LAYOUTS
from .search.explore import POURED_FROM


def compile_kernels(policy: str = "incremental") -> None:
    """Plan and split a toy problem once, which compiles everything that ``policy`` and the splitter run.

    Raises:
        PlanError: no such policy.
    """
    load = np.arange(1.0, 17.0).reshape(2, 8)
    topology = Topology(4, 2)
    in_home = "home" in LAYOUTS.get(policy, ())
    current = Placement.initial(2, 8, 4, 1)
    plan(load, topology, slots_per_rank=3, policy=policy, current=current if in_home else None)
    if policy == "incremental":
        plan(np.ones((1, POURED_FROM)), Topology(POURED_FROM), slots_per_rank=2)
    split_for_rank(np.ones((4, 8), dtype=np.int64), SplitTables.of(current), 0, 0, ranks_per_node=2)
