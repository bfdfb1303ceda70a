"""``plan``: checks the question, asks a policy, weighs the answer. What does not fit is refused in one line that says
how to mend it."""

import time
from collections.abc import Iterator
from numbers import Integral, Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..load import MOST_TOKENS, checked_load
from ..placement import Placement
from ..topology import Topology
from .cost import CostModel
from .forecast import coarsen
from .gate import weigh
from .policies import POLICIES
from .types import Gate, Plan, PlanError, PlanRequest

GATES = ("payoff", "always", "off")
KNOWS_SPEEDS = ("incremental", "static")
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
    gate: Gate = "always",
    declared: ArrayLike | None = None,
    rank_speed: ArrayLike | None = None,
    sources: ArrayLike | None = None,
    trust: float = 1.0,
) -> Plan:
    """Plan a placement of experts for a measured load.

    Args:
        load: tokens per logical expert, ``[L, E]``: a load that is known; or ``[T, L, E]``: T successive windows of a
            load that goes on, oldest first. From one window, ``[1, L, E]``, ``"payoff"`` allows for chance in it.
        topology: ranks and nodes of the EP group.
        slots_per_rank: S; in the home layout E/R homes and the rest replica slots.
        current: the current placement; None: there is none yet, every slot is a move.
        policy: a name in ``POLICIES``.
        layout: ``"home"`` or ``"free"``; None: the policy's own.
        groups: expert groups of group-limited routing, for the policies ``deepseek`` and ``hierarchical``.
        max_moves: at most so many slots, over all layers, whose rank did not hold that expert; None: no limit. For a
            plan from ``current``.
        max_bytes: the same in bytes (needs ``cost``); None: no limit.
        cost: bytes and seconds (`CostModel`); needed by the ``"payoff"`` gate, and for the plan to know its bytes.
        gate: ``"payoff"``: rebalance when predicted seconds saved exceed predicted seconds spent, in the layers that
            together leave most seconds. ``"always"``: whenever the imbalance falls.
            ``"off"``: take what the policy says.
        declared: the load to come where it is known, ``[L, E]`` or ``[T, L, E]``, in place of a forecast (for example
            replayed routing in reinforcement learning).
        rank_speed: float ``[R]``, how fast each rank is among them: a slow one gets fewer tokens, and imbalance is
            the slowest rank's time over that of all ranks at their speeds. For ``incremental``; None: all alike.
        sources: tokens by the node that they come from, ``[N, L, E]``; only the proportions in which an expert's tokens
            come from the nodes matter. None: from all alike. They count where crossing nodes has a cost
            (``cost=CostModel(crossing_seconds=...)``), for ``incremental``.
        trust: share of a plan's gain that is believed, in [0, 1]: as much as came true of earlier ones
            (`gate.TrackRecord` measures it). Below 1 it needs ``cost``: it weighs seconds saved.

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
    _check_kinds(topology, cost, current)
    windows = coarsen(checked_load(load, "load", PlanError))
    _, layers, experts = windows.shape
    is_series = np.ndim(load[0]) == 2 if isinstance(load, list | tuple) else np.ndim(load) == 3
    known = None if declared is None else coarsen(checked_load(declared, "declared load", PlanError))
    if known is not None and known.shape[1:] != windows.shape[1:]:
        raise PlanError(
            f"declared load has shape {known.shape[1:]}, the measured one {windows.shape[1:]}: give both alike"
        )
    request = PlanRequest(
        load=windows,
        topology=topology,
        slots_per_rank=slots_per_rank,
        current=current,
        policy=policy,
        layout=_checked_layout(policy, layout),
        groups=groups,
        max_moves=max_moves,
        max_bytes=max_bytes,
        cost=cost,
        gate=gate,
        declared=known,
        speed_R=None if rank_speed is None else _checked_speed(rank_speed, topology.num_ranks),
        source_share_LNE=None if sources is None else checked_sources(sources, layers, experts, topology),
        trust=trust,
        one_known=is_series and len(windows) == 1 and declared is None,
    )
    for problem in _problems(request):  # before anything of that size is made
        raise PlanError(problem)
    return weigh(request, POLICIES[policy][0](request), began)


def _checked_speed(rank_speed: ArrayLike, ranks: int) -> NDArray[np.float64] | None:
    """Return float64 ``[R]``, the fastest rank 1; None: all alike."""
    wanted = f"give one number above 0 for each of {ranks} ranks"
    speed_R = _numbers("rank_speed", rank_speed, (ranks,), wanted)
    if not speed_R.all():
        raise PlanError(f"rank_speed={speed_R.tolist()}: {wanted}")
    return None if (speed_R == speed_R[0]).all() else speed_R / speed_R.max()


def checked_sources(sources: ArrayLike, layers: int, experts: int, topology: Topology) -> NDArray[np.float64]:
    """Return float64 ``[L, N, E]``, the share of each expert's tokens that comes from each node, by tokens ``[N, L,
    E]``. An expert without tokens gets equal shares. PlanError: another shape, or numbers below 0."""
    shape = (topology.num_nodes, layers, experts)
    wanted = f"give token counts by node, {list(shape)}, zero where nothing was counted; add up those of a node's ranks"
    counts = _numbers("sources", sources, shape, wanted)
    total_LE = counts.sum(axis=0)
    share = np.divide(counts, total_LE, out=np.full_like(counts, 1.0 / len(counts)), where=total_LE > 0)
    return np.ascontiguousarray(share.transpose(1, 0, 2))


def _numbers(name: str, values: ArrayLike, shape: tuple[int, ...], wanted: str) -> NDArray[np.float64]:
    """Return numbers of 0 or more of this shape; ``wanted`` ends the sentence of a refusal."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise PlanError(f"{name} is not an array of numbers: {wanted}") from None
    if array.shape != shape or not ((array >= 0) & (array < MOST_TOKENS)).all():
        raise PlanError(f"{name} has shape {array.shape}, or numbers that are none: {wanted}")
    return array


def _checked_layout(policy: str, layout: str | None) -> str:
    """Return the layout that is asked for, or the policy's own."""
    if not isinstance(policy, str) or policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    known = POLICIES[policy][1]
    if layout is not None and layout not in known:
        raise PlanError(f"policy {policy!r} does not plan layout {layout!r}; it plans: {', '.join(known)}")
    return layout or known[0]


def _check_kinds(topology: object, cost: object, current: object) -> None:
    """Refuse what is no value of its class."""
    initial = "Placement, Placement.initial(...) for experts in logical order, or None where there is none yet"
    for name, value, kinds, instead in (
        ("topology", topology, Topology, "Topology(num_ranks, ranks_per_node)"),
        ("cost", cost, CostModel | None, "CostModel(home_bytes=..., ...)"),
        ("current", current, Placement | None, initial),
    ):
        if not isinstance(value, kinds):
            raise PlanError(f"{name} is a {type(value).__name__}: give a {instead}")


def check_whole_number(name: str, value: object) -> None:
    """Raise PlanError, which names the argument, unless ``value`` is an integer; bool and 2.0 are refused, too."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise PlanError(f"{name}={value!r}: give a whole number")


def _problems(request: PlanRequest) -> Iterator[str]:
    """Yield why sizes, limits and terms do not fit together."""
    gate, cost, trust, current = request.gate, request.cost, request.trust, request.current
    if gate not in GATES:
        yield f"gate={gate!r} is unknown; choose one of: {', '.join(GATES)}"
    if gate == "payoff" and (cost is None or current is None or cost.step_seconds <= 0):
        yield "gate='payoff' needs current= and a cost= with step_seconds: give both, or gate='always'"
    if isinstance(trust, bool) or not isinstance(trust, Real) or not 0 <= trust <= 1:
        yield f"trust={trust!r}: give the share of a gain that is believed, from 0 to 1"
    if trust < 1 and cost is None:
        yield f"trust={trust:g} weighs seconds that are saved: give cost=CostModel(...), or leave trust out"
    if request.speed_R is not None and request.policy not in KNOWS_SPEEDS:
        yield f"policy {request.policy!r} takes all ranks for equally fast: choose policy='incremental' for rank_speed"
    for name in ("groups", "slots_per_rank", "max_moves", "max_bytes"):
        if (value := getattr(request, name)) is not None:
            check_whole_number(name, value)
            if value < 0:
                yield f"{name}={value}: give 0 or more"
    ranks, experts = request.topology.num_ranks, request.num_experts
    per_rank, layers = request.slots_per_rank, request.num_layers
    if per_rank > experts and (current is None or request.layout == "free"):
        # A current home placement may have replica slots that nothing can fill.
        yield f"{per_rank} slots per rank for {experts} experts: a rank would hold one twice; give at most {experts}"
    if request.num_slots * layers > MOST_SLOTS:
        sizes = f"{ranks} ranks x {per_rank} slots x {layers} layers"
        yield f"{sizes} are more than any cluster has: give at most {MOST_SLOTS:,} in all"
    if request.groups < 1 or experts % request.groups:
        yield f"{experts} experts cannot be divided into {request.groups} groups: give a number that divides {experts}"
    if request.num_slots < experts:
        least = f"give at least {-(-experts // ranks)} slots per rank"
        yield f"{ranks} ranks x {per_rank} slots hold {request.num_slots} of {experts} experts: {least}"
    if request.layout == "home" and experts % ranks:
        yield (
            f"{experts} experts cannot be spread evenly over {ranks} ranks, as the home layout needs: choose an EP "
            f"size that divides {experts}, or a policy of the free layout"
        )
    counted = "home_bytes" if request.layout == "home" else "replica_bytes"  # of a slot in the free layout
    if request.max_bytes is not None and not (cost and getattr(cost, counted)):
        yield f"max_bytes needs the bytes of an expert: give cost=CostModel({counted}=..., ...)"
    if current is None and request.is_limited:
        yield "max_moves and max_bytes limit moves from a current placement: give it (current=, --current)"
    if current is not None:
        mine = (current.num_layers, current.num_experts, current.num_ranks, current.slots_per_rank, current.layout)
        wanted = (layers, experts, ranks, per_rank, request.layout)
        if mine != wanted:
            words = "{} layers x {} experts on {} ranks x {} slots in the {} layout"
            yield f"current is for {words.format(*mine)}, the load and topology for {words.format(*wanted)}"
