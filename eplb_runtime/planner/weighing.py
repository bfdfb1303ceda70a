"""The judgement over what a policy found: which layers of it are worth their bytes, and whether any is."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .available import lost_experts
from .cost import HYSTERESIS
from .evaluate import expected_imbalance, expected_lower_bound, moves_between
from .offers import LayerPrefixes
from .policies.hierarchical import rule_cost
from .terms import Settled
from .traffic import crossing_share
from .types import MOVE_LAYER, Offer, Plan, PlanRequest


def weigh(request: PlanRequest, policy: str, placement: Placement, settled: Settled, began: float) -> Plan:
    """Decide between the policy's placement, the part of it that is worth most seconds, and the current one."""
    current, topology, cost = request.current, request.topology, settled.cost
    after = expected_imbalance(request, placement)
    before = None if current is None else expected_imbalance(request, current)
    moves = moves_between(current, placement, topology, request.speed_R)
    lost = 0 if current is None else lost_experts(current, request.speed_R)
    before = None if lost else before
    crossing_before = None if lost else _crossing(request, current)
    crossing_after = _crossing(request, placement)
    offers: tuple[Offer, ...] = ()
    saved = spent = float("nan")
    falls, whole = True, ""
    if current is not None and before is not None:
        gain_L = _worth(request, before, crossing_before) - _worth(request, after, crossing_after)
        falls = float(gain_L.mean()) > 0
        prefixes = LayerPrefixes(request, moves, gain_L, cost)
        taken = prefixes.best if settled.gate == "payoff" else len(prefixes.layers)
        offers = prefixes.offers(before, after, taken)
        if 0 < taken < len(prefixes.layers):
            last = offers[-1]
            whole = f" (all {len(last.layers)} layers: {last.seconds_saved:.3g} s for {last.seconds_spent:.3g} s)"
            is_in_L = np.isin(np.arange(request.num_layers), prefixes.layers[:taken])
            placement = _with_layers(current, placement, is_in_L)
            moves = moves[is_in_L[moves[:, MOVE_LAYER]]]
            after, gain_L = np.where(is_in_L, after, before), np.where(is_in_L, gain_L, 0.0)
            if crossing_before is not None and crossing_after is not None:
                crossing_after = np.where(is_in_L, crossing_after, crossing_before)
        if cost is not None and cost.step_seconds > 0:
            saved = float(cost.seconds_per_imbalance(request.num_layers, settled.trust) * gain_L.sum())
            spent = cost.transfer_seconds(moves, topology, request.slots_per_rank) + cost.stall_seconds
    moving = len(np.unique(moves[:, MOVE_LAYER]))
    decision, reason = _decide(settled.gate, (before, after), falls, moving, (saved, spent), whole)
    if lost:
        reason = f"{lost} experts stand only on ranks that are gone; forecast imbalance {after.mean():.3f}"
    if crossing_before is not None and crossing_after is not None:
        reason += f"; tokens that cross nodes {crossing_before.mean():.1%} -> {crossing_after.mean():.1%}"
    if request.deadline is not None and request.deadline.left_out:
        reason += f"; no time was left for {len(request.deadline.left_out)} of {request.num_layers} layers"
    if policy == "hierarchical":
        reason += "; " + rule_cost(request, placement)
    if decision == "stay" and current is not None:
        placement, moves = current, moves[:0]
        after, crossing_after = after if before is None else before, crossing_before
    intra = inter = 0
    if cost is not None:
        sent, _ = cost.bytes_by_link(moves, topology, request.slots_per_rank)
        intra, inter = (int(total) for total in sent.sum(axis=0))
    return Plan(
        policy=policy,
        placement=placement,
        current=current,
        moves=moves,
        imbalance_before=before,
        imbalance_after=after,
        lower_bound=expected_lower_bound(request),
        bytes_intra_node=intra,
        bytes_inter_node=inter,
        seconds_saved=saved,
        seconds_spent=spent,
        decision=decision,
        reason=reason,
        plan_seconds=time.perf_counter() - began,
        crossing_before=crossing_before,
        crossing_after=crossing_after,
        offers=offers,
    )


def _with_layers(current: Placement, target: Placement, is_in_L: NDArray[np.bool_]) -> Placement:
    """``current``, and these layers of ``target``, which has the same layout."""
    slots = np.where(is_in_L[:, None], target.physical_to_logical, current.physical_to_logical)
    home = None
    if current.home is not None and target.home is not None:
        home = np.where(is_in_L[:, None], target.home, current.home)
    return Placement(slots, target.num_experts, target.num_ranks, home, target.epoch)


def _crossing(request: PlanRequest, placement: Placement | None) -> NDArray[np.float64] | None:
    if placement is None or not (request.crossing_price or request.source_share_LNE is not None):
        return None
    return crossing_share(request.forecast, placement, request.topology, request.source_share_LNE)


def _worth(
    request: PlanRequest, imbalance: NDArray[np.float64], crossing: NDArray[np.float64] | None
) -> NDArray[np.float64]:
    """Imbalance and, where it has a price, crossing tokens."""
    return imbalance if crossing is None else imbalance + request.crossing_price * crossing


def _decide(
    gate: str,
    imbalance: tuple[NDArray[np.float64] | None, NDArray[np.float64]],
    falls: bool,
    moving: int,
    seconds: tuple[float, float],
    whole: str,
) -> tuple[str, str]:
    (before, after), (saved, spent) = imbalance, seconds
    if before is None:
        return "rebalance", f"no placement stands yet; forecast imbalance {after.mean():.3f}"
    change = f"forecast imbalance {before.mean():.3f} -> {after.mean():.3f}, worst layer {before.max():.3f} -> "
    change += f"{after.max():.3f}"
    change += f", by moves in {moving} of {len(after)} layers"
    if moving == 0:
        return "stay", f"nothing to move: forecast imbalance {before.mean():.3f}, worst layer {before.max():.3f}"
    if gate == "always" and not falls:
        return "stay", f"no gain: {change}"
    if gate == "payoff" and not saved > HYSTERESIS * spent:
        return "stay", f"would save {saved:.3g} s, less than {HYSTERESIS:g} x the {spent:.3g} s it costs; {change}"
    if gate == "payoff":
        return "rebalance", f"saves {saved:.3g} s for {spent:.3g} s{whole}; {change}"
    return "rebalance", change
