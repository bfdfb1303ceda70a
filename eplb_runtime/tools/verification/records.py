"""Reads what `hosts.attaching.trial` has put on record of a run, and compares two runs, to the bit or to rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...hosts.attaching.trial import FOUND, KINDS

TIMES_SHAKEN, ROUNDINGS = 12.0, 20.0
"""Runs may differ by so often what rounding errors in each step come to in this job; or, in any case, by so many
rounding errors of a tensor; of gradients those of float32, as wide as they are."""
NOISE_ROUNDINGS, COARSE_ROUNDINGS = 16.0, 2.0
"""Of the model's typical gradient: one that is zero but for rounding (a bias before a softmax) has any value below. The
second: of bfloat16, outside the experts."""
LOSS_SHARE, MOST_ALLOWED = 0.02, 0.1
"""By which losses, and tokens of experts, may differ once two runs send a token to different experts; and half of the
tensors in float32 in a first step: where rounding comes to more, nothing can be said."""

Key = tuple[str, int]  # the name of a tensor, and the logical expert; -1: it is no expert's
Measure = tuple[str, float, float, float]


@dataclass(frozen=True, eq=False)
class Cell:
    """One tensor, or an expert's part of it, on the ranks that have it; ``sums`` is float64 ``[N, 1 + SKETCHES]``."""

    kind: str
    numel: int
    ranks: tuple[int, ...]
    digests: tuple[int, ...]
    sums: NDArray[np.float64]

    def same_bits(self, other: Cell) -> bool:
        if self.kind == "range":  # in another slot ranks have other parts of an expert
            return sum(self.digests) % 2**64 == sum(other.digests) % 2**64
        return set(self.digests) == set(other.digests) if self.kind == "number" else self.digests == other.digests

    @property
    def norm(self) -> float:
        return float(np.sqrt(self.sums[0, 0]))


@dataclass(frozen=True, eq=False)
class StepRecord:
    """State after a step (0: at ``attach``), counts of tokens, and of each rank what ``backward()`` was called on."""

    cells: Mapping[Key, Cell]
    counts: NDArray[np.int64]
    losses: tuple[tuple[float, ...], ...]

    def ordered(self) -> list[Key]:
        return sorted(self.cells, key=lambda key: KINDS.index(self.cells[key].kind))


@dataclass(frozen=True, eq=False)
class Run:
    """One run of the job; ``failure`` says how it ended, where that was not well."""

    folder: Path
    meta: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of(cls, folder: Path) -> Run:
        path = folder / "meta.json"
        return cls(folder, json.loads(path.read_text()) if path.exists() else {})

    @property
    def length(self) -> int:
        """Steps on record; -1: not even ``attach``."""
        return len(list(self.folder.glob("step-*.jsonl"))) - 1

    def step(self, number: int) -> StepRecord:
        """Return what is on record of a step."""
        lines = (self.folder / f"step-{number:05d}.jsonl").read_text().splitlines()
        counts, *of_ranks = map(json.loads, lines)
        gathered: dict[Key, list[Any]] = {}
        for rank, (_, rows) in enumerate(of_ranks):
            for name, expert, kind, numel, digest, sums in rows:
                gathered.setdefault((name, expert), []).append((kind, numel, rank, digest, sums))
        cells = {}
        for key, found in gathered.items():
            kinds, sizes, ranks, digests, sums = zip(*found, strict=True)
            cells[key] = Cell(kinds[0], sizes[0], ranks, digests, np.array(sums))
        return StepRecord(cells, np.array(counts), tuple(tuple(losses) for losses, _ in of_ranks))


@dataclass(frozen=True)
class Difference:
    """The first tensor that is not the same in two runs, and a rank that holds it."""

    step: int
    tensor: str
    expert: int | None
    rank: int
    hint: str = ""

    def __str__(self) -> str:
        when = "before the first step" if self.step == 0 else f"after step {self.step}"
        what = self.tensor if self.expert is None else f"{self.tensor} of expert {self.expert}"
        return f"{when} {what} differs on rank {self.rank}" + (f"; {self.hint}" if self.hint else "")


def first_difference(one: Run, other: Run) -> Difference | None:
    """Return the first difference of any bit, as far as both runs came; None: there is none. Losses alone make none: a
    term over a rank's experts goes by where they are, and its gradient may not."""
    for number in range(min(one.length, other.length) + 1):
        here, there = one.step(number), other.step(number)
        lone = here.cells.keys() ^ there.cells.keys()
        both = (key for key in here.ordered() if key not in lone)
        if odd := [*lone, *(key for key in both if not here.cells[key].same_bits(there.cells[key]))]:
            losses = zip(map(repr, here.losses), map(repr, there.losses), strict=True)  # NaN is equal to itself
            for rank in (rank for rank, (a, b) in enumerate(losses) if a != b):
                hint = "weights were the same: the model computes with something that does not move with its experts"
                return Difference(number, "the loss", None, rank, hint)
            name, expert = key = odd[0]
            cells = [step.cells[key] for step in (here, there) if key in step.cells]
            pairs = enumerate(zip(cells[0].digests, cells[-1].digests, strict=False))
            place = next((place for place, (a, b) in pairs if a != b), 0)
            hint = "one run has it alone" if lone else _hint(here, there, odd)
            return Difference(number, name, expert if expert >= 0 else None, cells[-1].ranks[place], hint)
    return None


def untrained(run: Run) -> str:
    """Name a parameter with a gradient, where no step changes any such (of experts; of the rest); empty: none."""
    first, last = run.step(0).cells, run.step(run.length).cells
    trained = {key[0].removesuffix("/grad") for key, cell in last.items() if cell.kind == "gradient" and cell.norm}
    for is_expert in (True, False):
        keys = [key for key in first if key[0] in trained.difference(run.meta["still"]) and (key[1] >= 0) == is_expert]
        if keys and all(first[key].same_bits(last[key]) for key in keys):
            return keys[0][0]
    return ""


def _hint(here: StepRecord, there: StepRecord, odd: Sequence[Key]) -> str:
    """Say what a step's differences point to."""
    gradients = [key for key in odd if here.cells[key].kind == "gradient"]
    of_experts = [key for key in gradients if key[1] >= 0]
    if not gradients:
        return "gradients are the same: the optimizer mixes experts, or something writes or keeps them by place"
    if all(_is_scaled(here.cells[key], there.cells[key]) for key in of_experts or gradients):
        return "a rank scales gradients by a factor of its own (torch's clip_grad_norm_? use balancer.clip_grad_norm_)"
    if of_experts == gradients:
        return "only gradients of experts: something changes them by rank or by place (an average, a penalty, a freeze)"
    return "gradients outside the experts, too: a loss or a gradient depends on which experts a rank has"


def _is_scaled(one: Cell, other: Cell) -> bool:
    """Return whether the two are the same but for a factor, as far as can be seen."""
    if not one.norm or not other.norm:
        return one.norm == other.norm
    factor = other.norm / one.norm
    return abs(factor - 1) > 1e-4 and _apart(other.sums[0, 1:], factor * one.sums[0, 1:]) < 1e-3 * other.norm


@dataclass(frozen=True)
class Closeness:
    """How far two runs are apart: ``worst``, of a tensor at a step, is the difference that comes closest to what is
    allowed, or is above, relative to its tensor; ``steps`` were compared tensor by tensor, later ones by their losses;
    ``equal`` is None where nothing could be compared."""

    equal: bool | None
    worst: float
    tensor: str
    step: int
    steps: int


def to_rounding(fixed: Run, other: Run, shaken: Run) -> Closeness:
    """Compare gradients and updates of each step until tokens are routed otherwise, and then losses if they were alike.
    ``shaken`` is as ``fixed``, with gradients that were changed by rounding errors."""
    excess, worst, compared, routed_alike, losses_count = 0.0, (0.0, "", 0), 0, True, True
    rounding = float(fixed.meta["rounding"])
    before: tuple[StepRecord, ...] = ()
    for number in range(min(fixed.length, other.length, shaken.length) + 1):
        steps = (fixed.step(number), other.step(number), shaken.step(number))
        was_alike, routed_alike = routed_alike, routed_alike and np.array_equal(steps[0].counts, steps[1].counts)
        losses_count &= not routed_alike or all(apart <= allowed for _, allowed, apart, _ in _losses(steps))
        measures: Sequence[Measure] = [*_measures(steps, before, fixed.meta)] if was_alike else ()
        middle = np.median([0.0, *(allowed / scale for _, allowed, _, scale in measures if scale)])
        if middle > MOST_ALLOWED and not compared and rounding <= np.finfo(np.float32).eps:
            return Closeness(None, float(middle), "", number, 0)
        if not routed_alike:  # what a step finds goes by no token of it
            of_losses = _losses(steps) if losses_count else ()
            measures = (*(one for one in measures if one[0].partition(" of expert")[0].endswith(FOUND)), *of_losses)
        for name, allowed, apart, scale in measures:
            share = apart / scale if scale else float(apart > 0)
            if apart > allowed:
                return Closeness(False, share, name, number, compared)
            if allowed and apart / allowed > excess:
                excess, worst = apart / allowed, (share, name, number)
        compared, before = number if routed_alike else compared, steps
    return Closeness(True if compared else None, *worst, compared)


def routes_alike(one: Run, other: Run, until: int) -> bool:
    """Return whether two runs give each expert as many tokens in each step, up to this one."""
    return all(np.array_equal(one.step(number).counts, other.step(number).counts) for number in range(until + 1))


def _measures(steps: Sequence[StepRecord], before: Sequence[StepRecord], meta: Mapping[str, Any]) -> Iterator[Measure]:
    """Yield each gradient, buffer and change of a weight: its name, by what it may differ and does, and its size.
    Rounding is that of the expert, or of any weight's change, with the most: few elements make it by chance."""
    fixed, other, shaken = (step.cells for step in steps)
    gradients = [cell.norm / max(1, cell.numel) ** 0.5 for cell in fixed.values() if cell.kind == "gradient"]
    typical = float(np.quantile([0.0, *gradients], 0.75))  # one alone may be as large as it likes
    rounding = float(meta["rounding"])
    noise_only, found, fine = set(), [], min(rounding, float(np.finfo(np.float32).eps))
    for key in [*steps[0].ordered(), *(key for key in other if key not in fixed)]:
        cell, has_all = fixed.get(key) or other[key], key in fixed and key in other and key in shaken
        if not (cell.kind == "gradient" or (has_all and cell.kind in ("found", "parameter", "buffer"))):
            continue
        weight = key[0].removesuffix(FOUND), key[1]
        # A gradient that one run has alone is one of zeros in the others.
        sums = [one[key].sums[:, 1:] if key in one else 0 * cell.sums[:, 1:] for one in (fixed, other, shaken)]
        if cell.kind == "buffer":
            scale, floor = cell.norm, 0.0
        elif cell.kind == "gradient":
            noise = max(NOISE_ROUNDINGS * fine, COARSE_ROUNDINGS * rounding * (key[1] < 0))
            floor = noise * typical * np.sqrt(cell.numel)
            if (scale := cell.norm) <= floor:
                noise_only.add(key)
        elif not before or (f"{key[0]}/grad", key[1]) in noise_only or any(weight not in one.cells for one in before):
            continue
        else:  # what the optimizer has changed, or the loop since its last step
            sums = [one - step.cells[weight].sums[:, 1:] for one, step in zip(sums, before, strict=True)]
            scale = float(np.sqrt(np.max(np.sum(sums[0] ** 2, axis=1))))
            floor = meta["eps"].get(weight[0], rounding) * cell.norm
        if np.isfinite(scale + floor):
            same = len(sums[0]) == len(sums[1])
            apart = max(_apart(sums[0][place if same else 0], row) for place, row in enumerate(sums[1]))
            noise = max(_apart(sums[0][place], row) for place, row in enumerate(sums[2]))
            least = ROUNDINGS * (fine if cell.kind == "gradient" else rounding) * scale + floor
            found.append((key, cell.kind, noise, least, apart, scale))
    most: dict[str, float] = {}
    is_rounding = np.array_equal(steps[0].counts, steps[2].counts)  # else a choice of experts, in some tensors alone
    for key, kind, noise, _, _, scale in found if is_rounding else ():
        if scale and key not in noise_only and (key[1] >= 0 or kind == "parameter"):
            most[kind] = max(most.get(kind, 0.0), noise / scale)
    for key, kind, noise, least, apart, scale in found:
        if key[1] >= 0 or kind == "parameter":
            noise = max(noise, most.get(kind, 0.0) * scale)
        shown = key[0] if key[1] < 0 else f"{key[0]} of expert {key[1]}"
        yield shown, TIMES_SHAKEN * noise + least, apart, scale


def _losses(steps: Sequence[StepRecord]) -> Iterator[Measure]:
    """Measures of how many tokens experts get, and of each rank's losses."""
    fixed, *others = (step.counts.astype(float) for step in steps)
    apart, noise = (float(np.abs(fixed - one).sum()) for one in others)
    yield "spread of tokens", LOSS_SHARE * fixed.sum() + TIMES_SHAKEN * noise, apart, fixed.sum()
    for of_rank in zip(*(step.losses for step in steps), strict=True):
        for loss, other, shaken in zip(*of_rank, strict=False):
            yield "the loss", LOSS_SHARE * abs(loss) + TIMES_SHAKEN * abs(loss - shaken), abs(loss - other), abs(loss)


def _apart(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """The distance of two tensors, by their random sums."""
    apart = float(np.sqrt(np.sum((one - other) ** 2)))
    return apart if np.isfinite(apart) else (0.0 if np.array_equal(one, other, equal_nan=True) else float("inf"))


# -- the answer --------------------------------------------------------------------------------------------------------


Verdict = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True)
class Report:
    """What the runs of a job have shown.

    Args:
        reason: why the verdict is not ``"right"``.
        moved: whether a run with homes moved after each step gave the same bits; ``difference``: the first that is not.
        moved_rounding: where bits cannot be the same (replicas, or what ``notes`` say): how close they are.
        single: how close a run is with all experts on each rank; ``single_reason``: why there is none.
        unregistered: ``{"holder", "shape"}`` of tensors that may be experts and are not registered.
        said: lines of the guard. notes: what ``attach`` says of bits.
    """

    verdict: Verdict
    reason: str = ""
    steps: int = 0
    ranks: int = 0
    tensors: int = 0
    repeats: bool | None = None
    moved: bool | None = None
    difference: Difference | None = None
    moved_rounding: Closeness | None = None
    single: Closeness | None = None
    single_reason: str = ""
    unregistered: tuple[dict[str, Any], ...] = ()
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``eplb-runtime verify --json``; numbers that JSON does not have are null."""
        plain = asdict(self)
        moved, rounding, single = (plain.pop(name) for name in ("difference", "moved_rounding", "single"))
        moved = moved or dict.fromkeys(one.name for one in fields(Difference))
        single = single or dict.fromkeys(one.name for one in fields(Closeness))
        plain["moved"] = {"equal": self.moved, **moved, "rounding": rounding}
        plain["single"] = {**single, "reason": plain.pop("single_reason")}
        found: dict[str, Any] = json.loads(json.dumps(plain), parse_constant=lambda _: None)
        return found

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.passed:
            lines = [f"right: {self.steps} steps, {self.ranks} ranks: {'; '.join(self._shown())}."]
        lines += dict.fromkeys(f"  not registered: {o['holder']}, shape {o['shape']}" for o in self.unregistered)
        said = {one.partition(":")[0]: f"  said in the job: {one}" for one in self.said if one not in self.reason}
        return "\n".join([*lines, *said.values(), *(f"  bits: {line}" for line in self.notes)])

    def _shown(self) -> list[str]:
        """What a right job has shown."""
        shown = [f"moved homes gave the same bits in {self.tensors} tensors"] if self.moved else []
        close = ("replicas give" if self.moved else "moved homes give", self.moved_rounding)
        for what, one in (close, ("all experts on each rank give", self.single)):
            if one is not None:
                shown.append(f"{what} the same to rounding (worst {one.worst:.1g} of {one.tensor}, {one.steps} steps)")
        if self.single is None:
            shown.append(f"not compared with all experts on each rank: {self.single_reason}")
        return [*shown, "the job repeats itself"]
