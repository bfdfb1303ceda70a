"""The judgement over what a policy found: which layers of it are worth their bytes, and how much of what plans promised
came true.

A plan need not be taken whole. Gains of layers add up; their costs do not, since the busiest rank is that of all layers
together. Loads are counted by logical expert, so what would have been without a plan can be computed afterwards.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from .cost import HYSTERESIS, MOVE_LAYER, CostModel
from .evaluate import crossing_share, lower_bound, moves_between, predicted_imbalance
from .types import Plan, PlanRequest

FloatArray = NDArray[np.float64]

HELD = {
    "static": "policy='static' moves nothing",
    "limits": "max_moves or max_bytes leaves room for no move",
    "noise": "no gain beyond noise",
    "trust": "earlier plans saved too little of what they predicted for a move to pay",
    "price": "no gain that pays for its transfer",
}
"""Codes of why layers stay though a better placement is known, the first that holds any layer before the others."""
JUDGED = 10
"""Plans that are judged at a time."""
LEAST_PROMISE = 0.01
"""A plan that promises less is made for something else (tokens that cross nodes), and is not judged by imbalance."""
FADING, FORGOTTEN = 0.95, 0.05
"""Weight that older plans keep at each decision, so that after a bad time another try is made; less is forgotten."""
PRIOR = 0.1
"""Of an average plan that kept its promise: what is believed before anything is known."""
LEAST = 0.02
"""Of the trust."""


def weigh(request: PlanRequest, placement: Placement, began: float) -> Plan:
    """Return a ``Plan`` to take the policy's placement, some of its layers, or to stay with the current placement.
    Layers that gain are taken; with the ``"payoff"`` gate, those that together pay; with ``"off"``, all. ``began``: the
    ``time.perf_counter()`` at which planning began."""
    current, topology, cost = request.current, request.topology, request.cost
    before, after = _expected(request, placement)
    moves = moves_between(current, placement, topology)
    crossing_before, crossing_after = _crossing(request, current), _crossing(request, placement)
    saved = spent = float("nan")
    falls = True
    if current is not None and before is not None:
        gain_L = before - after + request.crossing_price * (crossing_before - crossing_after)
        taken_L = gain_L >= (-np.inf if request.gate == "off" else 0.0)  # a budget may end a search on its way
        if request.gate == "payoff" and cost is not None:
            pays_L = _paying(request, cost, moves[taken_L[moves[:, MOVE_LAYER]]], np.maximum(gain_L, 0.0))
            taken_L &= pays_L | ~pays_L.any()  # where none pays the plan is refused whole
        if not taken_L.all():
            placement, moves = _layers_of(taken_L, placement, current), moves[taken_L[moves[:, MOVE_LAYER]]]
            after, gain_L = np.where(taken_L, after, before), np.where(taken_L, gain_L, 0.0)
            crossing_after = np.where(taken_L, crossing_after, crossing_before)
        falls = float(gain_L.mean()) > 0
        if cost is not None and cost.step_seconds > 0:
            saved = float(cost.seconds_per_imbalance(request.num_layers, request.trust) * gain_L.sum())
            stall = cost.stall_seconds if len(moves) else 0.0
            spent = cost.transfer_seconds(moves, topology, request.slots_per_rank) + stall
    moving = len(np.unique(moves[:, MOVE_LAYER]))
    decision, code, reason = _decide(request, before, after, falls, moving, [saved, spent])
    if current is not None and request.counts_crossing:
        reason += f"; tokens that cross nodes {crossing_before.mean():.1%} -> {crossing_after.mean():.1%}"
    if decision == "stay" and current is not None:
        placement, moves, after = current, moves[:0], after if before is None else before
    intra = inter = 0
    if cost is not None:
        size, between = cost.bytes_moved(moves, topology, request.slots_per_rank)
        intra, inter = int(size[~between].sum()), int(size[between].sum())
    return Plan(
        policy=request.policy,
        placement=placement,
        current=current,
        moves=moves,
        imbalance_before=before,
        imbalance_after=after,
        lower_bound=_bound(request),
        bytes_intra_node=intra,
        bytes_inter_node=inter,
        seconds_saved=saved,
        seconds_spent=spent,
        decision=decision,
        reason=reason,
        code=code,
        plan_seconds=time.perf_counter() - began,
    )


def _expected(request: PlanRequest, placement: Placement) -> tuple[FloatArray | None, FloatArray]:
    """float64 ``[L]`` each: imbalance of the current placement and of another, mean over the scenarios."""
    windows, current = request.to_come.windows, request.current
    if current is None:
        return None, predicted_imbalance(windows, placement, request.speed_R).mean(axis=0)
    before = predicted_imbalance(windows, current, request.speed_R).mean(axis=0)
    after, changed_L = before.copy(), (placement.physical_to_logical != current.physical_to_logical).any(axis=1)
    if changed_L.any():
        home = None if placement.home is None else placement.home[changed_L]
        part = Placement(placement.physical_to_logical[changed_L], placement.num_experts, placement.num_ranks, home)
        after[changed_L] = predicted_imbalance(windows[:, changed_L], part, request.speed_R).mean(axis=0)
    return before, after


def _bound(request: PlanRequest) -> FloatArray:
    """float64 ``[L]``: mean over the scenarios, what no placement gets below: ranks below full speed take no less time
    than fast ones would."""
    ranks, windows, speed_R = request.topology.num_ranks, request.to_come.windows, request.speed_R
    bounds = lower_bound(windows.reshape(-1, request.num_experts), ranks, request.slots_per_rank)
    speeds = ranks if speed_R is None else speed_R.sum()
    return np.asarray(np.maximum(bounds * speeds / ranks, 1.0).reshape(windows.shape[:2]).mean(axis=0))


def _layers_of(first_L: NDArray[np.bool_], one: Placement, other: Placement) -> Placement:
    """Return layers of ``one`` where ``first_L`` (bool ``[L]``) holds, else of ``other``; both of one layout."""
    home = None
    if one.home is not None and other.home is not None:
        home = np.where(first_L[:, None], one.home, other.home)
    slots = np.where(first_L[:, None], one.physical_to_logical, other.physical_to_logical)
    return Placement(slots, one.num_experts, one.num_ranks, home, other.epoch)


def _crossing(request: PlanRequest, placement: Placement | None) -> FloatArray:
    """float64 ``[L]``, the share of tokens that cross nodes; zeros where nobody asks."""
    if placement is None or not request.counts_crossing:
        return np.zeros(request.num_layers)
    return crossing_share(request.forecast, placement, request.topology, request.source_share_LNE)


def _paying(request: PlanRequest, cost: CostModel, moves: NDArray[np.int32], gain_L: FloatArray) -> NDArray[np.bool_]:
    """bool ``[L]``: the layers with which most seconds are left, of those that gain most for their bytes.

    Each second that is spent counts `HYSTERESIS` times.

    Args:
        moves: as in ``Plan.moves``.
        gain_L: by how much each layer's imbalance falls, with what crossing nodes is worth.
    """
    links_LN = cost.seconds_by_layer(moves, len(gain_L), request.topology, request.slots_per_rank)
    saved_L, price_L = gain_L * cost.seconds_per_imbalance(len(gain_L), request.trust), links_LN.max(axis=1)
    # What is free comes first, by gain; what gains nothing comes last.
    worth_L = np.divide(saved_L, price_L, out=np.where(saved_L > 0, np.inf, -np.inf), where=price_L > 0)
    order = np.lexsort((-saved_L, -worth_L))
    spent = links_LN[order].cumsum(axis=0).max(axis=1) + cost.stall_seconds
    left = np.concatenate([[0.0], saved_L[order].cumsum() - HYSTERESIS * spent])
    taken_L = np.zeros(len(gain_L), dtype=bool)
    taken_L[order[: left.argmax()]] = True
    return taken_L


def _decide(
    request: PlanRequest, before: FloatArray | None, after: FloatArray, falls: bool, moving: int, seconds: list[float]
) -> tuple[str, str, str]:
    saved, spent = seconds
    if before is None:
        return "rebalance", "first placement", f"there is no placement yet; forecast imbalance {after.mean():.3f}"
    if moving == 0:
        held = list(request.held.values())
        code = next((code for code in HELD if code in held), "nothing to move")
        why = f"{HELD[code]}, in {held.count(code)} of {len(after)} layers" if held else code
        return "stay", code, f"{why}: forecast imbalance {before.mean():.3f}, worst layer {before.max():.3f}"
    change = f"forecast imbalance {before.mean():.3f} -> {after.mean():.3f}, worst layer {before.max():.3f} -> "
    change += f"{after.max():.3f}, by moves in {moving} of {len(after)} layers"
    if request.gate == "always" and not falls:
        return "stay", "no gain", f"no gain: {change}"
    if request.gate == "payoff" and not saved > HYSTERESIS * spent:
        less = f"would save {saved:.3g} s, less than {HYSTERESIS:g} x the {spent:.3g} s it costs; {change}"
        return "stay", "does not pay", less
    if request.gate == "payoff":
        return "rebalance", "pays", f"saves {saved:.3g} s for {spent:.3g} s; {change}"
    return "rebalance", "imbalance falls", change


@dataclass
class _Promise:
    """Imbalance by which a plan is to fall, the sum of what it fell by, and how many loads judged it."""

    placements: tuple[Placement, Placement] | None
    promised: float
    kept: float = 0.0
    judged: int = 0
    weight: float = 1.0


class TrackRecord:
    """Keeps the plans of a job, and judges by the loads that follow whether they lowered imbalance as they promised."""

    def __init__(self, horizon: int = JUDGED, speed_R: NDArray[np.float64] | None = None) -> None:
        """Begin without any plans; each promises its gain for ``horizon`` decisions, on ranks of these speeds."""
        self._horizon = max(1, horizon)
        self._speed_R = speed_R
        self._promises: list[_Promise] = []

    def note(self, plan: Plan) -> None:
        """Remember a plan and the fall of imbalance, mean over layers, that it promises. A plan that stays, that has no
        current placement, or that promises less than `LEAST_PROMISE` is ignored."""
        if plan.decision == "rebalance" and plan.current is not None and plan.imbalance_before is not None:
            promised = float((plan.imbalance_before - plan.imbalance_after).mean())
            if promised >= LEAST_PROMISE:
                self._promises.append(_Promise((plan.current, plan.placement), promised))

    def observe(self, load: NDArray[np.float64]) -> None:
        """Add up by how much each of the newest plans lowered this load's imbalance. All plans lose weight; those of
        little weight are forgotten.

        Args:
            load: float64 ``[L, E]``, tokens since the last decision; all zero: no plan is judged.
        """
        for promise in self._promises:
            promise.weight *= FADING
        self._promises = [promise for promise in self._promises if promise.weight > FORGOTTEN]
        for place, promise in enumerate(reversed(self._promises)):
            if place >= JUDGED or promise.judged == self._horizon:
                promise.placements = None  # they are large
            if promise.placements is not None and load.any():
                before, after = (predicted_imbalance(load, one, self._speed_R).mean() for one in promise.placements)
                promise.kept += float(before - after)
                promise.judged += 1

    def judgement(self, seconds: float) -> dict[str, float]:
        """Return ``judged_plans``, how many of the remembered plans were judged; ``judged_decisions``, by how many
        loads, summed over plans; and ``predicted_seconds`` and ``true_seconds``, what these plans promised and saved,
        at ``seconds`` per unit of imbalance (mean over layers)."""
        rows = self._judged()
        return {
            "judged_plans": len(rows),
            "judged_decisions": int(sum(judged for _, _, judged, _ in rows)),
            "predicted_seconds": seconds * sum(promised for promised, _, _, _ in rows),
            "true_seconds": seconds * sum(kept / judged for _, kept, judged, _ in rows),
        }

    def _judged(self) -> list[list[float]]:
        """Return judged plans: promised gain, sum of true gains, number of them, weight."""
        return [[one.promised, one.kept, one.judged, one.weight] for one in self._promises if one.judged]

    @property
    def trust(self) -> float:
        """Return the share of promised gains that came true, in ``[LEAST, 1]``. Newer plans weigh more. 1: no plan is
        judged yet."""
        rows = self._judged()
        if not rows:
            return 1.0
        promised_N, kept_N, judged_N, weight_N = np.array(rows).T
        promised = float(weight_N @ promised_N)
        prior = PRIOR * promised / float(weight_N.sum())
        return float(np.clip((weight_N @ (kept_N / judged_N) + prior) / (promised + prior), LEAST, 1.0))
