"""Reads what `hosts.attaching.trial` has put on record of a run, and compares two runs: to the bit, or to rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...hosts.attaching.trial import KINDS, SKETCHES

_FIRST = ("gradient", "buffer", "optimizer_state", "range", "number", "parameter")
"""What is looked at first of a step: a gradient is the cause of a weight."""
TIMES_SHAKEN = 8.0
"""Two runs are equal to rounding where they differ by no more than so many times what a rounding error in each step's
gradients comes to. Measured: `python -m tests.support.misuse.table`."""
ROUNDINGS = 32.0
"""Rounding errors, relative to the tensor, that are allowed in any case."""
DENSE_ROUNDINGS = 16.0
"""Rounding errors, relative to the gradients of the whole model: a gradient that is zero but for rounding, as that of a
bias before a softmax, has any value below."""
LOSS_SHARE = 0.02
"""By which losses may differ once two runs send a token to different experts."""

Key = tuple[str, int]
"""The name of a tensor, and the logical expert; -1: it is no expert's."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One tensor, or an expert's part of it, on the ranks that have it, in their order.

    Args:
        digests: int64 ``[N]``. sums: float64 ``[N, 1 + SKETCHES]``.
    """

    kind: str
    ranks: tuple[int, ...]
    digests: tuple[int, ...]
    numel: int
    sums: NDArray[np.float64]

    def same_bits(self, other: Cell) -> bool:
        if self.kind == "range":  # ranks have other parts of an expert where it is in another slot
            return sum(self.digests) % 2**64 == sum(other.digests) % 2**64
        if self.kind == "number":
            return set(self.digests) == set(other.digests)
        return self.digests == other.digests


@dataclass(frozen=True, eq=False)
class StepRecord:
    """State after a step; of step 0, at ``attach``. ``losses``: those of each rank, as ``backward()`` was called."""

    cells: Mapping[Key, Cell]
    counts: NDArray[np.int64]
    losses: tuple[tuple[float, ...], ...]

    def ordered(self) -> list[Key]:
        return sorted(self.cells, key=lambda key: _FIRST.index(self.cells[key].kind))


@dataclass(frozen=True, eq=False)
class Run:
    """One run of the job.

    Args:
        failure: how it ended, where that was not well; empty: it went through.
    """

    folder: Path
    failure: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def length(self) -> int:
        """Steps on record; -1: not even ``attach``."""
        return len(list(self.folder.glob("step-*.npz"))) - 1

    def step(self, number: int) -> StepRecord:
        """What is on record of a step."""
        with np.load(self.folder / f"step-{number:05d}.npz", allow_pickle=False) as arrays:
            counts = arrays["counts"]
            messages = [arrays[f"rank{rank}"].tobytes() for rank in range(len(arrays.files) - 1)]
        gathered: dict[Key, list[tuple[int, str, int, int, NDArray[np.float64]]]] = {}
        losses = []
        for rank, message in enumerate(messages):
            end = 8 + int.from_bytes(message[:8], "little")
            head = json.loads(message[8:end])
            losses.append(tuple(head["losses"]))
            words = np.frombuffer(message[end:], dtype=np.int64).reshape(head["rows"], 6 + SKETCHES)
            sums = words[:, 5:].copy().view(np.float64)
            for (name, expert, kind, numel, digest), row in zip(words[:, :5].tolist(), sums, strict=True):
                gathered.setdefault((head["names"][name], expert), []).append((rank, KINDS[kind], numel, digest, row))
        cells = {
            key: Cell(
                parts[0][1],
                tuple(p[0] for p in parts),
                tuple(p[3] for p in parts),
                parts[0][2],
                np.stack([p[4] for p in parts]),
            )
            for key, parts in gathered.items()
        }
        return StepRecord(cells, counts, tuple(losses))


def run_of(folder: Path, failure: str = "") -> Run:
    """Return what a run has left in its folder."""
    path = folder / "meta.json"
    return Run(folder, failure, json.loads(path.read_text()) if path.exists() else {})


@dataclass(frozen=True)
class Difference:
    """The first tensor that is not the same in two runs; ``rank`` holds it in the second."""

    step: int
    tensor: str
    kind: str
    expert: int | None
    rank: int
    hint: str = ""


def first_difference(one: Run, other: Run) -> Difference | None:
    """Return the first difference of any bit, as far as both runs came; None: there is none."""
    for number in range(min(one.length, other.length) + 1):
        here, there = one.step(number), other.step(number)
        if here.losses != there.losses and repr(here.losses) != repr(there.losses):
            rank = next(
                r
                for r, pair in enumerate(zip(here.losses, there.losses, strict=True))
                if repr(pair[0]) != repr(pair[1])
            )
            return Difference(number, "the loss", "loss", None, rank, _hint_of_loss(number))
        for key in {**here.cells, **there.cells}:
            if (key in here.cells) != (key in there.cells):
                return _difference(
                    number, key, (here if key in here.cells else there).cells[key], 0, "one run has it alone"
                )
        odd = [key for key in here.ordered() if not here.cells[key].same_bits(there.cells[key])]
        if odd:
            first = here.cells[odd[0]], there.cells[odd[0]]
            place = next(
                (
                    n
                    for n, pair in enumerate(zip(first[0].digests, first[1].digests, strict=False))
                    if pair[0] != pair[1]
                ),
                0,
            )
            return _difference(number, odd[0], first[1], place, _hint(here, there, odd))
    return None


def _difference(step: int, key: Key, cell: Cell, place: int, hint: str) -> Difference:
    name, expert = key
    return Difference(
        step, name, cell.kind, expert if expert >= 0 else None, cell.ranks[min(place, len(cell.ranks) - 1)], hint
    )


def _hint_of_loss(step: int) -> str:
    if step == 0:
        return ""
    return "weights were the same before: the model computes with something that does not move with its experts"


def _hint(here: StepRecord, there: StepRecord, odd: list[Key]) -> str:
    """Say what the first difference points to."""
    kinds = {here.cells[key].kind for key in odd}
    if "gradient" not in kinds:
        return (
            "gradients are the same: the optimizer steps experts together, or something writes weights or keeps state by "
            "their place (an average, a snapshot: balancer.register_all)"
        )
    gradients = [key for key in odd if here.cells[key].kind == "gradient"]
    ratios = [
        float(np.sqrt(there.cells[key].sums[0, 0] / here.cells[key].sums[0, 0]))
        for key in gradients
        if here.cells[key].sums[0, 0] > 0
    ]
    if ratios and all(_is_scaled(here.cells[key], there.cells[key]) for key in gradients):
        return (
            "gradients differ by a factor: a rank scales gradients by a factor of its own (torch's clip_grad_norm_? use "
            "balancer.clip_grad_norm_)"
        )
    if all(expert >= 0 for _, expert in gradients):
        return (
            "gradients of experts alone differ: something changes them by rank or by place (an average over ranks, a "
            "penalty over the experts of a rank, a mask, a freeze)"
        )
    return "gradients outside the experts differ, too: a loss or a gradient depends on which experts a rank has"


def _is_scaled(one: Cell, other: Cell) -> bool:
    norm, changed = float(one.sums[0, 0]), float(other.sums[0, 0])
    if not norm or not changed:
        return norm == changed
    factor = np.sqrt(changed / norm)
    apart = np.sqrt(np.mean((other.sums[0, 1:] - factor * one.sums[0, 1:]) ** 2) / changed)
    return bool(abs(factor - 1) > 1e-4 and apart < 1e-3)


@dataclass(frozen=True)
class Closeness:
    """How far two runs are apart, beside what rounding comes to.

    Args:
        equal: to rounding; None: nothing could be compared.
        worst: of a tensor that is as far off as any, the difference relative to it.
        steps: compared tensor by tensor; later ones by their losses.
    """

    equal: bool | None
    worst: float
    tensor: str
    step: int
    steps: int


def to_rounding(fixed: Run, other: Run, shaken: Run, rounding: float) -> Closeness:
    """Compare gradients and updates of each step, until tokens are routed otherwise, and then losses.

    Args:
        shaken: as ``fixed``, with gradients that were changed by rounding errors.
        rounding: of the coarsest dtype that the job computes with.
    """
    worst, compared, excess = ("", 0, 0.0), 0, 0.0
    before: tuple[StepRecord, ...] = ()
    routed_alike = True
    for number in range(min(fixed.length, other.length, shaken.length) + 1):
        steps = (fixed.step(number), other.step(number), shaken.step(number))
        routed_alike &= np.array_equal(steps[0].counts, steps[1].counts)
        if not routed_alike:
            if (apart := _losses_apart(steps[0], steps[1])) > LOSS_SHARE + TIMES_SHAKEN * _losses_apart(
                steps[0], steps[2]
            ):
                return Closeness(False, apart, "the loss", number, compared)
        else:
            for key, allowed, apart, scale in _measures(steps, before, rounding):
                if apart > allowed:
                    return Closeness(False, apart / scale if scale else float("inf"), _shown(key), number, compared)
                if allowed and apart / allowed > excess:
                    excess, worst = apart / allowed, (_shown(key), number, apart / scale if scale else 0.0)
            compared = number
        before = steps
    return Closeness(True if compared else None, worst[2], worst[0], worst[1], compared)


def _measures(
    steps: tuple[StepRecord, ...], before: tuple[StepRecord, ...], rounding: float
) -> Iterator[tuple[Key, float, float, float]]:
    """Of each gradient and each update of a weight: its key, the difference that is allowed, that which is there, and
    its norm."""
    fixed, other, shaken = steps
    gradients = [cell for cell in fixed.cells.values() if cell.kind == "gradient"]
    elements = sum(cell.numel for cell in gradients)
    typical = np.sqrt(sum(float(cell.sums[0, 0]) for cell in gradients) / elements) if elements else 0.0
    noise_only = set()
    for key in fixed.ordered():
        cell = fixed.cells[key]
        if key not in other.cells or key not in shaken.cells or cell.kind not in ("gradient", "parameter"):
            continue
        floor = 0.0
        if cell.kind == "gradient":
            scale = float(np.sqrt(cell.sums[0, 0]))
            if key[1] < 0:
                floor = DENSE_ROUNDINGS * rounding * typical * np.sqrt(cell.numel)
                if scale <= floor:
                    noise_only.add(key[0].removesuffix("/grad"))
        elif not before or key[0] in noise_only:
            continue
        sums = [_changes(key, cell.kind, step, last) for step, last in zip(steps, before or steps, strict=True)]
        if cell.kind == "parameter":
            scale = float(np.sqrt(np.mean(sums[0][0] ** 2)))
            floor = rounding * float(np.sqrt(cell.sums[0, 0])) if np.isfinite(cell.sums[0, 0]) else 0.0
        moved = max(_apart(sums[0][n if len(sums[0]) == len(sums[1]) else 0], row) for n, row in enumerate(sums[1]))
        noise = max(_apart(sums[0][n], row) for n, row in enumerate(sums[2]))
        if np.isfinite(scale):
            yield key, TIMES_SHAKEN * noise + ROUNDINGS * rounding * scale + floor, moved, scale


def _changes(key: Key, kind: str, step: StepRecord, last: StepRecord) -> NDArray[np.float64]:
    """Random sums of a gradient, or of what has changed in a weight, ``[N, SKETCHES]``."""
    sums = step.cells[key].sums[:, 1:]
    return sums if kind == "gradient" else sums - last.cells[key].sums[:, 1:]


def _apart(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    apart = float(np.sqrt(np.mean((one - other) ** 2)))
    return apart if np.isfinite(apart) else (0.0 if np.array_equal(one, other, equal_nan=True) else float("inf"))


def _losses_apart(one: StepRecord, other: StepRecord) -> float:
    pairs = zip(np.concatenate([*one.losses, [0.0]]), np.concatenate([*other.losses, [0.0]]), strict=False)
    return max((abs(a - b) / max(abs(a), 1e-12) for a, b in pairs if a != b), default=0.0)


def _shown(key: Key) -> str:
    return key[0] if key[1] < 0 else f"{key[0]} of expert {key[1]}"
