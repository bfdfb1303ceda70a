"""Play a series of loads through policies: plan on the past, judge on what came next.

Each policy starts from experts in logical order, sees only windows that are over, replans every few windows, and is
judged window by window with the split that its layout really uses. Step times come from a small model, stated at
:class:`StepModel`; they compare policies, they do not predict a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..placement import Placement
from ..planner import CostModel, Plan, PlanError, plan
from ..planner.evaluate import predicted_imbalance, received
from ..planner.gate import TrackRecord
from ..planner.policies import POLICIES
from ..planner.types import Gate
from ..topology import Topology

FloatArray = NDArray[np.float64]

HORIZON_REPLANS = 10
"""Replans over which a plan counts what it saves, as a job does by default."""


@dataclass(frozen=True)
class StepModel:
    """How long the expert layers of a step take, by the tokens of the busiest rank; nothing overlaps.

    * compute: tokens x 2 x 3 x hidden x expert_hidden FLOP (gate, up and down projection), three times (forward, and
      both gradients in backward), at ``flops``.
    * exchange: a token's hidden vector travels once in dispatch and once in combine, and again both in backward; not
      where it is computed on its own rank. Links inside the node and between nodes work at the same time: the slower
      kind counts, of the rank that gets most. Tokens of an expert come from all ranks alike, and go to near copies
      first; without copies (G - 1) / R of a rank's tokens travel inside the node and (R - G) / R between nodes, for G
      ranks a node.

    Args:
        hidden_size, expert_hidden_size: of the model (the defaults are DeepSeek-V3's).
        flops: FLOP/s that a rank sustains on expert GEMMs.
        activation_bytes: bytes of one element of a token on the wire.
        stall_seconds: fixed cost of every rebalance, on top of its bytes.
        weight_bytes, state_bytes: measured bytes of one expert's weights, and of what else moves with its home;
            0 and None: as its sizes say.
    """

    hidden_size: int = 7168
    expert_hidden_size: int = 2048
    flops: float = 400e12
    activation_bytes: int = 2
    stall_seconds: float = 0.0
    weight_bytes: int = 0
    state_bytes: int | None = None

    @property
    def replica_bytes(self) -> int:
        """Bytes of one expert's weights: bf16 unless they were measured."""
        return self.weight_bytes or 2 * 3 * self.hidden_size * self.expert_hidden_size

    @property
    def home_bytes(self) -> int:
        """Bytes of one expert with what has to move: float32 master weights and two Adam moments, or the
        measured weights and state."""
        if self.weight_bytes and self.state_bytes is not None:
            return self.weight_bytes + self.state_bytes
        return 12 * 3 * self.hidden_size * self.expert_hidden_size

    def slot_bytes(self, placement: Placement) -> int:
        """Bytes to fill a slot that is no home: one expert's weights in the home layout.

        In the free layout no copy is marked as the owner, whose optimizer state must move: there each slot
        counts as the average of E owners and P - E copies.
        """
        if placement.layout == "home":
            return self.replica_bytes
        owners = placement.num_experts / placement.num_slots
        return round(owners * self.home_bytes + (1 - owners) * self.replica_bytes)

    def seconds(
        self, busiest_rank_tokens: FloatArray, topology: Topology, received_LR2: FloatArray | None = None
    ) -> float:
        """Seconds of all layers.

        Args:
            busiest_rank_tokens: ``[L]``, token-expert pairs on the busiest rank.
            received_LR2: ``[L, R, 2]``, pairs that each rank gets from other ranks of its node and from other nodes
                (``planner.evaluate.received``); None: as without copies, from all ranks alike.
        """
        ranks, node = topology.num_ranks, topology.ranks_per_node
        compute = 6 * self.hidden_size * self.expert_hidden_size * 3 / self.flops
        if received_LR2 is None:
            shares = np.array([(node - 1) / ranks, (ranks - node) / ranks])
            received_LR2 = busiest_rank_tokens[:, None, None] * shares
        bandwidth = np.array([topology.intra_node_bandwidth, topology.inter_node_bandwidth])
        exchange = (received_LR2 / bandwidth).max(axis=(1, 2)) * self.token_bytes
        return float((busiest_rank_tokens * compute + exchange).sum())

    def refresh_seconds(self, num_layers: int, replica_slots: int, topology: Topology) -> float:
        """Seconds of a step in which every replica gets its weights again and sends its float32 gradients home, as if
        nothing hid them."""
        bandwidth = topology.intra_node_bandwidth if topology.num_nodes == 1 else topology.inter_node_bandwidth
        gradient_bytes = 4 * 3 * self.hidden_size * self.expert_hidden_size
        return num_layers * replica_slots * (self.replica_bytes + gradient_bytes) / bandwidth

    @property
    def token_bytes(self) -> int:
        """Bytes on the wire of one token-expert pair in a step."""
        return 4 * self.hidden_size * self.activation_bytes


@dataclass(frozen=True, eq=False)
class PolicyRun:
    """One policy over the series.

    Args:
        imbalance: float64 [W, L], max / mean rank load of each judged window.
        step_seconds: of a step in each judged window.
        crossing_share: of all tokens of each, those that are computed on another node than they come from.
        plans: of all replans; ``migration_seconds``: of each.
    """

    policy: str
    steps_per_window: int
    imbalance: FloatArray
    step_seconds: Sequence[float]
    crossing_share: Sequence[float]
    plans: Sequence[Plan]
    migration_seconds: Sequence[float]

    @property
    def moved_bytes(self) -> int:
        return sum(plan.bytes_intra_node + plan.bytes_inter_node for plan in self.plans)

    def summary(self) -> dict[str, Any]:
        """Return the figures of the ``simulate`` command: over all judged windows and layers; ``step_seconds`` with the
        time that migrations took, spread over all steps; ``plan_seconds`` of one plan, the mean."""
        balancedness, all_slots = 1 / self.imbalance, self.plans[0].placement.physical_to_logical.size
        seconds = sum(self.step_seconds) + sum(self.migration_seconds) / self.steps_per_window
        return {
            "policy": self.policy,
            "balancedness": {
                "mean": float(balancedness.mean()),
                "p5": float(np.percentile(balancedness, 5)),
                "min": float(balancedness.min()),
            },
            "imbalance": {
                "mean": float(self.imbalance.mean()),
                "p95": float(np.percentile(self.imbalance, 95)),
                "max": float(self.imbalance.max()),
            },
            "crossing_share": float(np.mean(self.crossing_share)),
            "moved_slots_share": float(np.mean([plan.moved_slots for plan in self.plans]) / all_slots),
            "rebalances": sum(plan.decision == "rebalance" for plan in self.plans),
            "plan_seconds": float(np.mean([plan.plan_seconds for plan in self.plans])),
            "step_seconds": seconds / len(self.step_seconds),
        }


@dataclass(frozen=True)
class Series:
    """A series of loads, when it is planned for, and what every plan is asked for.

    Args:
        load: float64 [T, L, E], tokens per logical expert, oldest window first. The first ``every`` windows are only
            planned on, the others are judged.
        every: windows between plans, each of which sees the last ``4 * every``.
        steps_per_window: training steps of a window.
        groups, max_moves, gate: as in ``planner.plan``; the payoff gate takes seconds from the step model and
            a horizon of ``10 * every`` windows.
    """

    load: FloatArray
    every: int
    steps_per_window: int = 1
    groups: int = 1
    max_moves: int | None = None
    gate: Gate = "always"


def simulate(
    series: Series,
    topology: Topology,
    *,
    slots_per_rank: int,
    policies: Sequence[str],
    step_model: StepModel | None = None,
) -> list[PolicyRun]:
    """Run each policy over the series.

    Args:
        policies: names of ``planner.policies.POLICIES``, each in its own layout.
        step_model: None: the defaults of :class:`StepModel`.

    Raises:
        PlanError: the series is too short, or a policy cannot plan this load; the message names the policy.
    """
    windows, layers, experts = series.load.shape
    if windows == 1:
        raise PlanError("a series of one window has no next window to judge a plan by: give a longer series")
    if not 0 < series.every < windows:
        raise PlanError(
            f"a series of {windows} windows cannot be replanned every {series.every}: give --every between 1 and "
            f"{windows - 1}, or a longer series"
        )
    starts = [start_placement(policy, layers, experts, topology.num_ranks, slots_per_rank) for policy in policies]
    model = step_model or StepModel()
    return [_play(policy, start, series, topology, model) for policy, start in zip(policies, starts, strict=True)]


def _play(policy: str, current: Placement, series: Series, topology: Topology, model: StepModel) -> PolicyRun:
    """Replan every few windows on what is over; judge on what comes until the next replan."""
    load, every, steps = series.load, series.every, series.steps_per_window
    cost = CostModel(
        home_bytes=model.home_bytes,
        replica_bytes=model.slot_bytes(current),
        step_seconds=model.seconds(load.sum(axis=2).mean(axis=0) / topology.num_ranks / steps, topology),
        moe_share=1.0,
        horizon_steps=HORIZON_REPLANS * every * steps,
        stall_seconds=model.stall_seconds,
    )

    asked: dict[str, Any] = {"policy": policy, "layout": current.layout, "cost": cost}
    asked |= {"groups": series.groups, "max_moves": series.max_moves, "gate": series.gate}

    def ask(past: FloatArray, trust: float) -> Plan:
        try:
            slots = current.slots_per_rank
            return plan(past, topology, slots_per_rank=slots, current=current, trust=trust, **asked)
        except PlanError as error:
            raise PlanError(f"policy {policy}: {error}") from None

    ask(load[:1], 1.0)  # compiles, so that no measured plan does
    imbalance: list[FloatArray] = []
    step_seconds, crossing_share, migration_seconds = list[float](), list[float](), list[float]()
    plans, record = list[Plan](), TrackRecord(horizon=HORIZON_REPLANS)
    for start in range(every, len(load), every):
        record.observe(load[start - every : start].sum(axis=0))
        plans.append(planned := ask(load[max(0, start - 4 * every) : start], record.trust))
        record.note(planned)
        moves, slots = planned.moves, current.slots_per_rank
        seconds = cost.transfer_seconds(moves, topology, slots) if len(moves) else 0.0
        migration_seconds.append(seconds + model.stall_seconds * (planned.decision == "rebalance"))
        current = planned.placement
        for load_LE in load[start : start + every]:
            imbalance.append(predicted_imbalance(load_LE, current))
            received_LR2 = received(load_LE, current, topology)
            busiest = imbalance[-1] * load_LE.sum(axis=1) / topology.num_ranks / steps
            step_seconds.append(model.seconds(busiest, topology, received_LR2 / steps))
            crossing_share.append(float(received_LR2[:, :, 1].sum() / max(load_LE.sum(), 1e-300)))
    return PolicyRun(policy, steps, np.array(imbalance), step_seconds, crossing_share, plans, migration_seconds)


def start_placement(policy: str, num_layers: int, num_experts: int, num_ranks: int, slots_per_rank: int) -> Placement:
    """Where a policy starts: experts in logical order; replica slots empty (home) or again in logical order (free).

    Raises:
        PlanError: no such policy, too few slots, or a home layout that the ranks do not divide.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    if num_ranks * slots_per_rank < num_experts:
        raise PlanError(
            f"{num_ranks} ranks x {slots_per_rank} slots cannot hold {num_experts} experts: "
            f"give at least {-(-num_experts // num_ranks)} slots per rank"
        )
    if slots_per_rank > num_experts:
        raise PlanError(
            f"policy {policy}: {slots_per_rank} slots per rank for {num_experts} experts: a rank would hold an expert "
            f"twice; give at most {num_experts}"
        )
    layouts = POLICIES[policy][1]
    if layouts[0] == "home" and num_experts % num_ranks == 0:
        return Placement.initial(num_layers, num_experts, num_ranks, slots_per_rank - num_experts // num_ranks)
    if "free" not in layouts:
        raise PlanError(f"policy {policy}: {num_ranks} ranks do not divide {num_experts} experts, as homes need")
    row = np.arange(num_ranks * slots_per_rank) % num_experts
    return Placement(np.broadcast_to(row, (num_layers, len(row))), num_experts, num_ranks)
