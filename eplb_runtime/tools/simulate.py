"""Play a series of loads through policies: plan on the past, judge on what came next.

Each policy starts from experts in logical order, sees only windows that are over, replans every few windows, and is
judged by the split that its layout really uses. Step times (`StepModel`) compare policies, and predict no cluster.
"""

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
from ..utils.text import counted

FloatArray = NDArray[np.float64]

HORIZON_REPLANS = 10
"""Replans over which a plan counts what it saves, as a job does by default."""
HIDDEN, PARAMETERS = 7168, 3 * 7168 * 2048
"""DeepSeek-V3's: columns of a token, and numbers in one expert."""


@dataclass(frozen=True)
class StepModel:
    """How long the expert layers of a step take, by the tokens of the busiest rank; nothing overlaps.

    Compute and exchange add up. Links inside the node and between nodes work at the same time: the slower kind counts,
    of the rank that gets most. A token does not travel where it is computed on its own rank. Tokens of an expert come
    from all ranks alike, and go to near copies first; without copies (G - 1) / R of a rank's tokens travel inside the
    node and (R - G) / R between nodes, for G ranks a node.

    Args:
        token_seconds: compute of a (token, choice) pair: 2 FLOP a number of the expert, three times (forward, and both
            gradients in backward), at 400 TFLOP/s.
        token_bytes: of a pair on the wire in a step: bf16 there and back, and again both in backward.
        replica_bytes: of one expert's weights: bf16.
        home_bytes: of one expert with what has to move: float32 master weights and two Adam moments.
        gradient_bytes: of one expert's gradients, which a replica sends home in float32.
        stall_seconds: fixed cost of every rebalance, on top of its bytes.
    """

    token_seconds: float = 6 * PARAMETERS / 400e12
    token_bytes: int = 4 * 2 * HIDDEN
    replica_bytes: int = 2 * PARAMETERS
    home_bytes: int = 12 * PARAMETERS
    gradient_bytes: int = 4 * PARAMETERS
    stall_seconds: float = 0.0

    def slot_bytes(self, placement: Placement) -> int:
        """Return the bytes to fill a slot that is no home: one expert's weights in the home layout.

        In the free layout no copy is marked as the owner, whose optimizer state must move: there each slot counts as
        the average of E owners and P - E copies.
        """
        if placement.layout == "home":
            return self.replica_bytes
        owners = placement.num_experts / placement.num_slots
        return round(owners * self.home_bytes + (1 - owners) * self.replica_bytes)

    def seconds(
        self, busiest_rank_tokens: FloatArray, topology: Topology, received_LR2: FloatArray | None = None
    ) -> float:
        """Return the seconds of all expert layers in a step: compute and exchange.

        Args:
            busiest_rank_tokens: ``[L]``, token-expert pairs on the busiest rank.
            received_LR2: ``[L, R, 2]``, pairs that each rank gets from other ranks of its node and from other nodes
                (``planner.evaluate.received``); None: as without copies, from all ranks alike.
        """
        ranks, node = topology.num_ranks, topology.ranks_per_node
        if received_LR2 is None:
            shares = np.array([(node - 1) / ranks, (ranks - node) / ranks])
            received_LR2 = busiest_rank_tokens[:, None, None] * shares
        bandwidth = np.array([topology.intra_node_bandwidth, topology.inter_node_bandwidth])
        exchange = (received_LR2 / bandwidth).max(axis=(1, 2)) * self.token_bytes
        return float((busiest_rank_tokens * self.token_seconds + exchange).sum())

    def refresh_seconds(self, num_layers: int, replica_slots: int, topology: Topology) -> float:
        """Return the seconds of a step in which replicas get weights and send gradients home, if nothing hides them."""
        bandwidth = topology.intra_node_bandwidth if topology.num_nodes == 1 else topology.inter_node_bandwidth
        return num_layers * replica_slots * (self.replica_bytes + self.gradient_bytes) / bandwidth


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
        """Return the figures of the ``simulate`` command over all judged windows and layers. ``step_seconds`` has the
        time of migrations, spread over all steps; ``plan_seconds`` is the mean of one plan."""
        imbalance, all_slots = self.imbalance, self.plans[0].placement.physical_to_logical.size
        even = {"mean": (1 / imbalance).mean(), "p5": np.percentile(1 / imbalance, 5), "min": (1 / imbalance).min()}
        uneven = {"mean": imbalance.mean(), "p95": np.percentile(imbalance, 95), "max": imbalance.max()}
        seconds = sum(self.step_seconds) + sum(self.migration_seconds) / self.steps_per_window
        return {
            "policy": self.policy,
            "balancedness": {name: float(value) for name, value in even.items()},
            "imbalance": {name: float(value) for name, value in uneven.items()},
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
    """Play the series through each policy, and return a `PolicyRun` for each.

    Args:
        policies: names of ``planner.policies.POLICIES``, each in its own layout.
        step_model: None: the defaults of :class:`StepModel`.

    Raises:
        PlanError: the series is too short, or a policy cannot plan this load; the message names the policy.
    """
    windows, _, experts = series.load.shape
    if not 0 < series.every < windows:
        shorter = f"give --every between 1 and {windows - 1}, or " if windows > 1 else ""
        have = f"a series of {counted(windows, 'window')} cannot be replanned every {series.every}"
        raise PlanError(f"{have}: {shorter}give a longer series")
    least = -(-experts // topology.num_ranks)
    if not least <= slots_per_rank <= experts:
        have = f"{topology.num_ranks} ranks x {slots_per_rank} slots for {experts} experts"
        raise PlanError(f"{have}: give {least} to {experts} slots per rank, each for another expert")
    starts = [_start(policy, series.load, topology.num_ranks, slots_per_rank) for policy in policies]
    model = step_model or StepModel()
    return [_play(policy, start, series, topology, model) for policy, start in zip(policies, starts, strict=True)]


def _start(policy: str, load: FloatArray, ranks: int, slots_per_rank: int) -> Placement:
    """Experts in logical order; replica slots empty (home layout) or again in logical order (free)."""
    if policy not in POLICIES:
        raise PlanError(f"policy {policy!r} is unknown; choose one of: {', '.join(POLICIES)}")
    (_, layers, experts), layouts = load.shape, POLICIES[policy][1]
    if layouts[0] == "home" and experts % ranks == 0:
        return Placement.initial(layers, experts, ranks, slots_per_rank - experts // ranks)
    if "free" not in layouts:
        raise PlanError(f"policy {policy}: {ranks} ranks do not divide {experts} experts, as homes need")
    row = np.arange(ranks * slots_per_rank) % experts
    return Placement(np.broadcast_to(row, (layers, len(row))), experts, ranks)


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

    slots = current.slots_per_rank
    asked: dict[str, Any] = {"policy": policy, "layout": current.layout, "cost": cost, "slots_per_rank": slots}
    asked |= {"groups": series.groups, "max_moves": series.max_moves, "gate": series.gate}

    def ask(past: FloatArray, trust: float) -> Plan:
        try:
            return plan(past, topology, current=current, trust=trust, **asked)
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
        seconds = cost.transfer_seconds(planned.moves, topology, slots) if len(planned.moves) else 0.0
        migration_seconds.append(seconds + model.stall_seconds * (planned.decision == "rebalance"))
        current = planned.placement
        for load_LE in load[start : start + every]:
            imbalance.append(predicted_imbalance(load_LE, current))
            received_LR2 = received(load_LE, current, topology)
            busiest = imbalance[-1] * load_LE.sum(axis=1) / topology.num_ranks / steps
            step_seconds.append(model.seconds(busiest, topology, received_LR2 / steps))
            crossing_share.append(float(received_LR2[:, :, 1].sum() / max(load_LE.sum(), 1e-300)))
    return PolicyRun(policy, steps, np.array(imbalance), step_seconds, crossing_share, plans, migration_seconds)
