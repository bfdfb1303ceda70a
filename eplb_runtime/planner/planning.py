"""``plan``: checks the question, asks a policy, weighs the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..load import forecast as forecasts
from ..load.forecast import coarsen
from ..placement import Placement
from ..topology import Topology
from .available import lost_experts, on_the_ranks_left, without_gone_ranks
from .checks import (
    check_current,
    check_gate,
    check_options,
    check_shapes,
    check_sizes,
    check_whole,
    checked_layout,
    checked_load,
    checked_speed,
)
from .cost import HYSTERESIS
from .evaluate import expected_imbalance, expected_lower_bound
from .gate import Judged, choose, judge_all
from .policies import POLICIES
from .policies.hierarchical import rule_cost
from .terms import Settled, Terms
from .traffic import checked_sources, crossing_share
from .types import Plan, PlanError, PlanRequest


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
        load: tokens per logical expert, ``[L, E]``, or ``[T, L, E]`` for T successive windows, oldest first.
        topology: ranks and nodes of the EP group.
        slots_per_rank: S; in the home layout E/R homes and the rest replica slots.
        current: the placement that stands now; None: nothing stands yet, every slot is a move.
        policy: a name in ``POLICIES``.
        layout: ``"home"`` or ``"free"``; None: the policy's own.
        groups: expert groups of group-limited routing, for the policies that know them; default 1.
        max_moves: at most so many slots, over all layers, whose rank did not hold that expert; None: no limit. For a
            plan from ``current``; what ranks that are gone held moves besides.
        max_bytes: the same in bytes (needs ``cost``); None: no limit.
        cost: bytes and seconds (`CostModel`); needed by the ``"payoff"`` gate, and for the plan to know its bytes.
        gate: how one of the placements is chosen that the policy offers (``Plan.offers``). ``"payoff"``: the one that
            saves most seconds beyond those it spends; none, if all spend more than they save. ``"always"``, the
            default, knows no seconds: the fewest moves that are as good as the best, within the noise of the load.
            ``"off"``: the best that the policy knows.
        trust: the share of the seconds that plans promised and that came true, for ``"payoff"``; 1, the default: all.
        forecast: how the load to come is foretold from several windows: ``"auto"``, the default, ``"window"``,
            ``"last"``, ``"average"`` or ``"trend"`` (see ``load.forecast``).
        declared: the load to come where it is known, ``[L, E]`` or ``[T, L, E]``, in place of a forecast (for example
            replayed routing in reinforcement learning).
        rank_speed: float ``[R]``, how fast each rank is beside the others: a slow one gets fewer tokens, and imbalance
            is the slowest rank's time over that of all ranks at their speeds. For ``incremental``; None: all alike.
        available: bool ``[R]``; ranks that are False are gone, and every expert gets a place elsewhere, by the fewest
            moves. With ``free``, slots of ranks that are gone keep what stands there; nobody reads them. With
            ``incremental``, whose homes are shared out evenly, the plan's placement is for the ranks that are left,
            numbered anew in their order, on which a job goes on from its checkpoint. None: all are there.
        sources: tokens by where they come from, ``[N, L, E]`` by node or ``[R, L, E]`` by rank; only the proportions in
            which an expert's tokens come from the nodes matter. None: from all alike. They count where crossing nodes
            has a cost (``cost=CostModel(crossing_seconds=...)``), for ``incremental``.
        options: further settings of single policies.

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
        [[0, 1, 1, 0, 2, 3, 3, 2]]
    """
    began = time.perf_counter()
    settled = Settled(**terms)
    windows = coarsen(checked_load(load))
    layout = checked_layout(policy, layout)
    check_current(current)
    check_gate(settled, current)
    check_whole(settled, slots_per_rank)
    check_options(settled)
    check_sizes(windows.shape[1:], topology.num_ranks, slots_per_rank, settled.groups, layout, current)
    speed_R = checked_speed(settled, policy, topology.num_ranks)
    request = replace(_request(windows, topology, slots_per_rank, current, layout, settled), speed_R=speed_R)
    check_shapes(request)
    everybody = speed_R is None or bool(speed_R.all())
    if layout == "home" and not everybody:
        return _on_fewer_ranks(request, policy, settled, began)
    path = POLICIES[policy](request) if everybody else without_gone_ranks(request, POLICIES[policy])
    return _weigh(request, policy, path, settled, began)


def _request(
    windows: NDArray[np.float64],
    topology: Topology,
    slots_per_rank: int,
    current: Placement | None,
    layout: str,
    settled: Settled,
) -> PlanRequest:
    """What policies are asked: with the load to come."""
    come = _load_to_come(windows, settled, topology.num_ranks)
    cost = settled.cost
    share_LNE = None
    if settled.sources is not None:
        share_LNE = checked_sources(settled.sources, windows.shape[1], windows.shape[2], topology)
    return PlanRequest(
        load=windows,
        forecast=come.expected,
        scenarios=come.scenarios,
        mixes=come.mixes,
        judged=come.judged,
        calm=come.calm,
        topology=topology,
        slots_per_rank=slots_per_rank,
        current=current,
        layout=layout,
        groups=settled.groups,
        max_moves=settled.max_moves,
        max_bytes=settled.max_bytes,
        home_bytes=cost.home_bytes if cost else 0,
        replica_bytes=cost.replica_bytes if cost else 0,
        crossing_price=cost.crossing_price if cost and topology.num_nodes > 1 else 0.0,
        source_share_LNE=share_LNE,
        options=dict(settled.options or {}),
    )


def _load_to_come(windows: NDArray[np.float64], settled: Settled, ranks: int) -> forecasts.Foretold:
    """Declared loads and their mean, or else what is foretold."""
    if settled.declared is not None:
        known = checked_load(settled.declared, "declared load")
        if known.shape[1:] != windows.shape[1:]:
            raise PlanError(
                f"declared load has shape {known.shape[1:]}, the measured one {windows.shape[1:]}: give both alike"
            )
        known = coarsen(known)
        return forecasts.Foretold(known.mean(axis=0), known, known[:0], known, known)
    try:
        return forecasts.foretell(windows, settled.forecast, ranks)
    except ValueError as error:
        raise PlanError(str(error)) from None


def _on_fewer_ranks(request: PlanRequest, policy: str, settled: Settled, began: float) -> Plan:
    """In the home layout, for the ranks that are left."""
    smaller, placement, moves = on_the_ranks_left(request, POLICIES[policy])
    made = _weigh(smaller, policy, (placement,), settled, began)
    if request.current is None:
        return made
    left, ranks = smaller.topology.num_ranks, request.topology.num_ranks
    reason = (
        f"{left} of {ranks} ranks are left, numbered anew: {len(moves)} experts whose homes are gone come from a "
        f"checkpoint; mean imbalance will be {made.imbalance_after.mean():.3f}"
    )
    return replace(made, current=request.current, moves=moves, reason=reason)


def _weigh(request: PlanRequest, policy: str, path: Sequence[Placement], settled: Settled, began: float) -> Plan:
    """Choose among the placements that the policy offers."""
    current, topology, cost = request.current, request.topology, settled.cost
    lost = 0 if current is None else lost_experts(current, request.speed_R)
    judged = judge_all(request, path, cost, bool(lost))
    chosen = judged[-1] if current is None or lost else judged[choose(request, judged, settled)]
    before = None if current is None or lost else expected_imbalance(request, current)
    crossing_before = None if lost else _crossing(request, current)
    reached, crossing_reached = expected_imbalance(request, chosen.placement), _crossing(request, chosen.placement)
    decision, reason = _decision(settled, judged, chosen, before, reached)
    if lost:
        reason = f"{lost} experts stand only on ranks that are gone; mean imbalance will be {reached.mean():.3f}"
    if crossing_before is not None and crossing_reached is not None:
        reason += f"; tokens that cross nodes {crossing_before.mean():.1%} -> {crossing_reached.mean():.1%}"
    if policy == "hierarchical":
        reason += "; " + rule_cost(request, chosen.placement)
    placement = current if decision == "stay" and current is not None else chosen.placement
    intra = inter = 0
    if cost is not None:
        sent, _ = cost.bytes_by_link(chosen.moves, topology, request.slots_per_rank)
        intra, inter = (int(total) for total in sent.sum(axis=0))
    return Plan(
        policy=policy,
        placement=placement,
        current=current,
        moves=chosen.moves,
        imbalance_before=before,
        imbalance_after=reached,
        lower_bound=expected_lower_bound(request),
        bytes_intra_node=intra,
        bytes_inter_node=inter,
        seconds_saved=chosen.saved,
        seconds_spent=chosen.spent,
        decision=decision,
        reason=reason,
        plan_seconds=time.perf_counter() - began,
        crossing_before=crossing_before,
        crossing_after=crossing_reached,
        offers=tuple(one.offer for one in judged),
    )


def _crossing(request: PlanRequest, placement: Placement | None) -> NDArray[np.float64] | None:
    if placement is None or not (request.crossing_price or request.source_share_LNE is not None):
        return None
    return crossing_share(request.forecast, placement, request.topology, request.source_share_LNE)


def _decision(
    settled: Settled,
    judged: Sequence[Judged],
    chosen: Judged,
    before: NDArray[np.float64] | None,
    after: NDArray[np.float64],
) -> tuple[str, str]:
    """The decision and its reason."""
    if before is None:
        return "rebalance", f"no placement stands yet; mean imbalance will be {after.mean():.3f}"
    stands = f"mean imbalance {before.mean():.3f}, worst {before.max():.3f}"
    if len(chosen.moves):
        change = f"mean imbalance {before.mean():.3f} -> {after.mean():.3f}, worst {before.max():.3f} -> "
        change += f"{after.max():.3f}, by moves in {chosen.moving_layers} of {len(after)} layers"
        if settled.gate != "payoff":
            return "rebalance", change
        return "rebalance", f"saves {chosen.saved:.3g} s for {chosen.spent:.3g} s; {change}"
    moving = [one for one in judged if len(one.moves)]
    if not moving:
        return "stay", f"nothing to move: {stands}"
    if settled.gate != "payoff":
        return "stay", f"no gain: {stands}, of the best placement known {moving[-1].worth_WL.mean():.3f}"
    best = max(moving, key=lambda one: settled.trust * one.saved - HYSTERESIS * one.spent)
    trusted = "" if settled.trust == 1.0 else f"{settled.trust:.2g} x "
    return "stay", (
        f"would save {trusted}{best.saved:.3g} s, less than {HYSTERESIS:g} x the {best.spent:.3g} s it costs; {stands}"
    )
