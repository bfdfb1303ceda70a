"""The judgement over what a policy found: which layers of it are worth their bytes, and whether any is.

A plan need not be taken whole. Layers gain by themselves, so their gains add up; the busiest rank is that of all of
them together, so what they cost does not.
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .cost import HYSTERESIS, CostModel
from .evaluate import expected_lower_bound, imbalance_by_scenario, imbalance_with_changes, moves_between
from .policies.free import rule_cost
from .terms import Settled
from .traffic import choose, crossing_share
from .types import MOVE_DESTINATION_SLOT, MOVE_LAYER, MOVE_SOURCE_RANK, Offer, Plan, PlanRequest

MOST_OFFERS = 12
ROUNDED = 1e-9
"""So far may sums in another order differ, as a share."""


def weigh(request: PlanRequest, policy: str, placement: Placement, settled: Settled, began: float) -> Plan:
    """Decide between the policy's placement, the part of it that is worth most seconds, and the current one."""
    current, topology, cost = request.current, request.topology, settled.cost
    before, after = _expected(request, current, placement)
    moves = moves_between(current, placement, topology)
    crossing_before = _crossing(request, current)
    crossing_after = _crossing(request, placement)
    offers: tuple[Offer, ...] = ()
    saved = spent = float("nan")
    falls, whole = True, ""
    if current is not None and before is not None:
        gain_L = _worth(request, before, crossing_before) - _worth(request, after, crossing_after)
        if settled.gate != "off" and (loses_L := gain_L < 0).any():  # a budget may end a search on its way
            placement, after = choose(~loses_L, placement, current), np.where(loses_L, before, after)
            moves, gain_L = moves[~loses_L[moves[:, MOVE_LAYER]]], np.maximum(gain_L, 0.0)
            crossing_after = _crossing(request, placement)
        falls = float(gain_L.mean()) > 0
        prefixes = LayerPrefixes(request, moves, gain_L, cost)
        taken = prefixes.best if settled.gate == "payoff" else len(prefixes.layers)
        offers = prefixes.offers(before, after, taken)
        if 0 < taken < len(prefixes.layers):
            last = offers[-1]
            whole = f" (all {len(last.layers)} layers: {last.seconds_saved:.3g} s for {last.seconds_spent:.3g} s)"
            is_in_L = np.isin(np.arange(request.num_layers), prefixes.layers[:taken])
            placement = choose(is_in_L, placement, current)
            moves = moves[is_in_L[moves[:, MOVE_LAYER]]]
            after, gain_L = np.where(is_in_L, after, before), np.where(is_in_L, gain_L, 0.0)
            if crossing_before is not None and crossing_after is not None:
                crossing_after = np.where(is_in_L, crossing_after, crossing_before)
        if cost is not None and cost.step_seconds > 0:
            saved = float(cost.seconds_per_imbalance(request.num_layers, settled.trust) * gain_L.sum())
            stall = cost.stall_seconds if len(moves) else 0.0
            spent = cost.transfer_seconds(moves, topology, request.slots_per_rank) + stall
    moving = len(np.unique(moves[:, MOVE_LAYER]))
    decision, reason = _decide(
        settled.gate, (before, after), falls, moving, (saved, spent), whole, len(request.doubted)
    )
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


def _expected(
    request: PlanRequest, current: Placement | None, placement: Placement
) -> tuple[NDArray[np.float64] | None, NDArray[np.float64]]:
    """float64 ``[L]`` each: imbalance of both placements, mean over the scenarios."""
    if current is None:
        return None, imbalance_by_scenario(request, placement).mean(axis=0)
    before_WL = imbalance_by_scenario(request, current)
    return before_WL.mean(axis=0), imbalance_with_changes(request, placement, current, before_WL).mean(axis=0)


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
    doubted: int,
) -> tuple[str, str]:
    (before, after), (saved, spent) = imbalance, seconds
    if before is None:
        return "rebalance", f"no placement stands yet; forecast imbalance {after.mean():.3f}"
    change = f"forecast imbalance {before.mean():.3f} -> {after.mean():.3f}, worst layer {before.max():.3f} -> "
    change += f"{after.max():.3f}"
    change += f", by moves in {moving} of {len(after)} layers"
    if moving == 0:
        why = f"no gain beyond noise, in {doubted} of {len(after)} layers" if doubted else "nothing to move"
        return "stay", f"{why}: forecast imbalance {before.mean():.3f}, worst layer {before.max():.3f}"
    if gate == "always" and not falls:
        return "stay", f"no gain: {change}"
    if gate == "payoff" and not saved > HYSTERESIS * spent:
        return "stay", f"would save {saved:.3g} s, less than {HYSTERESIS:g} x the {spent:.3g} s it costs; {change}"
    if gate == "payoff":
        return "rebalance", f"saves {saved:.3g} s for {spent:.3g} s{whole}; {change}"
    return "rebalance", change


class LayerPrefixes:
    """The first layers of a plan, for every number of them.

    Attributes:
        layers: int64 ``[M]``, those that move, most to gain for their bytes first; where seconds are known, those that
            leave most before the others.
        slots: int64 ``[M + 1]``, moved slots of the first 0, 1, ... M of them.
        saved, spent: float64 ``[M + 1]``, seconds; nan where unknown.
    """

    def __init__(
        self,
        request: PlanRequest,
        moves: NDArray[np.int32],
        gain_L: NDArray[np.float64],
        cost: CostModel | None,
    ) -> None:
        """Put the layers that move in order.

        Args:
            moves: as in ``Plan.moves``.
            gain_L: float64 ``[L]``, by how much each layer's imbalance falls, with what crossing nodes is worth.
        """
        layers = request.num_layers
        self.layers = np.unique(moves[:, MOVE_LAYER]).astype(np.int64)
        travels = moves[:, MOVE_SOURCE_RANK] != moves[:, MOVE_DESTINATION_SLOT] // request.slots_per_rank
        slots_L = np.bincount(moves[travels, MOVE_LAYER], minlength=layers)
        price_L, links_LN = slots_L.astype(np.float64), np.zeros((layers, 2 * request.topology.num_ranks))
        if cost is not None and (cost.home_bytes or cost.replica_bytes):
            links_LN = cost.seconds_by_layer(moves, layers, request.topology, request.slots_per_rank)
            price_L = links_LN.max(axis=1)
        gains, prices = gain_L[self.layers], price_L[self.layers]
        # What is free comes first, by gain; what loses comes last.
        worth = np.divide(gains, prices, out=np.where(gains > 0, np.inf, -np.inf), where=prices > 0)
        self.layers = self.layers[np.lexsort((-gains, -worth))]
        self.saved = self.spent = np.full(len(self.layers) + 1, np.nan)
        if cost is not None and cost.step_seconds > 0:
            saved_L = gain_L * cost.seconds_per_imbalance(layers, request.trust)
            first_M = _most_left(saved_L[self.layers], links_LN[self.layers], cost.stall_seconds)
            self.layers = np.concatenate([self.layers[first_M], self.layers[~first_M]])
            self.saved = np.concatenate([[0.0], saved_L[self.layers].cumsum()])
            busiest = links_LN[self.layers].cumsum(axis=0).max(axis=1, initial=0.0)
            self.spent = np.concatenate([[0.0], busiest + cost.stall_seconds])
        self.slots = np.concatenate([[0], slots_L[self.layers].cumsum()])

    @property
    def best(self) -> int:
        """The number of layers with which most seconds are left, each that is spent counted `HYSTERESIS` times."""
        return int((self.saved - HYSTERESIS * self.spent).argmax())

    def offers(self, before_L: NDArray[np.float64], after_L: NDArray[np.float64], taken: int) -> tuple[Offer, ...]:
        """At most `MOST_OFFERS`, at even distances, and what is taken; the first is to stay, the last the whole plan.

        Args:
            before_L, after_L: float64 ``[L]``, imbalance of the current placement and of the plan's.
            taken: number of layers.
        """
        falls = np.concatenate([[0.0], (before_L - after_L)[self.layers].cumsum()]) / len(before_L)
        ends = {*np.linspace(0, len(self.layers), MOST_OFFERS - 1).round().astype(int).tolist(), taken}
        return tuple(
            Offer(
                layers=tuple(sorted(self.layers[:end].tolist())),
                moved_slots=int(self.slots[end]),
                imbalance=float(before_L.mean() - falls[end]),
                seconds_saved=float(self.saved[end]),
                seconds_spent=float(self.spent[end]),
            )
            for end in sorted(ends)
        )


def _most_left(saved_M: NDArray[np.float64], links_MN: NDArray[np.float64], stall: float) -> NDArray[np.bool_]:
    """bool ``[M]``: layers with which most seconds are left, each that is spent counted `HYSTERESIS` times.

    The best of all first ones, or better ones reached from there or from all layers, by one layer in or out at a time:
    layers that use other links than one that does not pay may pay together.

    Args:
        saved_M: seconds that each saves, most for its bytes first.
        links_MN: seconds of each on every link.
        stall: seconds of any rebalance.
    """
    number, least = len(saved_M), ROUNDED * float(np.abs(saved_M).sum())
    first = np.tril(np.ones((number + 1, number), dtype=bool), -1)
    left_X = np.concatenate([[0.0], saved_M.cumsum() - HYSTERESIS * (links_MN.cumsum(axis=0).max(axis=1) + stall)])
    best_M, most = first[left_X.argmax()], float(left_X.max())
    for chosen_M, left in ((best_M.copy(), most), (first[-1].copy(), float(left_X[-1]))):
        links_N, saved, in_or_out = links_MN[chosen_M].sum(axis=0), float(saved_M[chosen_M].sum()), True
        while in_or_out and number:
            sign_M = np.where(chosen_M, -1.0, 1.0)
            spent_M = (links_N + sign_M[:, None] * links_MN).max(axis=1) + stall
            left_M = saved + sign_M * saved_M - HYSTERESIS * spent_M
            left_M[chosen_M.sum() + sign_M == 0] = 0.0  # nothing moves then
            layer = int(left_M.argmax())
            in_or_out = left_M[layer] > left + least
            if in_or_out:
                left, chosen_M[layer] = float(left_M[layer]), not chosen_M[layer]
                links_N, saved = links_N + sign_M[layer] * links_MN[layer], saved + sign_M[layer] * saved_M[layer]
        if left > most + least:
            best_M, most = chosen_M, left
    return np.asarray(best_M)
