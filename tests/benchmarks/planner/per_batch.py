"""Persistent copies, planned on the batches before, beside copies chosen for each batch with its very load.

UltraEP and its like copy experts for one micro-batch and leave homes where they are. The sweep has the sizes of
UltraEP's solver: 64 ranks, 128 experts, two redundant slots a rank, Zipf loads with exponents from 0 to 3. Judged by
the exact split; seconds of copying are not in it, which are paid once here and with every batch there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eplb_runtime.placement import Placement
from eplb_runtime.planner.cost import CostModel
from eplb_runtime.planner.planning import plan
from eplb_runtime.topology import Topology

from .windows import judge

FloatArray = NDArray[np.float64]
EXPONENTS = (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
JITTERS = (0.0, 0.3)
"""How far an expert's share is off in a batch, as the deviation of its logarithm; counting adds its own noise."""
TOKENS_OF_RANK = 4096 * 8
"""(token, choice) pairs of a batch."""
PAST = 8
"""Batches that persistent copies are planned on."""
HOMES_STAY = CostModel(home_bytes=10**15, replica_bytes=0, step_seconds=1.0)
"""Seconds under which no home is worth moving and a copy costs nothing."""


@dataclass(frozen=True)
class Sweep:
    """Sizes of the sweep; ``judged`` batches of each of ``seeds`` count."""

    ranks: int = 64
    experts: int = 128
    replicas: int = 2
    layers: int = 2
    judged: int = 3
    seeds: tuple[int, ...] = (11, 12)


def run(
    sweep: Sweep | None = None,
    exponents: Sequence[float] = EXPONENTS,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """The sweep.

    Returns:
        rows: ``zipf``, ``jitter``, and imbalance, mean over batches, layers and series: ``no_copies`` (experts in
        logical order), ``per_batch`` (homes in logical order, copies by a plan that knows the batch), ``persistent``
        (homes and copies by a plan from the `PAST` batches before) and ``persistent_moved``, slots moved for it as a
        share of all, the first plan.
    """
    sweep = sweep or Sweep()
    rows = []
    for jitter in JITTERS:
        for exponent in exponents:
            on_progress(f"{sweep.ranks} ranks, {sweep.experts} experts: Zipf {exponent:g}, jitter {jitter:g}")
            made = [_series(sweep, exponent, jitter, seed) for seed in sweep.seeds]
            rows.append(
                {"zipf": exponent, "jitter": jitter} | {k: float(np.mean([m[k] for m in made])) for k in made[0]}
            )
    return rows


def _series(sweep: Sweep, exponent: float, jitter: float, seed: int) -> dict[str, float]:
    load = _batches(sweep, exponent, jitter, seed)
    slots = sweep.experts // sweep.ranks + sweep.replicas
    topology = Topology(sweep.ranks, min(8, sweep.ranks))
    initial = Placement.initial(sweep.layers, sweep.experts, sweep.ranks, sweep.replicas)
    persistent = plan(load[:PAST], topology, slots_per_rank=slots, current=initial)
    by_batch = []
    for batch in load[PAST:]:
        copied = plan(
            batch, topology, slots_per_rank=slots, current=initial, declared=batch, cost=HOMES_STAY, gate="payoff"
        )
        if copied.moved_homes:
            raise RuntimeError("a home moved, where only copies may")
        by_batch.append(judge(copied.placement, batch[None])[0])
    return {
        "no_copies": float(judge(initial, load[PAST:])[0].mean()),
        "per_batch": float(np.mean(by_batch)),
        "persistent": float(judge(persistent.placement, load[PAST:])[0].mean()),
        "persistent_moved": persistent.moved_slots / (sweep.layers * sweep.ranks * slots),
    }


def _batches(sweep: Sweep, exponent: float, jitter: float, seed: int) -> FloatArray:
    """float64 ``[T, L, E]``: pairs of each batch; which expert has which rank in Zipf's order is chance."""
    generator = np.random.default_rng([seed, 31])
    share = 1.0 / np.arange(1, sweep.experts + 1) ** exponent
    share_LE = np.array([generator.permutation(share) for _ in range(sweep.layers)])
    made = np.empty((PAST + sweep.judged, sweep.layers, sweep.experts))
    for batch in range(len(made)):
        drawn_LE = share_LE * generator.lognormal(0.0, jitter, share_LE.shape)
        drawn_LE /= drawn_LE.sum(axis=1, keepdims=True)
        made[batch] = [generator.multinomial(TOKENS_OF_RANK * sweep.ranks, row) for row in drawn_LE]
    return made
