"""``plan``: checks the question, asks a policy, weighs the answer."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..load import forecast as forecasts
from ..load.forecast import coarsen
from ..placement import Placement
from ..topology import Topology
from .checks import (
    check_deadline,
    check_gate,
    check_kinds,
    check_shapes,
    check_sizes,
    check_trust,
    check_whole,
    checked_layout,
    checked_load,
    checked_speed,
)
from .policies import POLICIES
from .terms import Settled, Terms
from .traffic import checked_sources
from .types import Deadline, Plan, PlanError, PlanRequest
from .weighing import weigh


def plan(
    load: ArrayLike,
    topology: Topology,
    *,
    slots_per_rank: int,
    current: Placement | None = None,
    policy: str = "incremental",
    layout: str | None = None,
    **terms: Unpack[Terms],
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
        groups: expert groups of group-limited routing, for the policies that know them; default 1.
        max_moves: at most so many slots, over all layers, whose rank did not hold that expert; None: no limit. For a
            plan from ``current``.
        max_bytes: the same in bytes (needs ``cost``); None: no limit.
        cost: bytes and seconds (`CostModel`); needed by the ``"payoff"`` gate, and for the plan to know its bytes.
        gate: ``"payoff"``: rebalance when predicted seconds saved exceed predicted seconds spent, in the layers that
            together leave most seconds (``Plan.offers``). ``"always"``, the default: whenever the imbalance falls.
            ``"off"``: take what the policy says.
        forecast: how the load to come is foretold from several windows: ``"auto"``, the default, ``"window"`` or
            ``"last"`` (see ``load.forecast``).
        declared: the load to come where it is known, ``[L, E]`` or ``[T, L, E]``, in place of a forecast (for example
            replayed routing in reinforcement learning).
        rank_speed: float ``[R]``, how fast each rank is beside the others: a slow one gets fewer tokens, and imbalance
            is the slowest rank's time over that of all ranks at their speeds. For ``incremental``; None: all alike.
        sources: tokens by the node that they come from, ``[N, L, E]``; only the proportions in which an expert's tokens
            come from the nodes matter. None: from all alike. They count where crossing nodes has a cost
            (``cost=CostModel(crossing_seconds=...)``), for ``incremental``.
        trust: share of a plan's gain that is believed, in [0, 1], default 1: as much as came true of earlier ones
            (`track_record.TrackRecord` measures it). Below 1 it needs ``cost``: it weighs seconds saved.
        deadline: seconds from now on after which ``incremental`` begins with no further layer: those with most to gain
            are searched first, the others stay as in ``current``, and ``reason`` says how many. One layer is searched
            in any case. None, the default: all, and equal input gives an equal plan however busy the machine is. Other
            policies refuse it.

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
    settled = _settled(terms)
    request = _asked(load, topology, slots_per_rank, current, policy, layout, settled)
    return weigh(request, policy, POLICIES[policy](request), settled, began)


def _settled(terms: Mapping[str, Any]) -> Settled:
    """The terms given.

    Raises:
        PlanError: a name that `plan` had once.
        TypeError: a name that `plan` does not have.
    """
    known = [field.name for field in fields(Settled)]
    if "available" in terms:
        raise PlanError("plan has no argument 'available' any more: plan for the ranks that are left, Topology(ranks)")
    for name in terms:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TypeError(f"plan has no argument {name!r}: give {' or '.join(near or known)}")
    return Settled(**terms)


def _asked(
    load: ArrayLike,
    topology: Topology,
    slots_per_rank: int,
    current: Placement | None,
    policy: str,
    layout: str | None,
    settled: Settled,
) -> PlanRequest:
    """The question, checked."""
    deadline = Deadline(settled.deadline) if isinstance(settled.deadline, int | float) else None
    check_kinds(topology, policy, settled, current)
    windows = coarsen(checked_load(load))
    layout = checked_layout(policy, layout)
    check_gate(settled, current)
    check_trust(settled)
    check_deadline(settled, policy, current)
    check_whole(settled, slots_per_rank)
    check_sizes(windows.shape[1:], topology.num_ranks, slots_per_rank, settled.groups, layout, current)
    speed_R = checked_speed(settled, policy, topology.num_ranks)
    request = _request(windows, topology, slots_per_rank, current, layout, settled)
    one_known = np.ndim(load) == 3 and len(windows) == 1 and settled.declared is None
    request = replace(request, speed_R=speed_R, deadline=deadline, one_known=one_known)
    check_shapes(request)
    return request


def _request(
    windows: NDArray[np.float64],
    topology: Topology,
    slots_per_rank: int,
    current: Placement | None,
    layout: str,
    settled: Settled,
) -> PlanRequest:
    """What policies are asked: with the load to come."""
    expected = _expected_load(windows, settled, topology.num_ranks)
    cost = settled.cost
    priced = cost is not None and settled.gate == "payoff"
    share_LNE = None
    if settled.sources is not None:
        share_LNE = checked_sources(settled.sources, windows.shape[1], windows.shape[2], topology)
    return PlanRequest(
        load=windows,
        forecast=expected.expected,
        scenarios=expected.scenarios,
        mixes=expected.mixes,
        topology=topology,
        slots_per_rank=slots_per_rank,
        current=current,
        layout=layout,
        groups=settled.groups,
        max_moves=settled.max_moves,
        max_bytes=settled.max_bytes,
        home_bytes=cost.home_bytes if cost else 0,
        replica_bytes=cost.replica_bytes if cost else 0,
        seconds_per_imbalance=cost.seconds_per_imbalance(windows.shape[1], settled.trust) if cost and priced else None,
        crossing_price=cost.crossing_price if cost and topology.num_nodes > 1 else 0.0,
        source_share_LNE=share_LNE,
        declared=settled.declared is not None,
        trust=settled.trust,
        wanders_L=expected.wanders_L,
        weighs_noise=settled.gate == "payoff",
    )


def _expected_load(windows: NDArray[np.float64], settled: Settled, ranks: int) -> forecasts.ExpectedLoad:
    """The load that is declared, or else foretold."""
    if settled.declared is not None:
        known = checked_load(settled.declared, "declared load")
        if known.shape[1:] != windows.shape[1:]:
            raise PlanError(
                f"declared load has shape {known.shape[1:]}, the measured one {windows.shape[1:]}: give both alike"
            )
        known = coarsen(known)
        return forecasts.ExpectedLoad(known.mean(axis=0), known, known[:0], np.zeros(known.shape[1], dtype=bool))
    try:
        return forecasts.foretell(windows, settled.forecast, ranks)
    except ValueError as error:
        raise PlanError(str(error)) from None
