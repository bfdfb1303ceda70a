"""Questions to the planner and its answers: frozen values, and the error it raises."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from ..topology import Topology
from .cost import MOVE_DESTINATION_SLOT, MOVE_IS_HOME, MOVE_SOURCE_RANK, CostModel
from .forecast import ExpectedLoad, foretell

Gate = Literal["payoff", "always", "off"]


class PlanError(ValueError):
    """A question the planner cannot answer; the message is one line that says what is wrong and how to mend it."""


@dataclass(frozen=True)
class PlanRequest:
    """Everything a policy may look at; fields without a word are arguments of `api.plan`. Policies change only
    ``held``."""

    load: NDArray[np.float64]  # [T, L, E], tokens per logical expert in T successive windows, oldest first
    topology: Topology
    slots_per_rank: int
    current: Placement | None
    policy: str
    layout: str  # "home" or "free"
    groups: int
    max_moves: int | None
    max_bytes: int | None
    cost: CostModel | None
    gate: Gate
    declared: NDArray[np.float64] | None  # [T, L, E]; all of it will come: how its windows differ is no doubt about any
    speed_R: NDArray[np.float64] | None  # how fast each rank is, the fastest 1; None: all alike
    source_share_LNE: NDArray[np.float64] | None  # of each expert's tokens, by node; None: all nodes send alike
    trust: float
    one_known: bool  # one window alone is known of a load that goes on
    held: dict[int, str] = field(default_factory=dict)  # `gate.HELD` for layers that a better placement is known of

    @property
    def num_layers(self) -> int:
        return int(self.load.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.load.shape[2])

    @property
    def num_slots(self) -> int:
        return self.topology.num_ranks * self.slots_per_rank

    @cached_property
    def to_come(self) -> ExpectedLoad:
        """Return the declared load, or else a forecast from ``load``; for policy ``static``, ``load`` as it was."""
        if self.declared is None and self.policy != "static":
            return foretell(self.load, self.topology.num_ranks)
        known = self.load if self.declared is None else self.declared
        return ExpectedLoad(known.mean(axis=0), known, known[:0], *np.zeros((2, self.num_layers), dtype=bool))

    @property
    def forecast(self) -> NDArray[np.float64]:
        """Return float64 ``[L, E]``, the expected tokens of each expert."""
        return self.to_come.expected

    @property
    def is_limited(self) -> bool:
        """Return whether moves have a budget: ``max_moves`` or ``max_bytes`` is given."""
        return self.max_moves is not None or self.max_bytes is not None

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """Return the bytes of an expert with its optimizer state, and those of its weights alone; 0: unknown."""
        return (self.cost.home_bytes, self.cost.replica_bytes) if self.cost else (0, 0)

    @property
    def seconds_per_imbalance(self) -> float | None:
        """Return the seconds that a unit of one layer's imbalance costs over the horizon, times ``trust``. None: there
        is no cost, or the gate is not ``"payoff"``."""
        if self.cost is None or self.gate != "payoff":
            return None
        return self.cost.seconds_per_imbalance(self.num_layers, self.trust)

    @property
    def crossing_price(self) -> float:
        """Return the imbalance that costs as much as all tokens crossing nodes; 0 without a cost, or on one node."""
        return self.cost.crossing_price if self.cost and self.topology.num_nodes > 1 else 0.0

    @property
    def counts_crossing(self) -> bool:
        """Return whether tokens that cross nodes are counted: crossing has a price, or their sources are given."""
        return self.crossing_price > 0 or self.source_share_LNE is not None

    @property
    def start(self) -> Placement:
        """Return ``current``; if it is None, experts in logical order with empty replica slots, in the home layout."""
        if self.current is not None:
            return self.current
        homes_per_rank = self.num_experts // self.topology.num_ranks
        return Placement.initial(
            self.num_layers, self.num_experts, self.topology.num_ranks, self.slots_per_rank - homes_per_rank
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """A placement, the way to it, and why to take it or leave it.

    Args:
        policy: name of the policy that made it.
        placement: the placement to go to; ``current`` itself when the decision is ``"stay"``.
        current: the current placement, or None.
        moves: int32 ``[M, 5]``, columns (layer, expert, source rank, destination slot, is home), in that order of
            layers and slots: every slot that gets another expert. The source is the expert's home rank in ``current``
            (its nearest copy in the free layout; -1 without ``current``). A source equal to
            the destination's own rank is a copy inside the rank.
        imbalance_before: float64 ``[L]``, expected max / mean rank load of ``current``, the mean over scenarios of
            the load to come, or None.
        imbalance_after: float64 ``[L]``, the same of ``placement``; by water-filling in the home layout, by even split
            in the free layout.
        lower_bound: float64 ``[L]``, no placement of this shape has less imbalance.
        bytes_intra_node, bytes_inter_node: bytes to move by link class; 0 when the bytes of an expert are unknown.
        seconds_saved: predicted over the horizon; nan when unknown.
        seconds_spent: predicted for moving; nan when unknown.
        decision: ``"rebalance"`` or ``"stay"``.
        reason: one sentence; ``code``: what kind of reason it is, in a word or two.
        plan_seconds: wall time of planning.
    """

    policy: str
    placement: Placement
    current: Placement | None
    moves: NDArray[np.int32]
    imbalance_before: NDArray[np.float64] | None
    imbalance_after: NDArray[np.float64]
    lower_bound: NDArray[np.float64]
    bytes_intra_node: int
    bytes_inter_node: int
    seconds_saved: float
    seconds_spent: float
    decision: str
    reason: str
    plan_seconds: float
    code: str = ""

    @property
    def moved_slots(self) -> int:
        """Return how many slots get their expert from another rank; without ``current``, how many hold an expert."""
        destination = self.placement.rank_of(self.moves[:, MOVE_DESTINATION_SLOT])
        return int(np.count_nonzero(self.moves[:, MOVE_SOURCE_RANK] != destination))

    @property
    def moved_homes(self) -> int:
        """Return how many moves are of homes, which carry optimizer state; moves within a rank count, too."""
        return int(np.count_nonzero(self.moves[:, MOVE_IS_HOME]))

    def __str__(self) -> str:
        placement = self.placement
        moved = (
            f"moves {self.moved_slots} slots ({self.moved_homes} homes): {self.bytes_intra_node / 2**20:.1f} MiB in "
            f"nodes, {self.bytes_inter_node / 2**20:.1f} MiB between nodes"
        )
        if self.current is None:
            moved = "initial placement: no expert is anywhere yet, so none has to move"
        lines = [
            f"plan by {self.policy}: {self.decision} - {self.reason}",
            f"  {placement.num_layers} layers, {placement.num_experts} experts, {placement.num_ranks} ranks x "
            f"{placement.slots_per_rank} slots, {placement.layout} layout, planned in {self.plan_seconds * 1e3:.1f} ms",
            f"  {moved}",
        ]
        if not np.isnan(self.seconds_saved):
            lines.append(
                f"  predicted: {self.seconds_saved:.3g} s saved over the horizon for {self.seconds_spent:.3g} s spent"
            )
        lines.append(f"  {'imbalance (max / mean)':<24}{'mean':>8}{'worst':>8}  worst layer")
        rows = {"before": self.imbalance_before, "after": self.imbalance_after, "lower bound": self.lower_bound}
        for name, values_L in rows.items():
            if values_L is not None:
                lines.append(f"  {name:<24}{values_L.mean():>8.3f}{values_L.max():>8.3f}  {int(values_L.argmax())}")
        return "\n".join(lines)
