"""``plan``: checks the question, asks a policy, weighs the answer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..load import forecast as forecasts
from ..load.forecast import coarsen
from ..placement import Placement
from ..topology import Topology
from .cost import HYSTERESIS, CostModel
from .evaluate import expected_imbalance, expected_lower_bound, moves_between
from .policies import LAYOUTS, POLICIES
from .policies.hierarchical import rule_cost
from .types import MOVE_LAYER, Plan, PlanError, PlanRequest

GATES = ("payoff", "always", "off")
MOST_SLOTS = 2**26
"""Slots over all layers that are planned for; 100 layers on 1,024 ranks of 64 slots are a tenth of it."""


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
    gate: Literal["payoff", "always", "off"] = "always",
    forecast: str = "auto",
    declared: ArrayLike | None = None,
    options: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a placement of experts for a measured load.

    Args:
        load: tokens per logical expert, ``[L, E]``, or ``[T, L, E]`` for T successive windows, oldest first.
        topology: ranks and nodes of the EP group.
        slots_per_rank: S; in the home layout E/R homes and the rest replica slots.
        current: the placement that stands now; None: nothing stands yet, every slot is a move.
        policy: a name in ``POLICIES``.
        layout: ``"home"`` or ``"free"``; None: the policy's own.
        groups: expert groups of group-limited routing, for the policies that know them.
        max_moves: at most so many slots, over all layers, whose rank did not hold that expert; None: no limit.
        max_bytes: the same in bytes (needs ``cost``); None: no limit.
        cost: bytes and seconds; needed by the ``"payoff"`` gate, and for the plan to know its bytes.
        gate: ``"payoff"``: rebalance when predicted seconds saved exceed predicted seconds spent. ``"always"``:
            whenever the imbalance falls. ``"off"``: take what the policy says.
        forecast: how the load to come is foretold from several windows: ``"auto"``, ``"window"``, ``"last"``,
            ``"average"`` or ``"trend"`` (see ``load.forecast``).
        declared: the load to come where it is known, ``[L, E]`` or ``[T, L, E]``, in place of a forecast (for example
            replayed routing in reinforcement learning).
        options: further settings of single policies.

    Returns:
        The plan; a ``"stay"`` plan has no moves and the current placement.

    Raises:
        PlanError: the input is not usable; one line that says what is wrong and how to mend it.
    """
    began = time.perf_counter()
    windows = coarsen(checked_load(load))
    layout = _checked_layout(policy, layout)
    if gate not in GATES:
        raise PlanError(f"gate={gate!r} is unknown; choose one of: {', '.join(GATES)}")
    if gate == "payoff" and (cost is None or current is None or cost.step_seconds <= 0):
        raise PlanError("gate='payoff' needs current= and a cost= with step_seconds: give both, or gate='always'")
    _check_sizes(windows.shape[1], windows.shape[2], topology.num_ranks, slots_per_rank, groups, layout, current)
    scenarios, mixes = _load_to_come(windows, forecast, declared, topology.num_ranks)
    request = PlanRequest(
        load=windows,
        forecast=scenarios.mean(axis=0),
        scenarios=scenarios,
        mixes=mixes,
        topology=topology,
        slots_per_rank=slots_per_rank,
        current=current,
        layout=layout,
        groups=groups,
        max_moves=max_moves,
        max_bytes=max_bytes,
        home_bytes=cost.home_bytes if cost else 0,
        replica_bytes=cost.replica_bytes if cost else 0,
        seconds_per_imbalance=cost.seconds_per_imbalance(windows.shape[1]) if cost and gate == "payoff" else None,
        options=dict(options or {}),
    )
    _check_shapes(request)
    placement = POLICIES[policy](request)
    return _weigh(request, policy, placement, cost, gate, began)


def checked_load(load: ArrayLike, name: str = "load") -> NDArray[np.float64]:
    """``load`` as float64 ``[T, L, E]``.

    Raises:
        PlanError: not numbers, wrong shape, empty, NaN, infinite or negative; the message names the first place.
    """
    try:
        array = np.asarray(load, dtype=np.float64)
    except (TypeError, ValueError):
        raise PlanError(
            f"{name} is not an array of numbers: give [layers, experts] or [windows, layers, experts]"
        ) from None
    if array.ndim not in (2, 3) or array.size == 0:
        raise PlanError(
            f"{name} has shape {array.shape}: give [layers, experts] or [windows, layers, experts], not empty"
        )
    array = array if array.ndim == 3 else array[None]
    for bad, what in ((~np.isfinite(array), "not a finite number"), (array < 0, "negative")):
        if bad.any():
            window, layer, expert = np.argwhere(bad)[0]
            raise PlanError(
                f"{name} of window {window}, layer {layer}, expert {expert} is {array[window, layer, expert]}, {what}: "
                "give token counts, zero where nothing was counted"
            )
    return array


def _load_to_come(
    windows: NDArray[np.float64], method: str, declared: ArrayLike | None, ranks: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """float64 ``[W, L, E]``: the loads declared, or else foretold; and ``[V, L, E]``, mixes of the latter."""
    if declared is not None:
        known = checked_load(declared, "declared load")
        if known.shape[1:] != windows.shape[1:]:
            raise PlanError(
                f"declared load has shape {known.shape[1:]}, the measured one {windows.shape[1:]}: give both alike"
            )
        return coarsen(known), known[:0]
    try:
        return forecasts.scenarios(windows, forecasts.forecast(windows, method, ranks=ranks))
    except ValueError as error:
        raise PlanError(str(error)) from None


def _checked_layout(policy: str, layout: str | None) -> str:
    if policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    known = LAYOUTS[policy]
    if layout is None:
        return known[0]
    if layout not in known:
        raise PlanError(f"policy {policy!r} does not plan layout {layout!r}; it plans: {', '.join(known)}")
    return layout


def _check_sizes(
    layers: int, experts: int, ranks: int, slots_per_rank: int, groups: int, layout: str, current: Placement | None
) -> None:
    """Before anything of that size is made."""
    if slots_per_rank > experts and (current is None or layout == "free"):
        # A home placement that stands may have replica slots that nothing can fill.
        raise PlanError(
            f"{slots_per_rank} slots per rank for {experts} experts: a rank would hold an expert twice; "
            f"give at most {experts}"
        )
    if ranks * slots_per_rank * layers > MOST_SLOTS:
        raise PlanError(
            f"{ranks} ranks x {slots_per_rank} slots x {layers} layers are more than any cluster has: "
            f"give at most {MOST_SLOTS:,} in all"
        )
    if groups < 1 or experts % groups:
        raise PlanError(
            f"{experts} experts cannot be divided into {groups} groups: give a number that divides {experts}"
        )


def _check_shapes(request: PlanRequest) -> None:
    ranks, experts, slots_per_rank = request.topology.num_ranks, request.num_experts, request.slots_per_rank
    if request.num_slots < experts:
        raise PlanError(
            f"{ranks} ranks x {slots_per_rank} slots hold {request.num_slots} of {experts} experts: "
            f"give at least {-(-experts // ranks)} slots per rank"
        )
    if request.layout == "home" and experts % ranks:
        raise PlanError(
            f"{experts} experts cannot be spread evenly over {ranks} ranks, as the home layout needs: "
            f"choose an EP size that divides {experts}, or a policy of the free layout"
        )
    for name in ("max_moves", "max_bytes"):
        value = getattr(request, name)
        if value is not None and value < 0:
            raise PlanError(f"{name}={value}: give 0 or more, or None for no limit")
    if request.max_bytes is not None and not request.home_bytes:
        raise PlanError("max_bytes needs the bytes of an expert: give cost=CostModel(home_bytes=..., ...)")
    current = request.current
    if current is None:
        return
    mine = (current.num_layers, current.num_experts, current.num_ranks, current.slots_per_rank)
    wanted = (request.num_layers, experts, ranks, slots_per_rank)
    if mine != wanted:
        words = "{} layers x {} experts on {} ranks x {} slots"
        raise PlanError(f"current is for {words.format(*mine)}, the load and topology for {words.format(*wanted)}")
    if current.layout != request.layout:
        raise PlanError(f"current is in the {current.layout} layout, the plan in the {request.layout} layout")


def _weigh(
    request: PlanRequest, policy: str, placement: Placement, cost: CostModel | None, gate: str, began: float
) -> Plan:
    """Decide between the policy's placement and the current one."""
    current, topology = request.current, request.topology
    after = expected_imbalance(request, placement)
    before = None if current is None else expected_imbalance(request, current)
    moves = moves_between(current, placement, topology)
    saved = spent = float("nan")
    if cost is not None and current is not None and before is not None and cost.step_seconds > 0:
        saved = float(cost.seconds_per_imbalance(request.num_layers) * (before - after).sum())
        spent = cost.transfer_seconds(moves, topology, request.slots_per_rank) + cost.stall_seconds
    decision, reason = _decide(gate, before, after, len(np.unique(moves[:, MOVE_LAYER])), saved, spent)
    if policy == "hierarchical":
        reason += "; " + rule_cost(request, placement)
    if decision == "stay" and current is not None:
        placement, moves = current, moves[:0]
        after = after if before is None else before
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
    )


def _decide(
    gate: str, before: NDArray[np.float64] | None, after: NDArray[np.float64], moving: int, saved: float, spent: float
) -> tuple[str, str]:
    if before is None:
        return "rebalance", f"no placement stands yet; mean imbalance will be {after.mean():.3f}"
    change = f"mean imbalance {before.mean():.3f} -> {after.mean():.3f}, worst {before.max():.3f} -> {after.max():.3f}"
    change += f", by moves in {moving} of {len(after)} layers"
    if moving == 0:
        return "stay", f"nothing to move: mean imbalance {before.mean():.3f}, worst {before.max():.3f}"
    if gate == "always" and not after.mean() < before.mean():
        return "stay", f"no gain: {change}"
    if gate == "payoff" and not saved > HYSTERESIS * spent:
        return "stay", f"would save {saved:.3g} s, less than {HYSTERESIS:g} x the {spent:.3g} s it costs; {change}"
    if gate == "payoff":
        return "rebalance", f"saves {saved:.3g} s for {spent:.3g} s; {change}"
    return "rebalance", change
