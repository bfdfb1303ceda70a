"""Play reinforcement learning's steps on recorded loads: homes planned from what is over, or from what is declared.

Each window of a load is a micro-batch, and a few of them are a training step. Ahead of each step but the first every
policy may move experts, and is judged on the step: ranks wait for the busiest one in each micro-batch. What routing in
training repeats of the rollout's is taken to be all of it, as where routing is replayed. No time is measured but that
of plans: throughput is what even load would give, divided by the imbalance.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.config import BalancerConfig
from eplb_runtime.placement import Placement
from eplb_runtime.planner import Plan, PlanError, plan
from eplb_runtime.planner.evaluate import lower_bound, rank_load
from eplb_runtime.tools.formats.loads import SAMPLE, read_load
from eplb_runtime.topology import Topology

from .harness import command

FloatArray = NDArray[np.float64]

EXPERT_PARAMETERS = 3 * 2880 * 2880
"""Of gpt-oss-20b: three matrices of an expert."""
HOME_BYTES = 14
"""Of a parameter that moves with its home: bfloat16 weight, float32 master weight and two Adam moments."""
COPY_BYTES = 2
"""Of a parameter of a copy, which gets the weights anew after each step."""


@dataclass(frozen=True)
class _Policy:
    """How a policy plans ahead of a step.

    Args:
        replica_slots: a rank.
        ask: makes its plan of the loads of past steps ``[T, L, E]``, the micro-batches of the coming one ``[M, L, E]``
            and the current placement; None: it never moves.
    """

    name: str
    replica_slots: int
    ask: Callable[[FloatArray, FloatArray, Placement], Plan] | None


def run(
    loads: Sequence[str | Path] = (),
    ranks_of_job: int = 8,
    micro_batches: int = 4,
    expert_parameters: int = EXPERT_PARAMETERS,
    on_progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """All policies over each load (files of series; none: the sample), a window of which is one of the
    ``micro_batches`` of a step; an expert has so many numbers in its weights. PlanError: fewer than two steps, or
    experts that the ranks do not divide.

    * static: experts in logical order.
    * forecast: planned from the loads of steps that are over, as without `declare`.
    * declared: planned for the micro-batches of the coming step; summed: for the step as one load; copies: with one
      replica slot a rank.
    * oracle: all experts placed from scratch for the coming step by the same planner, whatever that moves.

    JSON-able; ``"rollouts"``: a row for each load and policy: ``load``, ``policy``, ``step`` and ``micro_batch`` (max /
    mean rank load of whole steps and of micro-batches, means over layers), ``share`` (of the throughput that even load
    would give), ``at_most`` (the bound of ``share`` for any placement of as many slots), ``of_oracle`` (share over the
    oracle's of as many slots), ``moved_homes`` and ``moved_gib`` (a step, all ranks), ``copies_gib`` (weights that
    copies get a step, all ranks), ``plan_ms`` (a plan, median)."""
    rows: list[dict[str, Any]] = []
    for path in list(loads) or [SAMPLE]:
        load = np.asarray(read_load(path), dtype=np.float64)
        name, experts, count = Path(path).name, load.shape[2], len(load) // micro_batches
        if count < 2:
            raise PlanError(f"{name}: {len(load)} windows are no two steps of {micro_batches} micro-batches")
        if experts % ranks_of_job:
            raise PlanError(f"{name}: {ranks_of_job} ranks do not divide {experts} experts")
        steps = load[: count * micro_batches].reshape(count, micro_batches, *load.shape[1:])
        of_load = []
        for policy in _policies(ranks_of_job):
            on_progress(f"{name}: {policy.name}")
            of_load.append(_play(policy, steps, ranks_of_job, expert_parameters))
        oracle = {row["copies_gib"]: row["share"] for row in of_load if row["policy"].startswith("oracle")}
        rows += [{"load": name, **row, "of_oracle": row["share"] / oracle[row["copies_gib"]]} for row in of_load]
    return {"ranks": ranks_of_job, "micro_batches": micro_batches, "rollouts": rows}


def _policies(ranks: int) -> Sequence[_Policy]:
    topology = Topology(ranks, ranks)

    def forecast(past: FloatArray, coming: FloatArray, current: Placement) -> Plan:
        return plan(past, topology, slots_per_rank=current.slots_per_rank, current=current)

    def declared(past: FloatArray, coming: FloatArray, current: Placement) -> Plan:
        return plan(past, topology, slots_per_rank=current.slots_per_rank, current=current, declared=coming)

    def of_the_step(past: FloatArray, coming: FloatArray, current: Placement) -> Plan:
        return declared(past, coming.sum(axis=0), current)

    def oracle(past: FloatArray, coming: FloatArray, current: Placement) -> Plan:
        return plan(past, topology, slots_per_rank=current.slots_per_rank, declared=coming)

    return (
        _Policy("static", 0, None),
        _Policy("forecast", 0, forecast),
        _Policy("declared, summed", 0, of_the_step),
        _Policy("declared", 0, declared),
        _Policy("oracle", 0, oracle),
        _Policy("declared, copies", 1, declared),
        _Policy("oracle, copies", 1, oracle),
    )


def _play(policy: _Policy, steps: FloatArray, ranks: int, parameters: int) -> dict[str, Any]:
    """Play one policy.

    Args:
        steps: float64 ``[N, M, L, E]``.
    """
    layers, experts = steps.shape[2:]
    current = Placement.initial(layers, experts, ranks, policy.replica_slots)
    window = BalancerConfig(interval=None).window_rows(0)
    judged, seconds, moved = [], [], 0
    for number in range(1, len(steps)):
        if policy.ask is not None:
            past = steps[max(0, number - window) : number].sum(axis=1)
            began = time.perf_counter()
            made = policy.ask(past, steps[number], current)
            seconds.append(time.perf_counter() - began)
            moved += int((current.home_rank != made.placement.home_rank).sum())
            current = made.placement
        judged.append([rank_load(window_LE, current) for window_LE in steps[number]])
    load_NMLR = np.array(judged)
    busiest, even = load_NMLR.max(axis=3), load_NMLR.mean(axis=3)
    of_step = load_NMLR.sum(axis=1)
    bounds = lower_bound(steps[1:].reshape(-1, experts), ranks, current.slots_per_rank)
    lowest_NML = bounds.reshape(busiest.shape)
    gib, a_step = 1 / 2**30, 1 / len(judged)
    copies = layers * ranks * policy.replica_slots
    return {
        "policy": policy.name,
        "step": float((of_step.max(axis=2) / np.maximum(of_step.mean(axis=2), 1e-300)).mean()),
        "micro_batch": float((busiest / np.maximum(even, 1e-300)).mean()),
        "share": float(even.sum() / busiest.sum()),
        "at_most": float(even.sum() / (even * lowest_NML).sum()),
        "moved_homes": moved * a_step,
        "moved_gib": moved * a_step * HOME_BYTES * parameters * gib,
        "copies_gib": copies * COPY_BYTES * parameters * gib,
        "plan_ms": float(np.median(seconds)) * 1e3 if seconds else None,
    }


if __name__ == "__main__":
    command(run)
