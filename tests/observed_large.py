"""Records of a job as large as they come: 61 layers of 256 experts on 320 ranks, without planning it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from observed import job

from eplb_runtime.observe.records import Record

LAYERS, EXPERTS, RANKS, SLOTS, NODE, INTERVAL = 61, 256, 320, 2, 8, 50


def large_records(decisions: int, seed: int = 0) -> Iterator[Record]:
    """The job, then for each decision a measurement, a plan and (every other) a commit."""
    generator = np.random.default_rng(seed)
    slots_LP = generator.integers(0, EXPERTS, (LAYERS, RANKS * SLOTS))
    sizes = {"layers": LAYERS, "experts": EXPERTS, "ranks": RANKS, "slots_per_rank": SLOTS, "ranks_per_node": NODE}
    placed = {"start": slots_LP[None], "placement": slots_LP[None]}
    stages = {"layers_of_stage": [LAYERS]}
    yield {**job(), **sizes, **stages, **placed, "interval": INTERVAL, "world_size": RANKS}
    skew_L = generator.uniform(0.2, 0.9, (LAYERS, 1))
    for number in range(1, decisions + 1):
        step, now = number * INTERVAL, 1000.0 + number * 60
        load_LE = generator.lognormal(8, skew_L, (LAYERS, EXPERTS)).astype(np.int64)
        start_LR = generator.lognormal(10, skew_L, (LAYERS, RANKS)).astype(np.int64)
        spread = 0.25 + 0.75 / number
        now_LR = (start_LR.mean(axis=1, keepdims=True) * (1 - spread) + start_LR * spread).astype(np.int64)
        imbalance = [(ranks.max(axis=1) / ranks.mean(axis=1)).tolist() for ranks in (now_LR, start_LR)]
        common = {"step": step, "time": now}
        yield {
            **common,
            "event": "LoadMeasured",
            **{"steps": INTERVAL, "moe_share": None},
            "step_seconds": 4.2 + 0.1 * np.sin(number),
            "imbalance": [imbalance[0]],
            **{key: [imbalance[1]] for key in ("imbalance_start", "max_vio")},
            "load": load_LE[None],
            "rank_load": np.stack([now_LR, start_LR]),
        }
        moves = number % 2 == 1
        before = float(np.mean(imbalance[0]))
        after = 1 + (before - 1) * (0.4 if moves else 1)
        yield {
            **common,
            "event": "RebalancePlanned",
            "epoch": number,
            "moves": 300 if moves else 0,
            "decision": "rebalance" if moves else "stay",
            "code": "pays" if moves else "does not pay",
            "reason": "saves 41 s for 1.3 s; mean imbalance falls" if moves else "would save 0.4 s, less than 1.2 x it",
            "imbalance_before": before,
            "imbalance_after": after,
            "imbalance_bound": 1.01,
            **{"plan_seconds": 0.4, "judged_plans": 0},
            "seconds_saved": 41.0 if moves else 0.4,
            "seconds_spent": 1.3,
            "by_layer": [imbalance[0], np.minimum(imbalance[0], 1.2).tolist(), [1.01] * LAYERS],
        }
        if not moves:
            continue
        slots_LP = np.where(generator.random(slots_LP.shape) < 0.03, np.roll(slots_LP, 1, axis=1), slots_LP)
        count = 400
        ends = generator.integers(0, RANKS, (2, count))
        transfers = np.stack([generator.integers(0, LAYERS, count), generator.integers(0, EXPERTS, count), *ends])
        yield {
            **common,
            "event": "RebalanceCommitted",
            "epoch": number,
            "digest": "0" * 32,
            **{"moved_experts": count, "placed_replicas": 0},
            "received_bytes": 0,
            "pause_seconds": 1.1,
            "phase_seconds": {
                "prepare": 0.02,
                "post": 0.01,
                "transfer": 0.8,
                "verify": 0.1,
                "vote": 0.05,
                "commit": 0.1,
            },
            "placement": slots_LP[None],
            "transfers": transfers.T[None],
            "expert_bytes": [528 << 20] * LAYERS,
        }
