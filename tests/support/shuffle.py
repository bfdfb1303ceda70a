"""A planner that moves experts at every decision, and how a test has a balancer plan with it, or with another."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.balancer.balancer import Balancer
from eplb_runtime.placement import Placement
from eplb_runtime.planner.api import plan
from eplb_runtime.planner.evaluate import lower_bound, moves_between, predicted_imbalance
from eplb_runtime.planner.policies import shuffled
from eplb_runtime.planner.types import Plan
from eplb_runtime.topology import Topology


def plan_by(balancer: Balancer, planner: Callable[..., Plan]) -> None:
    """Plan with a function other than `planner.plan`, of the same arguments, from the next decision on."""
    balancer.rebalancer.decisions.planner = planner


def with_replicas(experts: int, ranks: int, replicas: Mapping[int, int]) -> Placement:
    """A placement of two layers with one replica slot a rank: rank -> whose replica it holds."""
    plain = Placement.initial(2, experts, ranks, 1)
    slots = plain.physical_to_logical.copy()
    for rank, expert in replicas.items():
        slots[:, (rank + 1) * plain.slots_per_rank - 1] = expert
    return Placement(slots, experts, ranks, plain.home)


def wait_until_compiled(balancer: Balancer) -> None:
    """Wait for compiled planner code, in runs that are over before it is; without it training rebalances later."""
    process = balancer.rebalancer.decisions.process
    assert process is None or process.is_ready(300.0)


def plan_shuffle(
    load: NDArray[np.int64], topology: Topology, *, slots_per_rank: int, current: Placement, **_: Any
) -> Plan:
    """A plan in the home layout that always moves, balanced load or not; called as `planner.plan` is."""
    began = time.perf_counter()
    total = np.asarray(load, dtype=np.float64).sum(axis=0)
    placement = shuffled(current, total)
    return Plan(
        policy="shuffle",
        placement=placement,
        current=current,
        moves=moves_between(current, placement, topology),
        imbalance_before=predicted_imbalance(total, current),
        imbalance_after=predicted_imbalance(total, placement),
        lower_bound=lower_bound(total, current.num_ranks, slots_per_rank),
        bytes_intra_node=0,
        bytes_inter_node=0,
        seconds_saved=float("nan"),
        seconds_spent=float("nan"),
        decision="rebalance",
        reason="experts change places to show that they can",
        plan_seconds=time.perf_counter() - began,
    )


def plan_newest(load: NDArray[np.int64], *args: Any, **terms: Any) -> Plan:
    """As `eplb_runtime.plan`, for the newest window alone, noise too: a small model gives its router little else."""
    return plan(np.asarray(load)[-1:], *args, **terms)
