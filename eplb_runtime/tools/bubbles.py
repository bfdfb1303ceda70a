"""How long pipeline schedules leave their ranks idle, and where uneven expert load stretches them.

A schedule is a table: for each rank, its steps in order. `play` plays it; messages take no time. Tables of ZB1P, ZBV,
interleaved 1F1B and DualPipeV are `torch.distributed.pipelining`'s; 1F1B's is made here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
"""What is done with one micro-batch on one stage; ``B`` is ``I`` and ``W`` in one."""


class BubbleError(ValueError):
    """A schedule that does not exist or cannot run; one line that says why."""


@dataclass(frozen=True)
class Part:
    """A forward, or a kind of backward, of a micro-batch on a stage."""

    kind: str
    stage: int
    microbatch: int


Step = tuple[Part, ...]
"""One part; or a forward and a backward that run together."""
Table = list[list[Step]]
"""Steps of each rank, in order."""


@dataclass(frozen=True)
class Times:
    """Of one micro-batch on one stage, in any unit.

    Args:
        forward, input, weight: a backward takes ``input + weight``.
        overlapped: a forward and a backward together; None: as one after the other.
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    overlapped: float | None = None

    @property
    def backward(self) -> float:
        return self.input + self.weight

    @property
    def together(self) -> float:
        return self.forward + self.backward if self.overlapped is None else self.overlapped

    def of(self, step: Step, stretch_S: Sequence[float]) -> float:
        """Return the time of a step in which stage s takes ``stretch_S[s]`` times as long. A step of two parts takes as
        long as `together`, stretched as much as the sum of its parts."""
        alone = {FORWARD: self.forward, INPUT: self.input, WEIGHT: self.weight, BACKWARD: self.backward}
        stretched = sum(alone[part.kind] * stretch_S[part.stage] for part in step)
        if len(step) == 1:
            return stretched
        return stretched * self.together / sum(alone[part.kind] for part in step)


@dataclass(frozen=True)
class Played:
    """Result of `play`: a schedule with times.

    Args:
        span: from the first step to the last one's end.
        busy_R: float64 ``[R]``, each rank's time in steps.
        parameters_R: stages that each rank holds.
        activations_R: most micro-batches, over its stages, whose forward a rank has done and not all of their backward.
        began: when each rank's steps began, in the order of the table.
    """

    span: float
    busy_R: NDArray[np.float64]
    parameters_R: NDArray[np.int64]
    activations_R: NDArray[np.int64]
    began: list[list[float]]

    @property
    def bubble(self) -> float:
        """Return the time in which a rank has no step, mean over ranks."""
        return float(self.span - self.busy_R.mean())

    def summary(self) -> dict[str, Any]:
        """Return JSON-able figures: ``step`` (the span), ``bubble``, ``bubble_share`` (of the step), ``parameters`` and
        ``activations`` (of the rank that has most)."""
        return {
            "step": self.span,
            "bubble": self.bubble,
            "bubble_share": self.bubble / self.span,
            "parameters": int(self.parameters_R.max()),
            "activations": int(self.activations_R.max()),
        }


def play(table: Table, times: Times, stretch_S: Sequence[float] | None = None) -> Played:
    """Return when each step of a table begins, and what ranks hold. Each rank takes its steps in order, each as soon as
    the parts that it needs are done.

    Args:
        stretch_S: how many times as long each stage takes; None: all once.

    Raises:
        BubbleError: ranks wait for each other for ever, or other stages are given an imbalance.
    """
    stages = stages_of(table)
    stretch_S = [1.0] * stages if stretch_S is None else list(stretch_S)
    if len(stretch_S) != stages:
        raise BubbleError(f"{len(stretch_S)} stages are given an imbalance, the schedule has {stages}")
    done: dict[tuple[str, int, int], float] = {}
    began: list[list[float]] = [[] for _ in table]
    free_R = [0.0] * len(table)
    waiting: dict[tuple[str, int, int], list[int]] = {}
    ready = list(range(len(table)))
    while ready:
        rank = ready.pop()
        while len(began[rank]) < len(table[rank]):
            step = table[rank][len(began[rank])]
            needs = [need for part in step for need in _needs(part, stages)]
            missing = [need for need in needs if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            begin = max([free_R[rank], *(done[need] for need in needs)])
            free_R[rank] = begin + times.of(step, stretch_S)
            began[rank].append(begin)
            for part in step:
                for kind in (INPUT, WEIGHT) if part.kind == BACKWARD else (part.kind,):
                    done[made := (kind, part.stage, part.microbatch)] = free_R[rank]
                    ready.extend(waiting.pop(made, ()))
    stuck = [rank for rank, steps in enumerate(table) if len(began[rank]) < len(steps)]
    if stuck:
        part = table[stuck[0]][len(began[stuck[0]])][0]
        where = f"{part.kind} of micro-batch {part.microbatch} on stage {part.stage}"
        raise BubbleError(f"the schedule cannot run: rank {stuck[0]} waits for ever before {where}")
    return Played(
        span=max(free_R),
        busy_R=np.array([sum(times.of(step, stretch_S) for step in steps) for steps in table]),
        parameters_R=np.array([len({part.stage for step in steps for part in step}) for steps in table]),
        activations_R=np.array([_most_in_flight(steps) for steps in table]),
        began=began,
    )


def _needs(part: Part, stages: int) -> list[tuple[str, int, int]]:
    kind, stage, microbatch = part.kind, part.stage, part.microbatch
    if kind == FORWARD:
        return [(FORWARD, stage - 1, microbatch)] if stage else []
    if kind == WEIGHT:
        return [(INPUT, stage, microbatch)]
    behind = [(INPUT, stage + 1, microbatch)] if stage + 1 < stages else []
    return [(FORWARD, stage, microbatch), *behind]


def _most_in_flight(steps: list[Step]) -> int:
    """A forward that runs with a backward needs its memory before the backward has given its own back."""
    most = live = 0
    for step in steps:
        live += sum(part.kind == FORWARD for part in step)
        most = max(most, live)
        live -= sum(part.kind in (WEIGHT, BACKWARD) for part in step)
    return most


def stages_of(table: Table) -> int:
    return 1 + max((part.stage for steps in table for step in steps for part in step), default=-1)


# -- tables of schedules by name ---------------------------------------------------------------------------------------

MOST_STEPS = 4_000_000
"""Of a table, over all ranks."""


def one_forward_one_backward(ranks: int, microbatches: int) -> Table:
    """Return the table of 1F1B, a stage a rank. (torch's numbers the last rank's forwards from 1, and cannot run.)"""
    table: Table = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, microbatches)
        forwards, backwards = ([(Part(kind, rank, n),) for n in range(microbatches)] for kind in (FORWARD, BACKWARD))
        in_turn = zip(forwards[ahead:], backwards, strict=False)
        table.append([*forwards[:ahead], *chain.from_iterable(in_turn), *backwards[microbatches - ahead :]])
    return table


def _of_torch(name: str, stages_per_rank: int) -> Callable[[int, int], Table]:
    def table(ranks: int, microbatches: int) -> Table:
        from torch.distributed.pipelining import schedules

        kind: Any = getattr(schedules, name, None)
        if kind is None:
            raise BubbleError(f"this torch has no {name}")
        of_all: dict[str, Any] = {"num_stages": ranks * stages_per_rank, "group_size": ranks, "group_rank": 0}
        of_all |= {"is_last": False, "has_backward": True, "submod": None}
        numbers = range(stages_per_rank)
        stages = [SimpleNamespace(stage_index=number, is_first=number == 0, **of_all) for number in numbers]
        try:
            made = kind(stages, microbatches)
        except ValueError as error:
            raise BubbleError(" ".join(str(error).splitlines())) from None
        order = made.pipeline_order
        return [_steps_of_torch(order[rank]) for rank in range(ranks)]

    return table


def _steps_of_torch(actions: Sequence[Any]) -> list[Step]:
    steps: list[Step] = []
    for action in filter(None, actions):
        parts = [
            (part.computation_type.value, part.stage_index, part.microbatch_index)
            for part in action.sub_actions or (action,)
        ]
        steps.append(tuple(Part(*part) for part in parts if part[0] in (FORWARD, INPUT, WEIGHT, BACKWARD)))
    return list(filter(None, steps))


class Schedule(NamedTuple):
    """The table of a schedule by ranks and micro-batches, and its bubble as published; None: there is none here."""

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
    """Return the table of one of SCHEDULES.

    Raises:
        BubbleError: there is no such schedule, or not for so many ranks or micro-batches.
    """
    if name not in SCHEDULES:
        raise BubbleError(f"schedule {name!r} is unknown; choose one of: {', '.join(SCHEDULES)}")
    if ranks * microbatches * 6 > MOST_STEPS:
        raise BubbleError(f"{ranks} ranks and {microbatches} micro-batches are more than is played here")
    return SCHEDULES[name].table(ranks, microbatches)
