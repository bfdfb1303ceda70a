"""The tables of schedules by name; with published formulas.

Those of ZB1P, ZBV, interleaved 1F1B and DualPipeV are `torch.distributed.pipelining`'s; 1F1B's is made here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from .playing import BACKWARD, FORWARD, INPUT, WEIGHT, BubbleError, Part, Step, Table, Times

MOST_STEPS = 4_000_000
"""Of a table, over all ranks."""


def one_forward_one_backward(ranks: int, microbatches: int) -> Table:
    """1F1B. (torch's table of it numbers the last rank's forwards from 1, and cannot be played.)"""
    table: Table = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        kinds = [FORWARD] * ahead + [FORWARD, BACKWARD] * (microbatches - ahead) + [BACKWARD] * ahead
        counts = {FORWARD: 0, BACKWARD: 0}
        steps: list[Step] = []
        for kind in kinds:
            steps.append((Part(kind, rank, counts[kind]),))
            counts[kind] += 1
        table.append(steps)
    return table


def _of_torch(name: str, stages_per_rank: int) -> Callable[[int, int], Table]:
    def table(ranks: int, microbatches: int) -> Table:
        from torch.distributed.pipelining import schedules

        kind: Any = getattr(schedules, name, None)
        if kind is None:
            raise BubbleError(f"this torch has no {name}")
        stages = [
            SimpleNamespace(
                num_stages=ranks * stages_per_rank,
                group_size=ranks,
                group_rank=0,
                stage_index=number,
                is_first=number == 0,
                is_last=False,
                has_backward=True,
                submod=None,
            )
            for number in range(stages_per_rank)
        ]
        try:
            made = kind(stages, microbatches)
        except ValueError as error:
            raise BubbleError(" ".join(str(error).splitlines())) from None
        order = made.pipeline_order
        return [_steps_of_torch(order[rank]) for rank in range(ranks)]

    return table


def _steps_of_torch(actions: Sequence[Any]) -> list[Step]:
    kinds = (FORWARD, INPUT, WEIGHT, BACKWARD)
    steps: list[Step] = []
    for action in actions:
        parts = () if action is None else (action.sub_actions or (action,))
        step = tuple(
            Part(part.computation_type.value, part.stage_index, part.microbatch_index)
            for part in parts
            if part.computation_type.value in kinds
        )
        if step:
            steps.append(step)
    return steps


@dataclass(frozen=True)
class Schedule:
    """A schedule that `bubbles` knows.

    Args:
        table: ``(ranks, microbatches) -> table``.
        formula: bubble from ranks and times, as published; None: there is none here.
    """

    table: Callable[[int, int], Table]
    formula: Callable[[int, Times], float] | None = None


SCHEDULES: dict[str, Schedule] = {
    "1f1b": Schedule(one_forward_one_backward, lambda ranks, t: (ranks - 1) * (t.forward + t.backward)),
    "zb1p": Schedule(
        _of_torch("ScheduleInterleavedZeroBubble", 1),
        lambda ranks, t: (ranks - 1) * (t.forward + t.backward - 2 * t.weight),
    ),
    "zbv": Schedule(_of_torch("ScheduleZBVZeroBubble", 2)),
    "interleaved": Schedule(_of_torch("ScheduleInterleaved1F1B", 2)),
    "dualpipev": Schedule(
        _of_torch("ScheduleDualPipeV", 2), lambda ranks, t: (ranks - 1) * (t.together + t.backward - 3 * t.weight)
    ),
}
"""Formulas are those of DeepSeek's announcement, with a step's stages counted as there (DualPipeV: two a rank)."""


def table_of(name: str, ranks: int, microbatches: int) -> Table:
    """The table of one of SCHEDULES.

    Raises:
        BubbleError: there is no such schedule, or not for so many ranks or micro-batches.
    """
    if name not in SCHEDULES:
        raise BubbleError(f"schedule {name!r} is unknown; choose one of: {', '.join(SCHEDULES)}")
    if ranks * microbatches * 6 > MOST_STEPS:
        raise BubbleError(f"{ranks} ranks and {microbatches} micro-batches are more than is played here")
    return SCHEDULES[name].table(ranks, microbatches)
