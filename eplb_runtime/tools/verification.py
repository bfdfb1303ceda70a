"""Proves that a job trains the same wherever its experts are: compares a few steps of it in several layouts."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import BalancerConfig, Trial, launcher_environment, set_trial, take_trial
from ..hosts import attach
from ..hosts.attaching.trial import KINDS
from ..utils.text import counted

SEED = 20250710
_LOOK_SECONDS, _END_SECONDS = 0.2, 30.0
_STARTED = "EPLB_RUNTIME_STARTED_BY_VERIFY"  # in the environment of all that a job starts: where its records are
_NAMES = {"single": "all experts on each rank", "replicas": "moved homes and replicas"}
_PENALTY = ": what a rank does with its experts is not plain training (a penalty, scale, mask, norm by hand, `run`?)"
_KEPT = "; {} and others of before attach are in use still: take parameters from model.parameters() after attach"
_HELD = "{holder} may hold experts, shape {shape}: balancer.register_all(name, it), or let go of it after each step"
LEAST_ALLOWED, ROUNDINGS = 1e-3, 32.0
"""By how much of itself a gradient may differ in the first step, n times as much in step n: rounding in float32 comes
to far less, and in a coarser format to this many of its rounding errors."""
OF_TYPICAL = 0.1
"""Share of the model's typical gradient that a smaller one is measured by: it may be zero but for rounding."""
SPREAD, FEW = 0.05, 8
"""A share of tokens and their number that rounding may send to other experts where it first sends any."""
EXACT, TINY, _LEAST = 0.01, 1e-5, 1e-300
"""Relative distances up to which a factor is a number, and a difference of bits looks like one of rounding; the last
stands for 0 below a fraction."""
SHARES = (
    "gradients of {} are {:.3g} times as large as the experts': average gradients over ranks once, on all ranks alike "
    "(DDP, or dense_gradients='allreduce'), and do not divide the loss by a number of ranks"
)
DIFFERENCE, CLOSENESS = ("step", "tensor", "expert", "rank", "hint"), ("equal", "worst", "tensor", "step", "steps")
"""Keys of the first difference of bits, and of a comparison to rounding."""
Key = tuple[str, int]  # the name of a tensor, and the logical expert; -1: it is no expert's
Sums = NDArray[np.float64]
Verdict = Literal["right", "wrong", "unknown"]


@dataclass(frozen=True, eq=False)
class Cell:
    """One tensor, or an expert's part of it, on the ranks that have it; ``sums`` is float64 ``[N, 1 + SKETCHES]``."""

    kind: str
    numel: int
    ranks: tuple[int, ...]
    digests: tuple[int, ...]
    sums: Sums

    def same_bits(self, other: Self) -> bool:
        if self.kind == "range":  # in another slot ranks have other parts of an expert
            return sum(self.digests) % 2**64 == sum(other.digests) % 2**64
        return set(self.digests) == set(other.digests) if self.kind == "number" else self.digests == other.digests

    @property
    def norm(self) -> float:
        return float(np.sqrt(self.sums[0, 0]))


@dataclass(frozen=True, eq=False)
class StepRecord:
    """State after a step (0: at ``attach``), causes first, and counts of tokens."""

    cells: Mapping[Key, Cell]
    counts: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Run:
    """One run of the job; ``failure`` says how it ended, where that was not well."""

    folder: Path
    meta: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""

    @classmethod
    def of(cls, folder: Path) -> Self:
        path = folder / "meta.json"
        return cls(folder, json.loads(path.read_text()) if path.exists() else {})

    @property
    def length(self) -> int:
        """Return the number of steps on record; -1: not even the state at ``attach``."""
        return len(list(self.folder.glob("step-*.jsonl"))) - 1

    def step(self, number: int) -> StepRecord:
        """Read the record of a step (0: at ``attach``) from the run's folder."""
        lines = (self.folder / f"step-{number:05d}.jsonl").read_text().splitlines()
        counts, *of_ranks = map(json.loads, lines)
        gathered: defaultdict[Key, list[Any]] = defaultdict(list)
        for rank, rows in enumerate(of_ranks):
            for name, kind, expert, numel, digest, sums in rows:
                gathered[name, expert].append((kind, numel, rank, digest, sums))
        cells: dict[Key, Cell] = {}
        for key, found in sorted(gathered.items(), key=lambda item: KINDS.index(item[1][0][0])):
            kinds, sizes, ranks, digests, sums = zip(*found, strict=True)
            cells[key] = Cell(kinds[0], sizes[0], ranks, digests, np.array(sums))
        return StepRecord(cells, np.array(counts))


# -- bits --------------------------------------------------------------------------------------------------------------


def first_difference(one: Run, other: Run) -> dict[str, Any]:
    """Return the first difference of any bit, as far as both runs came: ``step``, ``tensor``, ``expert`` (None: it is
    no expert's), ``rank`` that holds it, and ``hint``, in words. An empty dict: there is none. Losses are not compared:
    a term over a rank's experts depends on where they are, and its gradient may not."""
    for number in range(min(one.length, other.length) + 1):
        here, there = one.step(number), other.step(number)
        lone = here.cells.keys() ^ there.cells.keys()
        both = (key for key in here.cells if key not in lone)
        if odd := [*lone, *(key for key in both if not here.cells[key].same_bits(there.cells[key]))]:
            name, expert = key = odd[0]
            cells = [step.cells[key] for step in (here, there) if key in step.cells]
            pairs = enumerate(zip(cells[0].digests, cells[-1].digests, strict=False))
            rank = cells[-1].ranks[next((place for place, (a, b) in pairs if a != b), 0)]
            hint = "one run has it alone" if lone else _hint(here, there, odd)
            return dict(zip(DIFFERENCE, (number, name, expert if expert >= 0 else None, rank, hint), strict=True))
    return {}


def _shown(found: Mapping[str, Any]) -> str:
    """Return a difference in words."""
    when = f"after step {found['step']}" if found["step"] else "before the first step"
    what = found["tensor"] if found["expert"] is None else f"{found['tensor']} of expert {found['expert']}"
    return f"{when} {what} differs on rank {found['rank']}; {found['hint']}"


def _hint(here: StepRecord, there: StepRecord, odd: Sequence[Key]) -> str:
    """Say what a step's differences point to."""
    gradients = [key for key in odd if here.cells[key].kind == "gradient"]
    of_experts = [key for key in gradients if key[1] >= 0]
    if not gradients:
        return "gradients are the same: the optimizer mixes experts, or something writes or keeps them by place"
    pairs = [(here.cells[key], there.cells[key]) for key in of_experts or gradients]
    factors = [other.norm / one.norm if one.norm else 1.0 for one, other in pairs]
    scaled = [_apart(factor * one.sums, other.sums) for factor, (one, other) in zip(factors, pairs, strict=True)]
    if all(apart <= TINY * other.norm for apart, (_, other) in zip(scaled, pairs, strict=True)):
        return "by a factor or rounding alone: is a norm a rank's own, or summed by place? use balancer.clip_grad_norm_"
    if of_experts == gradients:
        return "only gradients of experts: something changes them by rank or by place (an average, a penalty, a freeze)"
    return "gradients outside the experts, too: a loss or a gradient depends on which experts a rank has"


# -- one run by itself -------------------------------------------------------------------------------------------------


def untrained(run: Run) -> Iterator[str]:
    """Yield a sentence if experts have gradients after the last step and no step has changed any of these weights, and
    one if that is so of all other weights with gradients; or one if nothing has a gradient."""
    first, last = run.step(0).cells, run.step(run.length).cells
    trained = {key[0].removesuffix("/grad") for key, cell in last.items() if cell.kind == "gradient" and cell.norm}
    if not trained:
        yield "no weight has a gradient after the last step: is it gone before the optimizer's step?"
    for is_expert in (True, False):
        keys = [key for key in first if key[0] in trained and (key[1] >= 0) == is_expert]
        if keys and all(first[key].same_bits(last[key]) for key in keys):
            yield f"{keys[0][0]} has gradients and no step changes it: does the optimizer step this model?"


def scaled_gradients(single: Run) -> Iterator[str]:
    """Yield a sentence for each tensor outside the experts whose gradient the loop multiplies or divides by a number of
    ranks, relative to experts' gradients, in two successive steps. (Clipping has another factor in each step.)"""
    before, ranks = dict[str, float](), int(single.meta["ranks"])
    numbers = [one for n in range(2, ranks + 1) if ranks % n == 0 for one in (n, 1 / n)]
    for step in map(single.step, range(1, single.length + 1)):
        factors: dict[Key, float] = {}
        for (name, expert), cell in step.cells.items():
            seen, given_S = step.cells.get((name.removesuffix("given") + "grad", expert)), cell.sums[:, 1:].sum(axis=0)
            if cell.kind == "given" and seen is not None and given_S.any():
                factors[name, expert] = float(given_S @ seen.sums[:, 1:].sum(axis=0) / (given_S @ given_S))
        usual = float(np.median([factor for (_, expert), factor in factors.items() if expert >= 0] or [0.0]))
        ratios = {name: one / usual for (name, expert), one in factors.items() if expert < 0 and usual and one}
        for name in ratios.keys() & before.keys():
            if any(all(abs(one / n - 1) < EXACT for one in (before[name], ratios[name])) for n in numbers):
                yield SHARES.format(name.removesuffix("/given"), ratios[name])
        before = ratios


# -- rounding ----------------------------------------------------------------------------------------------------------


def to_rounding(fixed: Run, other: Run) -> dict[str, Any]:
    """Compare gradients and updates step by step until tokens are routed differently (many tokens: not equal). Return
    ``equal`` (None: routed differently in step 1, nothing was compared); ``worst``, the difference that is closest to
    what is allowed or above it, relative to its ``tensor``, with its ``step``; and ``steps``, how many were
    compared."""
    worst, before = (0.0, 0.0, "", 0), (fixed.step(0), other.step(0))
    rounding, length = float(fixed.meta["rounding"]), min(fixed.length, other.length)
    equal: bool | None = True
    steps = length
    for number in range(1, length + 1):
        both = fixed.step(number), other.step(number)
        tokens, elsewhere = both[0].counts.sum(), np.abs(both[0].counts - both[1].counts).sum()
        if elsewhere:
            equal, steps = number > 1 or None, number - 1
            if elsewhere > SPREAD * tokens + FEW:
                equal, worst = False, (0.0, float(elsewhere / tokens), "spread of tokens", number)
            break
        share = number * max(LEAST_ALLOWED, ROUNDINGS * rounding)
        worst = max([worst, *((*one, number) for one in _measures(both, before, share, rounding))])
        if worst[0] > 1:
            equal, steps = False, number
            break
        before = both
    return dict(zip(CLOSENESS, (equal, *worst[1:], steps), strict=True))


def _measures(
    steps: tuple[StepRecord, StepRecord], before: tuple[StepRecord, StepRecord], share: float, rounding: float
) -> Iterator[tuple[float, float, str]]:
    """Yield of each gradient and change of a weight how far runs are apart, by what is allowed and by its size, and its
    name."""
    fixed, other = (step.cells for step in steps)
    gradients = [cell.norm / max(1, cell.numel) ** 0.5 for cell in fixed.values() if cell.kind == "gradient"]
    typical = float(np.quantile([0.0, *gradients], 0.75))  # one alone may be as large as it likes
    for key in {**fixed, **other}:
        cell, gradient = fixed.get(key) or other[key], fixed.get((f"{key[0]}/grad", key[1]))
        # A gradient that one run has alone is one of zeros in the other.
        one, two = (cells[key].sums if key in cells else 0 * cell.sums for cells in (fixed, other))
        scale = cell.norm
        if cell.kind == "gradient":
            allowed = share * max(scale, OF_TYPICAL * typical * cell.numel**0.5)
        elif cell.kind == "parameter" and all(key in step.cells for step in (*steps, *before)):
            if gradient is not None and gradient.norm <= share * typical * cell.numel**0.5:
                continue  # which Adam makes as large as others, and is noise
            one, two = (row - step.cells[key].sums for row, step in zip((one, two), before, strict=True))
            scale = _apart(one[:1], 0 * one[:1])
            # Where rounding decides on the sign of a share of elements, Adam takes whole steps to either side.
            allowed = share**0.5 * scale + rounding * cell.norm
        else:
            continue
        if np.isfinite(scale + allowed):
            apart = _apart(one if len(one) == len(two) else one[:1], two)
            shown = key[0] if key[1] < 0 else f"{key[0]} of expert {key[1]}"
            yield apart / max(allowed, _LEAST), apart / max(scale, _LEAST), shown


def _apart(one: Sums, other: Sums) -> float:
    """Return the largest distance of two tensors on a rank, by their random sums."""
    with np.errstate(all="ignore"):
        apart = float(np.sqrt(np.sum((one - other)[:, 1:] ** 2, axis=1)).max())
    return apart if np.isfinite(apart) else (0.0 if np.array_equal(one, other, equal_nan=True) else float("inf"))


# -- the answer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What the runs of a job have shown: the keys of ``eplb-runtime verify --json``.

    Args:
        reason: why the verdict is not ``"right"``.
        moved: ``equal``, whether homes moved after each step gave the same bits; else the `first_difference`;
            ``rounding``: where bits cannot be the same (replicas, or what ``notes`` say), what `to_rounding` gives.
        single: the same of a run with all experts on each rank, or the ``reason`` why there is none.
        unregistered: ``{"holder", "shape"}`` of tensors that may be experts and are not registered.
        said: lines of the guard. notes: what ``attach`` says of bits.
    """

    verdict: Verdict
    reason: str = ""
    steps: int = 0
    ranks: int = 0
    tensors: int = 0
    repeats: bool | None = None
    moved: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys(("equal", *DIFFERENCE, "rounding")))
    single: Mapping[str, Any] = field(default_factory=lambda: dict.fromkeys((*CLOSENESS, "reason")))
    unregistered: tuple[Mapping[str, Any], ...] = ()
    said: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether the verdict is ``"right"``."""
        return self.verdict == "right"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of ``eplb-runtime verify --json``. NaN and infinity become None."""
        found: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=lambda _: None)
        return found

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.reason}"]
        if self.passed:
            lines = [f"right: {self.steps} steps, {self.ranks} ranks: {'; '.join(self._right())}."]
        lines += dict.fromkeys(f"  not registered: {o['holder']}, shape {o['shape']}" for o in self.unregistered)
        said = {one.partition(":")[0]: f"  said in the job: {one}" for one in self.said if one not in self.reason}
        return "\n".join([*lines, *said.values(), *(f"  bits: {line}" for line in self.notes)])

    def _right(self) -> Iterator[str]:
        """What a right job has shown."""
        if self.moved["equal"]:
            yield f"moved homes gave the same bits in {self.tensors} tensors"
        close = ("replicas give" if self.moved["equal"] else "moved homes give", self.moved["rounding"])
        for what, one in (close, ("all experts on each rank give", self.single)):
            if one is not None and one["equal"]:
                yield f"{what} the same to rounding (worst {one['worst']:.1g} of {one['tensor']}, {one['steps']} steps)"
        if self.single["reason"]:
            yield f"not compared with all experts on each rank: {self.single['reason']}"
        yield "the job repeats itself"


def proof(run: Callable[[str], Run]) -> Report:
    """Call ``run`` with the layouts of a `Trial`, as far as needed, and return what these runs have shown."""
    runs = [fixed := run("fixed")]
    meta, found = fixed.meta, dict[str, Any](steps=max(0, fixed.length))
    found |= {"ranks": meta.get("ranks", 0), "notes": tuple(meta.get("notes", ()))}

    def answer(verdict: Verdict, reason: str = "") -> Report:
        said = dict.fromkeys(line for run in runs for line in run.meta.get("said", ()))
        return Report(verdict, reason, **found, said=tuple(said))

    if fixed.failure:
        return answer("unknown", f"the run with fixed homes failed: {fixed.failure}")
    if fixed.length < 1:
        what = "ended before its first optimizer step" if fixed.length == 0 else "reached no eplb_runtime.attach"
        return answer("unknown", f"the job {what} (the launcher must pass its environment on to the ranks)")
    runs.append(moved := run("moved"))
    difference = first_difference(fixed, moved)
    found["tensors"] = len({name for (name, _), cell in fixed.step(fixed.length).cells.items() if cell.kind != "given"})
    found["unregistered"] = tuple(moved.meta.get("unregistered", ()))
    found["moved"] = dict.fromkeys((*DIFFERENCE, "rounding")) | {"equal": not difference} | difference
    if not difference and moved.length < fixed.length:
        why = moved.failure or "without an error: does its end depend on the time?"
        by_homes = moved.failure and moved.length >= 0 and run("fixed").length == fixed.length
        return answer("wrong" if by_homes else "unknown", f"the run with moved homes ended sooner: {why}")
    if not difference and not moved.meta["commits"]:
        few = f"no expert moved in {counted(moved.length, 'step')}"
        return answer("unknown", f"{few}: train for 3 or more, and give as many as --steps, or see its output")
    again = run("fixed") if difference else fixed
    if again.length < min(fixed.length, moved.length):
        return answer("unknown", f"the second run with fixed homes ended sooner: {again.failure}")
    odd = first_difference(fixed, again) if difference else {}
    found["repeats"] = not odd
    if odd:
        return answer("unknown", f"the job does not repeat itself: in a second run {_shown(odd)}")
    if difference and not found["notes"]:
        kept = _KEPT.format(*moved.meta["replaced"]) if moved.meta.get("replaced") else ""
        return answer("wrong", f"with moved homes {_shown(difference)}{kept}")
    reason, replicas = str(meta["not_single"]), bool(meta["replica_slots"])
    found["single"] = dict.fromkeys(CLOSENESS) | {"reason": reason}
    for layout in ["single"] * (not reason) + ["replicas"] * bool(replicas or difference):
        other = run(layout) if replicas or layout == "single" else moved
        runs.append(other)
        if other.length < fixed.length:
            often = "every rank must call backward() as often"
            return answer("unknown", f"the run with {_NAMES[layout]} ended sooner ({often}): {other.failure}")
        close = to_rounding(fixed, other)
        if layout == "single":
            found["single"] |= close
        else:
            found["moved"]["rounding"] = close
        if close["equal"] is None:
            why = f"the run with {_NAMES[layout]} routes tokens differently from its first step on"
            return answer("unknown", why + _PENALTY * (layout == "single"))
        if not close["equal"]:
            why = "{} give another {tensor} after step {step} ({worst:.2g} off)".format(_NAMES[layout], **close)
            return answer("wrong", why + _PENALTY * (layout == "single"))
    if said := answer("right").said:
        return answer("wrong", f"said in the job: {said[0]}")
    doubts = [
        *(_HELD.format(**one) for one in found["unregistered"]),
        *(f"{one} could not be called by attach, and {reason}" for one in (meta["untried"] if reason else ())),
        *untrained(fixed),
        *(() if reason else scaled_gradients(runs[2])),
        *moved.meta["doubts"],
    ]
    return answer("unknown", doubts[0]) if doubts else answer("right")


# -- the runs ----------------------------------------------------------------------------------------------------------


def _answer(run: Callable[[str, Path], Run]) -> Report:
    """Give each run of a proof a new folder."""
    with tempfile.TemporaryDirectory(prefix="eplb_verify_") as temporary:
        return proof(lambda layout: run(layout, Path(tempfile.mkdtemp(prefix=f"{layout}_", dir=temporary))))


def verify_command(command: Sequence[str], steps: int = 12) -> Report:
    """Run a command, as a user types it, in each layout for so many optimizer steps, and return what a comparison
    shows. Its output and the progress go to stderr. After each run all processes that it started are killed."""

    def run(layout: str, folder: Path) -> Run:
        nonlocal steps
        found = _run(command, Trial(layout, steps, str(folder)), layout)
        if found.length > 0 and not found.failure:
            steps = min(steps, found.length)  # where a job ends sooner, the others end there
        return found

    return _answer(run)


def _run(command: Sequence[str], trial: Trial, title: str) -> Run:
    """One run; its output goes to stderr, with a line of progress after each step."""
    folder, shown, last_look, ended = Path(trial.folder), 0, float("inf"), False
    environment = {**launcher_environment(), _STARTED: trial.folder}
    set_trial(trial, environment)
    sys.stderr.flush()
    try:
        job = subprocess.Popen(
            list(command), env=environment, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        while not ended:
            ended = job.poll() is not None or time.monotonic() > last_look
            if (reached := (run := Run.of(folder)).length) > shown:
                shown = reached
                print(f"verify: {title}: step {shown} of {trial.steps}", file=sys.stderr)
            if run.meta.get("ended"):  # what started the ranks may wait for what else it has started
                last_look = min(last_look, time.monotonic() + _END_SECONDS)
            time.sleep(0 if ended else _LOOK_SECONDS)
    finally:
        end(folder)
    job.kill()  # it may have written over its environment
    failed = job.wait() and run.length < trial.steps  # else what starts ranks has missed what they would do then
    return replace(run, failure=f"exit status {job.returncode}, its output says why" if failed else "")


def started(folder: Path) -> list[int]:
    """Return the ids of processes that a job with records in ``folder`` has started, by their environment."""
    found, ours = list[int](), f"{_STARTED}={folder}\0".encode()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is another user's
            found += [int(path.parent.name)] * (ours in path.read_bytes())
    return found


def end(folder: Path) -> None:
    """Kill all processes that a job with records in ``folder`` has started, and wait until none is left."""
    while left := started(folder):
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def verify(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_batch: Callable[[int], Any],
    *,
    steps: int = 12,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    loss: Callable[[Any, Any], Tensor] = lambda output, batch: output.loss,
) -> Report:
    """Train with experts fixed, moved after each step, all of them on each rank, and with replicas if ``config`` has
    them. Return what a comparison shows, equal on every rank. Collective. The balancer averages gradients outside the
    experts, whatever ``config`` says. torch is seeded in each step.

    Args:
        make_model: a new model on its device, the same weights at each call and on every rank.
        make_optimizer: an optimizer for it.
        make_batch: this rank's batch of a step, from 0, the same at each call: keyword arguments of the model as a
            mapping, positional ones as a tuple or list, or the only one.
        loss: ``(output, batch) -> scalar``.

    Raises:
        AttachError: the model, optimizer or config cannot be balanced.
        TypeError: ``loss`` does not give one value.
    """
    config = replace(config if config is not None else BalancerConfig(), dense_gradients="allreduce")

    def run(layout: str, folder: Path) -> Run:
        set_trial(Trial(layout, steps, str(folder), ends_process=False))
        try:
            torch.manual_seed(SEED)
            optimizer = make_optimizer(model := make_model())
            balancer = attach(model, optimizer, config=config, ep_group=ep_group)
        finally:
            take_trial()  # what failed before attach took it
        with closing(balancer):
            model.train()
            for step in range(steps):
                torch.manual_seed((SEED * 1_000_003 + step + 1) * 4099 + dist.get_rank())  # for dropout and the like
                batch = make_batch(step)
                given = batch if isinstance(batch, tuple | list) else (batch,)
                value = loss(model(**batch) if isinstance(batch, Mapping) else model(*given), batch)
                if not isinstance(value, Tensor) or value.numel() != 1:
                    raise TypeError("the loss must be a tensor of one value: give labels in the batch, or loss=")
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        return Run.of(folder)

    return _answer(run)
