"""``plan``: checks the question, asks a policy, weighs the answer."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import ArrayLike

from ..load.checks import checked_load
from ..placement import Placement
from ..topology import Topology
from .checks import check, check_kinds, checked_declaration, checked_layout, checked_sources, checked_speed
from .cost import CostModel
from .forecast import coarsen
from .policies import POLICIES
from .types import Gate, Plan, PlanError, PlanRequest
from .weighing import weigh


def plan(
    load: ArrayLike,
    topology: Topology,
    *,
    slots_per_rank: int,
    current: Placement | None = None,
    policy: str = "incremental",
    layout: str | None = None,
    groups: int = 1,
    max_moves: int | None = None,
    max_bytes: int | None = None,
    cost: CostModel | None = None,
    gate: Gate = "always",
    declared: ArrayLike | None = None,
    rank_speed: ArrayLike | None = None,
    sources: ArrayLike | None = None,
    trust: float = 1.0,
) -> Plan:
    """Plan a placement of experts for a measured load.

    Args:
        load: tokens per logical expert, ``[L, E]``: a load that is known; or ``[T, L, E]``: T successive windows of one
            that goes on, oldest first. A plan for one, ``[1, L, E]``, leaves room for how far the next may stray.
        topology: ranks and nodes of the EP group.
        slots_per_rank: S; in the home layout E/R homes and the rest replica slots.
        current: the placement that stands now; None: nothing stands yet, every slot is a move.
        policy: a name in ``POLICIES``.
        layout: ``"home"`` or ``"free"``; None: the policy's own.
        groups: expert groups of group-limited routing, for the policies that know them.
        max_moves: at most so many slots, over all layers, whose rank did not hold that expert; None: no limit. For a
            plan from ``current``.
        max_bytes: the same in bytes (needs ``cost``); None: no limit.
        cost: bytes and seconds (`CostModel`); needed by the ``"payoff"`` gate, and for the plan to know its bytes.
        gate: ``"payoff"``: rebalance when predicted seconds saved exceed predicted seconds spent, in the layers that
            together leave most seconds. ``"always"``: whenever the imbalance falls.
            ``"off"``: take what the policy says.
        declared: the load to come where it is known, ``[L, E]`` or ``[T, L, E]``, in place of a forecast (for example
            replayed routing in reinforcement learning).
        rank_speed: float ``[R]``, how fast each rank is beside the others: a slow one gets fewer tokens, and imbalance
            is the slowest rank's time over that of all ranks at their speeds. For ``incremental``; None: all alike.
        sources: tokens by the node that they come from, ``[N, L, E]``; only the proportions in which an expert's tokens
            come from the nodes matter. None: from all alike. They count where crossing nodes has a cost
            (``cost=CostModel(crossing_seconds=...)``), for ``incremental``.
        trust: share of a plan's gain that is believed, in [0, 1]: as much as came true of earlier ones
            (`track_record.TrackRecord` measures it). Below 1 it needs ``cost``: it weighs seconds saved.

    Returns:
        The plan; a ``"stay"`` plan has no moves and the current placement.

    Raises:
        PlanError: the input is not usable; one line that says what is wrong and how to mend it.

    Example:
        >>> from eplb_runtime import Placement, Topology
        >>> load = [[90, 80, 20, 10, 30, 40, 60, 70]]  # one layer of eight experts; two on each of four ranks
        >>> made = plan(load, Topology(4), slots_per_rank=2, current=Placement.initial(1, 8, 4))
        >>> made.imbalance_before.round(3).tolist(), made.imbalance_after.round(3).tolist(), made.moved_homes
        ([1.7], [1.0], 4)
        >>> made.placement.home_rank.tolist()
        [[0, 1, 1, 0, 3, 2, 2, 3]]
    """
    began = time.perf_counter()
    check_kinds(topology, cost, current)
    windows = coarsen(checked_load(load, "load", PlanError))
    _, layers, experts = windows.shape
    request = PlanRequest(
        load=windows,
        topology=topology,
        slots_per_rank=slots_per_rank,
        current=current,
        policy=policy,
        layout=checked_layout(policy, layout),
        groups=groups,
        max_moves=max_moves,
        max_bytes=max_bytes,
        cost=cost,
        gate=gate,
        declared=None if declared is None else coarsen(checked_declaration(declared, windows)),
        speed_R=None if rank_speed is None else checked_speed(rank_speed, topology.num_ranks),
        source_share_LNE=None if sources is None else checked_sources(sources, layers, experts, topology),
        trust=trust,
        one_known=np.ndim(load) == 3 and len(windows) == 1 and declared is None,
    )
    check(request)
    return weigh(request, POLICIES[policy](request), began)
