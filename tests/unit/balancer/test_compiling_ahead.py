"""Compiling ahead of time."""

from __future__ import annotations

import subprocess
import sys

AFTER_WARMUP = """
import numpy as np, numba
from eplb_runtime.placement import Placement
from eplb_runtime.planner import CostModel, plan
from eplb_runtime.balancer.planner_process import compile_planner
from eplb_runtime.topology import Topology
import eplb_runtime.planner.search.descent as descent
import eplb_runtime.planner.search.starts as starts
import eplb_runtime.moe.routing.water_filling as water_filling
compile_planner()
assert descent.descend.signatures
kernels = [descent.descend, starts.deal, starts.add_rings, water_filling._split_layers]
before = [len(kernel.signatures) for kernel in kernels]
cost = CostModel(home_bytes=10, replica_bytes=1, step_seconds=1.0)
for replicas in (0, 2):
    plan(np.ones((3, 2, 64)) + np.arange(64), Topology(8), slots_per_rank=8 + replicas, cost=cost, gate="payoff",
         current=Placement.initial(2, 64, 8, replicas))
    plan(np.ones((3, 2, 64)) + np.arange(64), Topology(8), slots_per_rank=8 + replicas, max_moves=4,
         current=Placement.initial(2, 64, 8, replicas))
plan(np.arange(1.0, 257.0)[None], Topology(256), slots_per_rank=2)
assert [len(kernel.signatures) for kernel in kernels] == before, "a plan compiled again"
"""


def test_after_the_warm_up_no_plan_compiles_anything() -> None:
    subprocess.run([sys.executable, "-c", AFTER_WARMUP], check=True)
