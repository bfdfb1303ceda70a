"""What a question to the planner must look like: what does not fit is refused in one line that says how to mend it."""

from __future__ import annotations

from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..load.checks import MOST_TOKENS, checked_load
from ..placement import Placement
from ..topology import Topology
from .cost import CostModel
from .policies import LAYOUTS, POLICIES
from .types import PlanError, PlanRequest

GATES = ("payoff", "always", "off")
KNOWS_SPEEDS = ("incremental", "static")
MOST_SLOTS = 2**26
"""Slots over all layers that are planned for; 100 layers on 1,024 ranks of 64 slots are a tenth of it."""


def checked_declaration(declared: ArrayLike, windows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the load to come as float64 ``[T, L, E]``, of the layers and experts of those measured."""
    known = checked_load(declared, "declared load", PlanError)
    if known.shape[1:] != windows.shape[1:]:
        raise PlanError(
            f"declared load has shape {known.shape[1:]}, the measured one {windows.shape[1:]}: give both alike"
        )
    return known


def checked_speed(rank_speed: ArrayLike, ranks: int) -> NDArray[np.float64] | None:
    """Return float64 ``[R]``, the fastest rank 1; None: all alike."""
    try:
        array = np.asarray(rank_speed)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"rank_speed is not an array: give one number for each of {ranks} ranks") from None
    if array.shape != (ranks,) or array.dtype.kind not in "biuf":
        raise PlanError(f"rank_speed has shape {array.shape}: give one number for each of {ranks} ranks")
    speed_R = array.astype(np.float64)
    if not (np.isfinite(speed_R).all() and (speed_R > 0).all()):
        raise PlanError("rank_speed: give every rank a number above 0")
    return None if (speed_R == speed_R[0]).all() else speed_R / speed_R.max()


def checked_sources(sources: ArrayLike, layers: int, experts: int, topology: Topology) -> NDArray[np.float64]:
    """Return float64 ``[L, N, E]``: the share of each expert's tokens that comes from each node, by tokens ``[N, L,
    E]``; alike where none came."""
    try:
        counts = np.asarray(sources, dtype=np.float64)
    except (TypeError, ValueError):
        raise PlanError("sources is not an array of numbers: give [nodes, layers, experts]") from None
    nodes = topology.num_nodes
    if counts.shape != (nodes, layers, experts):
        raise PlanError(
            f"sources has shape {counts.shape}: give tokens by node, [{nodes}, {layers}, {experts}]; add up those of a "
            "node's ranks"
        )
    if not ((counts >= 0).all() and counts.max() < MOST_TOKENS):
        raise PlanError("sources: give token counts, zero where nothing was counted")
    total_LE = counts.sum(axis=0)
    share = np.divide(counts, total_LE, out=np.full_like(counts, 1.0 / nodes), where=total_LE > 0)
    return np.ascontiguousarray(share.transpose(1, 0, 2))


def checked_layout(policy: str, layout: str | None) -> str:
    """Return the layout that is asked for, or the policy's own."""
    if not isinstance(policy, str):
        raise PlanError(f"policy is a {type(policy).__name__}: choose one of: {', '.join(POLICIES)}")
    if policy == "swaps":
        raise PlanError("policy 'swaps' was removed: choose incremental, or deepseek with layout='home'")
    if policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    known = LAYOUTS[policy]
    if layout is not None and layout not in known:
        raise PlanError(f"policy {policy!r} does not plan layout {layout!r}; it plans: {', '.join(known)}")
    return layout or known[0]


def check_kinds(topology: object, cost: object, current: object) -> None:
    """Refuse what is no value of its class."""
    initial = "Placement, Placement.initial(...) for experts in logical order, or None where nothing stands yet"
    for name, value, kinds, instead in (
        ("topology", topology, Topology, "Topology(num_ranks, ranks_per_node)"),
        ("cost", cost, CostModel | None, "CostModel(home_bytes=..., ...)"),
        ("current", current, Placement | None, initial),
    ):
        if not isinstance(value, kinds):
            raise PlanError(f"{name} is a {type(value).__name__}: give a {instead}")


def check_whole_number(name: str, value: object) -> None:
    """Refuse what does not count: with nan no limit holds, and half a move is one to some, none to others."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: give a whole number")


def check(request: PlanRequest) -> None:
    """Refuse sizes, limits and terms that do not fit together, before anything of that size is made."""
    _check_terms(request)
    for name in ("groups", "slots_per_rank", "max_moves", "max_bytes"):
        if (value := getattr(request, name)) is not None:
            check_whole_number(name, value)
    ranks, experts, slots_per_rank = request.topology.num_ranks, request.num_experts, request.slots_per_rank
    current = request.current
    if slots_per_rank > experts and (current is None or request.layout == "free"):
        # A home placement that stands may have replica slots that nothing can fill.
        raise PlanError(
            f"{slots_per_rank} slots per rank for {experts} experts: a rank would hold an expert twice; "
            f"give at most {experts}"
        )
    if request.num_slots * request.num_layers > MOST_SLOTS:
        raise PlanError(
            f"{ranks} ranks x {slots_per_rank} slots x {request.num_layers} layers are more than any cluster has: "
            f"give at most {MOST_SLOTS:,} in all"
        )
    if request.groups < 1 or experts % request.groups:
        raise PlanError(
            f"{experts} experts cannot be divided into {request.groups} groups: give a number that divides {experts}"
        )
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
    _check_limits(request)
    if current is not None:
        mine = (current.num_layers, current.num_experts, current.num_ranks, current.slots_per_rank)
        wanted = (request.num_layers, experts, ranks, slots_per_rank)
        if mine != wanted:
            words = "{} layers x {} experts on {} ranks x {} slots"
            raise PlanError(f"current is for {words.format(*mine)}, the load and topology for {words.format(*wanted)}")
        if current.layout != request.layout:
            raise PlanError(f"current is in the {current.layout} layout, the plan in the {request.layout} layout")


def _check_terms(request: PlanRequest) -> None:
    gate, cost, trust, speed_R = request.gate, request.cost, request.trust, request.speed_R
    if gate not in GATES:
        raise PlanError(f"gate={gate!r} is unknown; choose one of: {', '.join(GATES)}")
    if gate == "payoff" and (cost is None or request.current is None or cost.step_seconds <= 0):
        raise PlanError("gate='payoff' needs current= and a cost= with step_seconds: give both, or gate='always'")
    if isinstance(trust, bool) or not isinstance(trust, Real) or not 0 <= trust <= 1:
        raise PlanError(f"trust={trust!r}: give the share of a gain that is believed, from 0 to 1")
    if trust < 1 and cost is None:
        raise PlanError(f"trust={trust:g} weighs seconds that are saved: give cost=CostModel(...), or leave trust out")
    if speed_R is not None and request.policy not in KNOWS_SPEEDS:
        raise PlanError(
            f"policy {request.policy!r} takes all ranks for equally fast: choose incremental for rank_speed"
        )


def _check_limits(request: PlanRequest) -> None:
    for name in ("max_moves", "max_bytes"):
        if (value := getattr(request, name)) is not None and value < 0:
            raise PlanError(f"{name}={value}: give 0 or more, or None for no limit")
    in_home = request.layout == "home"
    if request.max_bytes is not None and not request.slot_bytes[0 if in_home else 1]:
        counted = "home_bytes" if in_home else "replica_bytes"  # of a slot in the free layout
        raise PlanError(f"max_bytes needs the bytes of an expert: give cost=CostModel({counted}=..., ...)")
    if request.current is None and (request.max_moves is not None or request.max_bytes is not None):
        raise PlanError(
            "max_moves and max_bytes limit moves from a placement that stands: give it (current=, --current)"
        )
