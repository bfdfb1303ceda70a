"""Runs a job in several layouts and says what that has shown: a user's command, or a loop of this process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import BalancerConfig, Trial, launcher_environment, set_trial
from ...hosts import attach
from ...hosts.attaching.trial import descendants
from ...hosts.attaching.unregistered import spared
from .records import Report, Run, first_difference, routes_alike, to_rounding, untrained

SEED = 20250710
LAST_LINES, _LOOK_SECONDS, _END_SECONDS = 8, 0.2, 30.0  # the first: of a job's output that are shown where it failed
_NAMES = {"single": "all experts on each rank", "moved": "moved homes and replicas"}
_PENALTY = ": what a rank does with its experts is not plain training (a penalty, scale, mask, norm by hand, `run`?)"
_KEPT = "; {} and others of before attach are in use still: take parameters from model.parameters() after attach"
_HELD = "{holder} may hold experts, shape {shape}: balancer.register_all(name, it), or let go of it after each step"
_IN_ORDER = "only by rounding: is something summed in slot order (a norm? use balancer.clip_grad_norm_)"
Proof = Generator[tuple[str, bool], Run, Report]
"""Asks for runs: the layout of a `Trial`, and whether it keeps replica slots."""


def proof() -> Proof:
    """Ask for one run after another, and return what they have shown."""
    fixed = yield "fixed", False
    meta, runs = fixed.meta, [fixed]
    report = Report("right", "", max(0, fixed.length), meta.get("ranks", 0), notes=tuple(meta.get("notes", ())))

    def answer(verdict: Any, reason: str = "", **found: Any) -> Report:
        said = dict.fromkeys(line for run in runs for line in run.meta.get("said", ()))
        return replace(report, verdict=verdict, reason=reason, said=tuple(said), **found)

    if fixed.failure:
        return answer("unknown", f"the run with fixed homes failed: {fixed.failure}")
    if fixed.length < 1:
        what = "ended before its first optimizer step" if fixed.length == 0 else "reached no eplb_runtime.attach"
        return answer("unknown", f"the job {what} (the launcher must pass its environment on to the ranks)")
    moved = yield "moved", False
    cells = fixed.step(fixed.length).cells
    report = replace(report, tensors=len({name for (name, _), cell in cells.items() if cell.kind != "found"}))
    runs.append(moved)
    difference = first_difference(fixed, moved)
    if difference is None and moved.length < fixed.length:
        return answer("wrong", f"the run with moved homes ended sooner: {moved.failure}")
    report = replace(report, difference=difference, unregistered=tuple(moved.meta.get("unregistered", ())))
    if difference is not None and (odd := first_difference(fixed, (yield "fixed", False))) is not None:
        return answer("unknown", f"the job does not repeat itself: in a second run {odd}", repeats=False)
    if difference is not None and not report.notes:
        kept = _KEPT.format(*moved.meta["replaced"]) if moved.meta.get("replaced") else ""
        noisy = yield "shaken", False
        close = to_rounding(fixed, moved, noisy)
        found: dict[str, Any] = {"repeats": True, "moved": False, "moved_rounding": close}
        is_close = close.equal and close.steps >= difference.step and routes_alike(fixed, noisy, difference.step)
        if is_close and not kept:
            return answer("unknown", f"with moved homes {replace(difference, hint=_IN_ORDER)}", **found)
        return answer("wrong", f"with moved homes {difference}{kept}", **found)
    if difference is None and not moved.meta["commits"]:
        return answer("unknown", f"no expert moved in {moved.length} steps: give --steps 3 or more")
    report = replace(report, repeats=True, moved=difference is None, single_reason=str(meta["not_single"]))
    wanted = [("single", False)] * (not report.single_reason)
    wanted += [("moved", bool(meta["replica_slots"]))] * bool(difference or meta["replica_slots"])
    shaken = (yield "shaken", False) if wanted else fixed
    if shaken.length < fixed.length:
        return answer("unknown", f"the run with gradients changed by rounding ended sooner: {shaken.failure}")
    for layout, replicas in wanted:
        other = moved if (layout, replicas) == ("moved", False) else (yield layout, replicas)
        runs.append(other)
        if other.length < fixed.length:
            often = "every rank must call backward() as often"
            return answer("unknown", f"the run with {_NAMES[layout]} ended sooner ({often}): {other.failure}")
        if layout == "single" and (doubts := other.meta["doubts"]):
            return answer("unknown", doubts[0])
        close = to_rounding(fixed, other, shaken)
        report = replace(report, single=close) if layout == "single" else replace(report, moved_rounding=close)
        if close.equal is None:
            why = f"the run with {_NAMES[layout]} routes tokens differently from its first step on"
            coarse = f"rounding errors alone change half of what step {close.step} gives by {close.worst:.2g}"
            return answer(
                "unknown", coarse if close.worst and not close.tensor else why + _PENALTY * (layout == "single")
            )
        if not close.equal:
            why = f"{_NAMES[layout]} give another {close.tensor} after step {close.step} ({close.worst:.2g} off)"
            return answer("wrong", why + _PENALTY * (layout == "single"))
    if said := answer("right").said:
        return answer("wrong", f"said in the job: {said[0]}")
    if report.unregistered:
        return answer("unknown", _HELD.format(**report.unregistered[0]))
    if report.single_reason and (untried := meta["untried"]):
        return answer("unknown", f"{untried[0]} could not be called by attach, and {report.single_reason}")
    if name := untrained(fixed):
        return answer("unknown", f"{name} has gradients and no step changes it: does the optimizer step this model?")
    if doubts := fixed.meta.get("doubts"):
        return answer("unknown", doubts[0])
    return answer("right")


def _answer(run: Callable[[str, bool, Path], Run], keep: Path | None = None) -> Report:
    """Give a proof the runs that it asks for: by layout, whether replica slots stay, and a new folder."""
    asking, number = proof(), 1
    with tempfile.TemporaryDirectory(prefix="eplb_verify_") as temporary:
        try:
            layout, replicas = next(asking)
            while True:
                folder = (keep or Path(temporary)).resolve() / f"run-{number}-{layout}"
                folder.mkdir(parents=True)
                (layout, replicas), number = asking.send(run(layout, replicas, folder)), number + 1
        except StopIteration as stop:
            return cast(Report, stop.value)


def verify_command(command: Sequence[str], steps: int = 12, keep: Path | None = None) -> Report:
    """Run a command, as a user types it, in each layout for so many optimizer steps; its output and the progress go to
    stderr. The records and the output stay in ``keep``, or are deleted."""
    before, lengths = set(os.listdir()), list[int]()

    def run(layout: str, replicas: bool, folder: Path) -> Run:
        most = max(lengths[:1], default=0) or steps  # where a job ends sooner, the other runs end there
        found = _run(command, Trial(layout, most, str(folder), replicas), folder.name.replace("-", " "))
        if not lengths and (new := sorted(set(os.listdir()) - before)):
            print(f"verify: the job wrote {', '.join(new[:5])}: runs that go on from it are not alike", file=sys.stderr)
        lengths.append(max(0, found.length))
        return found

    return _answer(run, keep)


def _run(command: Sequence[str], trial: Trial, title: str) -> Run:
    """One run; its output is copied to stderr, with a line of progress after each step."""
    folder, environment, shown = Path(trial.folder), dict(launcher_environment()), 0
    set_trial(trial, environment)
    CDLL(None).prctl(
        36, 1, 0, 0, 0
    )  # PR_SET_CHILD_SUBREAPER: what a rank has left behind becomes a child of this process
    others = set(descendants())
    log = folder / "output.log"
    with open(log, "wb") as to, open(log, "rb") as output:
        job = subprocess.Popen(
            list(command), env=environment, stdin=subprocess.DEVNULL, stdout=to, stderr=to, start_new_session=True
        )
        try:
            ended, last_look = False, float("inf")
            while not ended:
                ended = job.poll() is not None or time.monotonic() > last_look
                sys.stderr.write(output.read().decode(errors="replace"))
                if (reached := (run := Run.of(folder)).length) > shown:
                    shown = reached
                    print(f"verify: {title}: step {shown} of {trial.steps}", file=sys.stderr)
                if run.meta.get("ended"):  # what started the ranks may wait for what else it has started
                    last_look = min(last_look, time.monotonic() + _END_SECONDS)
                time.sleep(0 if ended else _LOOK_SECONDS)
        finally:
            end(job, others)
    text = log.read_text(errors="replace")
    own = re.split(r"\n.*torch[./]distributed[./](?:elastic|run\.py)", text)[0].strip() or text  # without torchrun's
    last = " | ".join(line.strip() for line in own.splitlines()[-LAST_LINES:])
    run = Run.of(folder)
    failed = job.returncode and run.length < trial.steps  # else what starts ranks has missed what they would do then
    return replace(run, failure=f"exit status {job.returncode}: {last}" if failed else "")


def end(job: subprocess.Popen[bytes], others: Collection[int]) -> None:
    """End a job with all that it has started: it has nothing to save. ``others`` are not its own processes."""
    job.kill()
    job.wait()
    while left := set(descendants()) - set(others):
        for process in left:
            with suppress(ProcessLookupError, ChildProcessError):  # or its parent is still there
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


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
    """Train with experts fixed, moved after each step, and all of them on each rank; return what a comparison shows,
    equal on every rank. Collective. The balancer averages gradients outside the experts. Each step begins with a seed.

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

    def run(layout: str, replicas: bool, folder: Path) -> Run:
        set_trial(Trial(layout, steps, str(folder), replicas, ends_process=False))
        torch.manual_seed(SEED)
        optimizer = make_optimizer(model := make_model())
        balancer = attach(model, optimizer, config=config, ep_group=ep_group)
        try:
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
        finally:
            balancer.close()
        return Run.of(folder)

    with spared():
        return _answer(run)
