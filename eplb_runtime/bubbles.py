"""How long pipeline schedules leave their ranks idle, and where uneven expert load stretches them.

A schedule is a table: for each rank, what it does, in order. `follow` plays it with the times of a forward pass, of the
gradient of inputs, of that of weights, and of a forward run together with a backward. Messages take no time here. The
tables of ZB1P, ZBV, interleaved 1F1B and DualPipeV are those of `torch.distributed.pipelining`; those of 1F1B and
DualPipe are made here.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .files import replacing
from .placement import Placement
from .planner import plan
from .planner.evaluate import predicted_imbalance
from .topology import Topology

FORWARD, INPUT, WEIGHT, BACKWARD = "F", "I", "W", "B"
"""What is done with one micro-batch on one stage; ``B`` is ``I`` and ``W`` in one."""
MOST_STEPS = 4_000_000
"""Of a table, over all ranks."""


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
        """Of a step, where each stage takes so many times as long."""
        alone = {FORWARD: self.forward, INPUT: self.input, WEIGHT: self.weight, BACKWARD: self.backward}
        stretched = sum(alone[part.kind] * stretch_S[part.stage] for part in step)
        if len(step) == 1:
            return stretched
        return stretched * self.together / sum(alone[part.kind] for part in step)


@dataclass(frozen=True)
class Played:
    """A schedule with times.

    Args:
        span: from the first step to the last one's end.
        busy_R: float64 ``[R]``, each rank's time in steps.
        parameters_R: stages that each rank holds.
        activations_R: most micro-batches, over its stages, whose forward a rank has done and not all of their backward.
        began: when each rank's steps began, in the order of the table.
        table: what was played.
    """

    span: float
    busy_R: NDArray[np.float64]
    parameters_R: NDArray[np.int64]
    activations_R: NDArray[np.int64]
    began: list[list[float]]
    table: Table

    @property
    def bubble(self) -> float:
        """Idle time of a rank, mean over ranks."""
        return float(self.span - self.busy_R.mean())

    def summary(self) -> dict[str, Any]:
        """JSON-able: ``step`` (the span), ``bubble``, ``bubble_share`` (of the step), ``parameters`` and
        ``activations`` (of the rank that has most)."""
        return {
            "step": self.span,
            "bubble": self.bubble,
            "bubble_share": self.bubble / self.span,
            "parameters": int(self.parameters_R.max()),
            "activations": int(self.activations_R.max()),
        }


def follow(table: Table, times: Times, stretch_S: Sequence[float] | None = None) -> Played:
    """Play a table: each rank takes its steps in order, each as soon as what it needs is there.

    Args:
        stretch_S: how many times as long each stage takes; None: all once.

    Raises:
        BubbleError: ranks wait for each other for ever, or something is done twice.
    """
    stages = stages_of(table)
    if not stages:
        raise BubbleError("the schedule is empty")
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
            for made in (key for part in step for key in _makes(part)):
                if made in done:
                    raise BubbleError(f"{made[0]} of micro-batch {made[2]} on stage {made[1]} is done twice")
                done[made] = free_R[rank]
                ready.extend(waiting.pop(made, ()))
    stuck = [rank for rank, steps in enumerate(table) if len(began[rank]) < len(steps)]
    if stuck:
        part = table[stuck[0]][len(began[stuck[0]])][0]
        raise BubbleError(
            f"the schedule cannot run: rank {stuck[0]} waits for ever before {part.kind} of micro-batch "
            f"{part.microbatch} on stage {part.stage}"
        )
    return Played(
        span=max(free_R),
        busy_R=np.array([sum(times.of(step, stretch_S) for step in steps) for steps in table]),
        parameters_R=np.array([len(_stages_held(steps)) for steps in table]),
        activations_R=np.array([_most_in_flight(steps) for steps in table]),
        began=began,
        table=table,
    )


def _needs(part: Part, stages: int) -> list[tuple[str, int, int]]:
    kind, stage, microbatch = part.kind, part.stage, part.microbatch
    if kind == FORWARD:
        return [(FORWARD, stage - 1, microbatch)] if stage else []
    if kind == WEIGHT:
        return [(INPUT, stage, microbatch)]
    behind = [(INPUT, stage + 1, microbatch)] if stage + 1 < stages else []
    return [(FORWARD, stage, microbatch), *behind]


def _makes(part: Part) -> list[tuple[str, int, int]]:
    kinds = (INPUT, WEIGHT) if part.kind == BACKWARD else (part.kind,)
    return [(kind, part.stage, part.microbatch) for kind in kinds]


def _stages_held(steps: list[Step]) -> set[int]:
    return {part.stage for step in steps for part in step}


def _most_in_flight(steps: list[Step]) -> int:
    """A forward that runs with a backward needs its memory before the backward has given its own back."""
    most = live = 0
    for step in steps:
        live += sum(part.kind == FORWARD for part in step)
        most = max(most, live)
        live -= sum(part.kind in (WEIGHT, BACKWARD) for part in step)
    return most


# -- tables ----------------------------------------------------------------------------------------------------------


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


def dual_pipe(ranks: int, microbatches: int) -> Table:
    """DeepSeek's DualPipe: two copies of each stage; half of the micro-batches enter at either end.

    A rank speaks of micro-batches that entered at its own end ("near") and at the other ("far"). Facts of the order of
    steps are those of DeepSeek's published description and code.

    Args:
        ranks: even.
        microbatches: even, at least twice the ranks.
    """
    if ranks % 2 or microbatches % 2 or microbatches < 2 * ranks:
        raise BubbleError(
            f"dualpipe wants an even number of ranks and an even number of micro-batches, at least twice as many: "
            f"{ranks} ranks, {microbatches} micro-batches"
        )
    return [_dual_pipe_rank(rank, ranks, microbatches // 2) for rank in range(ranks)]


def _dual_pipe_rank(rank: int, ranks: int, chunks: int) -> list[Step]:
    half = ranks // 2
    mirrored = rank >= half
    depth = ranks - 1 - rank if mirrored else rank  # from the nearer end
    outer = half - depth - 1
    counts: dict[tuple[str, bool], int] = {}
    weights: list[Part] = []
    steps: list[Step] = []

    def part(kind: str, far: bool) -> Part:
        """The next one of its kind and direction."""
        counted = (FORWARD if kind == FORWARD else BACKWARD, far)
        number = counts.get(counted, 0)
        counts[counted] = number + 1
        from_last = far != mirrored
        made = Part(kind, ranks - 1 - rank if from_last else rank, number + chunks * from_last)
        if kind == INPUT:
            weights.append(Part(WEIGHT, made.stage, made.microbatch))
        return made

    def do(kind: str, far: bool) -> None:
        steps.append((part(kind, far),))

    def do_weight() -> None:
        if weights:
            steps.append((weights.pop(0),))

    def together(forward_far: bool) -> None:
        steps.append((part(FORWARD, forward_far), part(BACKWARD, not forward_far)))

    for _ in range(2 * outer):
        do(FORWARD, False)
    for _ in range(depth + 1):
        do(FORWARD, False)
        do(FORWARD, True)
    for _ in range(outer):
        do(INPUT, True)
        do_weight()
        do(FORWARD, True)
    for number in range(chunks - ranks + depth + 1):
        if number == 0 and depth == half - 1:  # the two in the middle: apart, which leaves a smaller bubble
            do(FORWARD, False)
            do(BACKWARD, True)
        else:
            together(False)
        together(True)
    for _ in range(outer):
        do(BACKWARD, True)
        together(True)
    late = False
    for number in range(depth + 1):
        late = late or (number == (depth + 1) // 2 and depth % 2 == 1)
        do(INPUT if late else BACKWARD, True)
        late = late or (number == (depth + 1) // 2 and depth % 2 == 0)
        do(INPUT if late else BACKWARD, False)
    for _ in range(outer):
        do_weight()
        do(INPUT, False)
    while weights:
        do_weight()
    return steps


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


_PART = re.compile(r"(\d+)([FIWB])(\d+)")


def read_table(path: str | Path) -> Table:
    """A table as `torch.distributed.pipelining` dumps it: a row a rank, cells as ``0F3`` and ``(0F3;1B2)OVERLAP_F_B``.

    Cells of other actions (sends, reductions) are left out.

    Raises:
        BubbleError: it holds nothing else.
        OSError: it cannot be read.
    """
    with open(path, newline="") as file:
        rows = [[cell.strip() for cell in row] for row in csv.reader(file)]
    table: Table = []
    for row in rows:
        steps = []
        for cell in row:
            inner = cell[1:].split(")")[0].split(";") if cell.startswith("(") else [cell]
            found = [_PART.fullmatch(text.strip()) for text in inner]
            if all(found) and cell:
                steps.append(tuple(Part(m[2], int(m[1]), int(m[3])) for m in found if m is not None))
        table.append(steps)
    if not any(table):
        raise BubbleError(f"{path}: no cell names a forward or backward, as 0F3")
    return table


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
    "dualpipe": Schedule(dual_pipe, lambda ranks, t: (ranks / 2 - 1) * (t.together + t.backward - 3 * t.weight)),
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


def stages_of(table: Table) -> int:
    return 1 + max((part.stage for steps in table for step in steps for part in step), default=-1)


def stretch(imbalance_S: Sequence[float], moe_share: float) -> list[float]:
    """How many times as long stages take, if ``moe_share`` of their time goes with their busiest rank's load."""
    return [1 - moe_share + moe_share * imbalance for imbalance in imbalance_S]


def stage_imbalance(
    load_TLE: NDArray[np.float64], ep_ranks: int, slots_per_rank: int, stages: int
) -> tuple[list[float], list[float]]:
    """Imbalance of each stage before and after a plan; its layers follow one another, equally many a stage.

    Args:
        load_TLE: float64 ``[T, L, E]``, tokens per expert. Experts lie in order before; the plan is made for all
            windows.

    Returns:
        Max / mean rank load of each stage, mean over its layers and windows.

    Raises:
        BubbleError: there are fewer layers than stages.
        PlanError, PlacementError: ranks and slots do not fit the load.
    """
    layers, experts = load_TLE.shape[1:]
    if layers < stages:
        raise BubbleError(f"the load has {layers} MoE layers for {stages} stages: give at least one each")
    planned = plan(load_TLE, Topology(ep_ranks, ep_ranks), slots_per_rank=slots_per_rank)
    homes = Placement.initial(layers, experts, ep_ranks)
    stage_L = np.arange(layers) * stages // layers
    found = []
    for placement in (homes, planned.placement):
        of_layers = predicted_imbalance(load_TLE, placement).mean(axis=0)
        found.append([float(of_layers[stage_L == stage].mean()) for stage in range(stages)])
    return found[0], found[1]


def plot(played: Played, times: Times, stretch_S: Sequence[float] | None, path: str | Path) -> None:
    """Draw a row a rank: forwards, backwards, weights and what runs together, with micro-batches' numbers.

    Args:
        path: .png, .svg or .pdf; needs matplotlib.
    """
    from matplotlib.figure import Figure

    colours = {FORWARD: "#7fb3e6", INPUT: "#8fcf9f", BACKWARD: "#5fae77", WEIGHT: "#f2c572"}
    stretch_S = [1.0] * stages_of(played.table) if stretch_S is None else stretch_S
    figure = Figure(figsize=(min(40.0, 2 + played.span / 5), 1 + 0.5 * len(played.table)))
    axes = figure.add_subplot()
    for rank, (steps, begins) in enumerate(zip(played.table, played.began, strict=True)):
        for step, begin in zip(steps, begins, strict=True):
            width = times.of(step, stretch_S)
            height = 0.9 / len(step)
            for level, part in enumerate(step):
                bottom = rank - 0.45 + level * height
                axes.add_patch(_box(begin, bottom, width, height, colours[part.kind]))
                axes.text(
                    begin + width / 2, bottom + height / 2, str(part.microbatch), ha="center", va="center", size=6
                )
    axes.set_xlim(0, played.span)
    axes.set_ylim(len(played.table) - 0.5, -0.5)
    axes.set_yticks(range(len(played.table)), [f"rank {rank}" for rank in range(len(played.table))])
    axes.set_xlabel(
        "time; blue forward, green backward (light: of inputs alone), yellow of weights; two rows: together"
    )
    figure.tight_layout()
    with replacing(Path(path)) as file:
        figure.savefig(file, format=Path(path).suffix[1:])


def _box(left: float, bottom: float, width: float, height: float, colour: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((left, bottom), width, height, facecolor=colour, edgecolor="white", linewidth=0.5)
