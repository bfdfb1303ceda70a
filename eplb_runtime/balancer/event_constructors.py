"""Events of a decision and of a migration, made from what they know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..events import LoadMeasured, RebalanceCommitted, RebalancePlanned
from ..placement import Placement
from .decision import Decision


class Moved(Protocol):
    """What a migration says of itself, between steps or beside them."""

    @property
    def moved_experts(self) -> int:
        """That were sent."""

    @property
    def received_bytes(self) -> int:
        """By this rank."""

    @property
    def transfers(self) -> NDArray[np.int64] | None:
        """int64 ``[M, 4]``: layer, expert, source and destination slot of each that was sent."""

    @property
    def record_bytes(self) -> tuple[int, ...]:
        """Of an expert with its state, in each layer."""


def measured(step: int, decision: Decision, steps_per_bucket: int) -> LoadMeasured:
    """What a decision started from.

    Args:
        steps_per_bucket: that a row of its imbalance covers.
    """
    assert decision.imbalance is not None
    buckets = tuple(tuple(bucket) for bucket in decision.imbalance.tolist())
    return LoadMeasured(
        step,
        len(buckets) * steps_per_bucket,
        buckets,
        decision.step_seconds,
        load=decision.load,
        placements=decision.placements,
    )


def planned(step: int, summary: Mapping[str, Any]) -> RebalancePlanned:
    """What rank 0 has decided, as it sent it."""
    by_layer = summary.get("by_layer")
    return RebalancePlanned(
        step,
        epoch=summary["epoch"],
        moves=summary["moves"],
        decision=summary["decision"],
        reason=summary["reason"],
        imbalance_before=summary["imbalance_before"],
        imbalance_after=summary["imbalance_after"],
        plan_seconds=summary["plan_seconds"],
        imbalance_bound=summary.get("imbalance_bound", 1.0),
        seconds_saved=summary.get("seconds_saved"),
        seconds_spent=summary.get("seconds_spent"),
        by_layer=None if by_layer is None else np.array(by_layer, dtype=np.float64),
    )


def committed(
    step: int, placement: Placement, moved: Moved, pause_seconds: float, phases: Mapping[str, float] | None = None
) -> RebalanceCommitted:
    """That experts have moved; ``phases``: seconds of each part of a migration between steps."""
    return RebalanceCommitted(
        step,
        epoch=placement.epoch,
        digest=placement.digest(),
        moved_experts=moved.moved_experts,
        received_bytes=moved.received_bytes,
        pause_seconds=pause_seconds,
        phase_seconds=phases or {},
        placement=placement,
        transfers=moved.transfers,
        expert_bytes=moved.record_bytes,
    )
