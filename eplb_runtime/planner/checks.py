"""What a question to the planner must look like: what does not fit is refused in one line that says how to mend it."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..placement import Placement
from ..topology import Topology
from .cost import CostModel
from .policies import LAYOUTS, POLICIES
from .terms import Settled
from .types import PlanError, PlanRequest

GATES = ("payoff", "always", "off")
KNOWS_SPEEDS = ("incremental", "static", "swaps")
KNOWS_DEADLINES = "incremental"
MOST_SLOTS = 2**26
"""Slots over all layers that are planned for; 100 layers on 1,024 ranks of 64 slots are a tenth of it."""
MOST_TOKENS = 1e150
"""Tokens of all windows; sums of more, and their squares, leave float64, and what cannot be added up looks even."""


def checked_load(load: ArrayLike, name: str = "load") -> NDArray[np.float64]:
    """``load`` as float64 ``[T, L, E]``.

    Raises:
        PlanError: not numbers, wrong shape, empty, NaN, infinite or negative; the message names the first place.
    """
    if isinstance(load, np.ma.MaskedArray) and np.ma.is_masked(load):
        raise PlanError(f"{name} has masked entries: fill them in (.filled(0) where nothing was counted)")
    numbers: Any = load
    try:
        if hasattr(numbers, "detach"):
            numbers = numbers.detach().cpu()
            numbers = numbers.double() if numbers.is_floating_point() else numbers  # NumPy has no bfloat16
        array = np.asarray(numbers)
        if array.dtype.kind == "c":
            raise TypeError
        array = array.astype(np.float64, order="C")  # sums add up in the order in which numbers lie
    except (TypeError, ValueError, OverflowError, RuntimeError):
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
    if array.max() > MOST_TOKENS / array.size:
        raise PlanError(f"{name} goes up to {array.max():.3g}, too much to add up: give token counts")
    return array


def checked_layout(policy: str, layout: str | None) -> str:
    if policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    known = LAYOUTS[policy]
    if layout is None:
        return known[0]
    if layout not in known:
        raise PlanError(f"policy {policy!r} does not plan layout {layout!r}; it plans: {', '.join(known)}")
    return layout


def checked_speed(settled: Settled, policy: str, ranks: int) -> NDArray[np.float64] | None:
    """float64 ``[R]``, the fastest rank 1; None: all alike."""
    speed_R: NDArray[np.float64] | None = None
    if settled.rank_speed is not None:
        try:
            array = np.asarray(settled.rank_speed)
        except (TypeError, ValueError, RuntimeError):
            raise PlanError(f"rank_speed is not an array: give one number for each of {ranks} ranks") from None
        if array.shape != (ranks,) or array.dtype.kind not in "biuf":
            raise PlanError(f"rank_speed has shape {array.shape}: give one number for each of {ranks} ranks")
        speed_R = array.astype(np.float64)
        if not (np.isfinite(speed_R).all() and (speed_R > 0).all()):
            raise PlanError("rank_speed: give every rank a number above 0")
        if policy not in KNOWS_SPEEDS and (speed_R != speed_R[0]).any():
            raise PlanError(f"policy {policy!r} takes all ranks for equally fast: choose incremental for rank_speed")
        speed_R = None if (speed_R == speed_R[0]).all() else speed_R / speed_R.max()
    return speed_R


def check_gate(settled: Settled, current: Placement | None) -> None:
    gate, cost = settled.gate, settled.cost
    if gate not in GATES:
        raise PlanError(f"gate={gate!r} is unknown; choose one of: {', '.join(GATES)}")
    if gate == "payoff" and (cost is None or current is None or cost.step_seconds <= 0):
        raise PlanError("gate='payoff' needs current= and a cost= with step_seconds: give both, or gate='always'")


def check_trust(settled: Settled) -> None:
    trust = settled.trust
    if isinstance(trust, bool) or not isinstance(trust, Real) or not 0 <= trust <= 1:
        raise PlanError(f"trust={trust!r}: give the share of a gain that is believed, from 0 to 1")
    if trust < 1 and settled.cost is None:
        raise PlanError(f"trust={trust:g} weighs seconds that are saved: give cost=CostModel(...), or leave trust out")


def check_deadline(settled: Settled, policy: str, current: object) -> None:
    seconds = settled.deadline
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds >= 0:
        raise PlanError(f"deadline={seconds!r}: give seconds from now on, or leave it out")
    if policy != KNOWS_DEADLINES:
        raise PlanError(f"policy {policy!r} plans all layers at once: leave deadline out, or choose {KNOWS_DEADLINES}")
    if current is None:
        raise PlanError("deadline needs current, which layers keep that time is not enough for: leave deadline out")


def check_kinds(topology: object, policy: object, settled: Settled, current: object) -> None:
    if not isinstance(topology, Topology):
        raise PlanError(f"topology is a {type(topology).__name__}: give a Topology(num_ranks, ranks_per_node)")
    if not isinstance(policy, str):
        raise PlanError(f"policy is a {type(policy).__name__}: choose one of: {', '.join(POLICIES)}")
    if settled.cost is not None and not isinstance(settled.cost, CostModel):
        raise PlanError(f"cost is a {type(settled.cost).__name__}: give a CostModel(home_bytes=..., ...)")
    if not isinstance(settled.forecast, str):
        raise PlanError(f"forecast is a {type(settled.forecast).__name__}: give the name of a method")
    if current is not None and not isinstance(current, Placement):
        raise PlanError(
            f"current is a {type(current).__name__}: give a Placement, Placement.initial(...) for experts in logical "
            "order, or None where nothing stands yet"
        )


def check_whole(settled: Settled, slots_per_rank: object) -> None:
    """What is counted is a whole number: with nan no limit holds, and half a move is one to some, none to others."""
    for name in ("groups", "max_moves", "max_bytes"):
        if (value := getattr(settled, name)) is not None or name == "groups":
            check_whole_number(name, value)
    check_whole_number("slots_per_rank", slots_per_rank)


def check_whole_number(name: str, value: object) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: give a whole number")


def check_sizes(
    layers_experts: tuple[int, ...],
    ranks: int,
    slots_per_rank: int,
    groups: int,
    layout: str,
    current: Placement | None,
) -> None:
    """Before anything of that size is made."""
    layers, experts = layers_experts
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


def check_shapes(request: PlanRequest) -> None:
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
    counted = "home_bytes" if request.layout == "home" else "replica_bytes"  # of a slot in the free layout
    if request.max_bytes is not None and not getattr(request, counted):
        raise PlanError(f"max_bytes needs the bytes of an expert: give cost=CostModel({counted}=..., ...)")
    current = request.current
    if current is None:
        if request.max_moves is not None or request.max_bytes is not None:
            raise PlanError(
                "max_moves and max_bytes limit moves from a placement that stands: give it (current=, --current)"
            )
        return
    check_fits(current, request, "current")


def check_fits(placement: Placement, request: PlanRequest, name: str) -> None:
    """Refuse a placement of other sizes, or in another layout, than what is to be planned."""
    mine = (placement.num_layers, placement.num_experts, placement.num_ranks, placement.slots_per_rank)
    wanted = (request.num_layers, request.num_experts, request.topology.num_ranks, request.slots_per_rank)
    if mine != wanted:
        words = "{} layers x {} experts on {} ranks x {} slots"
        raise PlanError(f"{name} is for {words.format(*mine)}, the load and topology for {words.format(*wanted)}")
    if placement.layout != request.layout:
        raise PlanError(f"{name} is in the {placement.layout} layout, the plan in the {request.layout} layout")
