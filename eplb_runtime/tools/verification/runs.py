"""Runs a job in several layouts and says what that has shown: a user's command, or a loop of this process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import BalancerConfig, Trial, launcher_environment, set_trial
from ...hosts import attach
from .records import Closeness, Difference, Run, first_difference, run_of, to_rounding
from .report import Report, text_of

SEED = 20250710
LAST_LINES = 8
"""Lines of a job's output that are shown where it failed."""
_LOOK_SECONDS = 0.2

Layout = tuple[str, bool]
"""Layout of a `Trial`, and whether it keeps replica slots."""
Proof = Generator[Layout, Run, Report]


def proof() -> Proof:
    """Ask for one run after another, and return what they have shown."""
    fixed = yield "fixed", False
    said = list(fixed.meta.get("said", ()))
    known: dict[str, Any] = {
        "steps": max(0, fixed.length),
        "ranks": fixed.meta.get("ranks", 0),
        "notes": tuple(fixed.meta.get("notes", ())),
        "unregistered": tuple(fixed.meta.get("unregistered", ())),
    }

    def answer(verdict: Any, reason: str = "", **more: Any) -> Report:
        return Report(verdict, reason, **{**known, "said": tuple(dict.fromkeys(said)), **more})

    if fixed.length < 1:
        if fixed.failure:
            return answer("unknown", f"the run with fixed homes failed: {fixed.failure}")
        what = "ended before its first optimizer step" if fixed.length == 0 else "reached no eplb_runtime.attach"
        return answer(
            "unknown", f"the job {what} (a launcher that starts ranks elsewhere must pass its environment on)"
        )
    known["tensors"] = len({name for name, _ in fixed.step(fixed.length).cells})
    moved = yield "moved", False
    said += moved.meta.get("said", ())
    known["steps"] = max(0, min(fixed.length, moved.length))
    difference = first_difference(fixed, moved)
    if moved.failure and moved.length < fixed.length and difference is None:
        return answer("wrong", f"the run with moved homes failed: {moved.failure}")
    exact = not known["notes"]
    if difference is not None:
        again = yield "fixed", False
        if (odd := first_difference(fixed, again)) is not None:
            return answer(
                "unknown",
                f"the job does not repeat itself: in a second run with fixed homes {text_of(odd)}",
                repeats=False,
            )
        if exact:
            wrong = {"repeats": True, "moved": False, "difference": difference}
            return answer("wrong", f"with moved homes {text_of(difference)}", **wrong)
    known |= {"repeats": True, "moved": difference is None, "difference": difference}
    closeness = {}
    shaken: Run | None = None
    not_single = str(fixed.meta["not_single"])
    wanted: list[tuple[str, Layout]] = [] if not_single else [("single", ("single", False))]
    if difference is not None or fixed.meta["replica_slots"]:
        wanted.append(("moved_rounding", ("moved", bool(fixed.meta["replica_slots"]))))
    for what, layout in wanted:
        other = moved if layout == ("moved", False) else (yield layout)
        said += other.meta.get("said", ())
        if other.failure and other.length < fixed.length:
            if what == "single":
                not_single = f"that run failed: {other.failure}"
                continue
            return answer("wrong", f"the run with replicas failed: {other.failure}")
        if shaken is None:
            shaken = yield "shaken", False
        closeness[what] = to_rounding(fixed, other, shaken, float(fixed.meta["rounding"]))
    known |= {**closeness, "single_reason": not_single}
    return _judged(answer, closeness, said, known, not_single)


def _judged(
    answer: Callable[..., Report],
    closeness: Mapping[str, Closeness],
    said: Sequence[str],
    known: Mapping[str, Any],
    not_single: str,
) -> Report:
    """The verdict, once all runs are there and the moved one is right to the bit, or cannot be."""
    words = {
        "single": "all experts on each rank give another {} after step {} ({:.2g} off): what a rank does with the "
        "experts that it has is not what plain training does with all (a penalty, a scale, a mask over a rank's experts?)",
        "moved_rounding": "moved homes or replicas give another {} after step {} ({:.2g} off)",
    }
    for what, close in closeness.items():
        if close.equal is False:
            return answer("wrong", words[what].format(close.tensor, close.step, close.worst))
    if said:
        return answer("wrong", f"said in the job: {said[0]}")
    if known["unregistered"]:
        first = known["unregistered"][0]
        return answer(
            "unknown",
            f"{first['holder']} holds what may be experts, shape {first['shape']}, which does not move with them: "
            "balancer.register_all(name, it), or make it anew after each step",
        )
    if any(close.equal is None for close in closeness.values()) or "failed" in not_single:
        return answer("unknown", not_single or "tokens are routed otherwise from the first step on")
    return answer("right")


# -- a user's command --------------------------------------------------------------------------------------------------


def verify_command(command: Sequence[str], steps: int = 12, keep: Path | None = None) -> Report:
    """Run a command, as a user types it, in each layout; its output and the progress go to stderr.

    Args:
        steps: optimizer steps of each run, after which the job is ended.
        keep: folder for the records and the job's output; None: they are deleted.

    Raises:
        OSError: the command cannot be started, or the folder not be written.
    """
    with ExitStack() as parts:
        folder = keep or Path(parts.enter_context(tempfile.TemporaryDirectory(prefix="eplb_verify_")))
        asking, number, before = proof(), 1, _names_here()
        try:
            layout, replicas = next(asking)
            while True:
                own = folder / f"run-{number}-{layout}"
                own.mkdir(parents=True)
                trial = Trial(layout, steps, str(own.resolve()), replicas)  # type: ignore[arg-type]
                run = _run(command, trial, f"verify: run {number}, {layout}")
                if number == 1 and (new := sorted(_names_here() - before)):
                    _say(f"verify: the job has written {', '.join(new[:5])} here: a run that resumes from it differs\n")
                number += 1
                layout, replicas = asking.send(run)
        except StopIteration as stop:
            report: Report = stop.value
            return report


def _names_here() -> set[str]:
    return {entry.name for entry in os.scandir(".")}


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _run(command: Sequence[str], trial: Trial, title: str) -> Run:
    """One run; its output is copied to stderr, with a line of progress after each step."""
    folder, environment = Path(trial.folder), dict(launcher_environment())
    set_trial(trial, environment)
    shown = 0
    with open(folder / "output.log", "wb") as log, open(folder / "output.log", "rb") as output:
        job = subprocess.Popen(
            list(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while True:
                ended = job.poll() is not None
                _copy(output)
                if (reached := run_of(folder).length) > shown:
                    shown = reached
                    _say(f"{title}: step {shown} of {trial.steps}\n")
                if ended:
                    break
                time.sleep(_LOOK_SECONDS)
        except BaseException:
            os.killpg(job.pid, signal.SIGTERM)
            raise
    run = run_of(folder)
    if job.returncode == 0 or run.length >= trial.steps:
        return run
    lines = (folder / "output.log").read_text(errors="replace").splitlines()[-LAST_LINES:]
    return replace(run, failure=f"exit status {job.returncode}: " + " | ".join(line.strip() for line in lines))


def _copy(output: IO[bytes]) -> None:
    if text := output.read():
        _say(text.decode(errors="replace"))


# -- a loop of this process --------------------------------------------------------------------------------------------


def verify(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_batch: Callable[[int], Any],
    *,
    steps: int = 12,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    loss: Callable[[Any, Any], Tensor] = lambda output, batch: output.loss,
    on_step: Callable[[], None] = lambda: None,
) -> Report:
    """Train with experts fixed, moved after each step, and all of them on each rank; compare. Collective.

    Each run begins anew: seeds are set, ``make_model()``, ``make_optimizer(model)``, ``attach``; then for each step, from
    0, seeds are set, ``model(make_batch(step))``, backward, ``optimizer.step()``. Runs follow each other, so one model is
    in memory at a time. Gradients outside the experts are averaged by the balancer.

    Args:
        make_model: a new model on its device, the same weights at each call and on every rank.
        make_optimizer: an optimizer for it.
        make_batch: this rank's batch of a step, the same at each call: a mapping is given to the model as keyword
            arguments, a tuple or list as positional ones, anything else as the only one.
        steps: of each run.
        config: of the balancer; what decides when experts move does not count here.
        ep_group: as for ``attach``.
        loss: ``(output, batch) -> scalar``.
        on_step: called after each step of each run.

    Returns:
        The report, equal on every rank.

    Raises:
        AttachError: the model, optimizer or config cannot be balanced.
        TypeError: a callback returns something else than it should.
        ValueError: ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps={steps}: give at least 1")
    config = replace(config if config is not None else BalancerConfig(), dense_gradients="allreduce")
    group = dist.new_group(backend="gloo", group_desc="eplb_runtime verify")
    is_first, asking = dist.get_rank() == 0, proof()
    train = partial(_train, make_model, make_optimizer, make_batch, steps, config, ep_group, loss, on_step)
    try:
        with tempfile.TemporaryDirectory(prefix="eplb_verify_") as folder:
            number, run = 0, None
            while True:
                layout: Layout | None = None
                report: Report | None = None
                try:
                    if is_first:
                        layout = next(asking) if run is None else asking.send(run)
                except StopIteration as stop:
                    report = stop.value
                layout = json.loads(_from_first(json.dumps(layout).encode(), group))
                if layout is None:
                    return _report_of(_from_first(json.dumps(_as_json(report)).encode(), group))
                own = Path(folder) / str(number)
                own.mkdir()
                set_trial(Trial(layout[0], steps, str(own), layout[1], ends_process=False))  # type: ignore[arg-type]
                train()
                run, number = run_of(own), number + 1
    finally:
        dist.destroy_process_group(group)


def _from_first(message: bytes, group: dist.ProcessGroup) -> bytes:
    size = torch.tensor([len(message)])
    dist.broadcast(size, src=0, group=group)
    text = bytearray(message.ljust(int(size), b" ")[: int(size)])
    dist.broadcast(torch.frombuffer(text, dtype=torch.uint8), src=0, group=group)
    return bytes(text)


def _as_json(report: Report | None) -> dict[str, Any] | None:
    from dataclasses import asdict

    return None if report is None else asdict(report)


def _report_of(text: bytes) -> Report:
    found = json.loads(text)
    for name, kind in (("difference", Difference), ("moved_rounding", Closeness), ("single", Closeness)):
        found[name] = None if found[name] is None else kind(**found[name])
    return Report(**{**found, **{name: tuple(found[name]) for name in ("unregistered", "said", "notes")}})


def _train(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_batch: Callable[[int], Any],
    steps: int,
    config: BalancerConfig,
    ep_group: dist.ProcessGroup | None,
    loss: Callable[[Any, Any], Tensor],
    on_step: Callable[[], None],
) -> None:
    torch.manual_seed(SEED)
    model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model() must return a torch module, not {type(model).__name__}")
    optimizer = make_optimizer(model)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"make_optimizer(model) must return a torch optimizer, not {type(optimizer).__name__}")
    balancer = attach(model, optimizer, config=config, ep_group=ep_group)
    try:
        model.train()
        for step in range(steps):
            torch.manual_seed((SEED * 1_000_003 + step + 1) * 4099 + dist.get_rank())
            batch = make_batch(step)
            if isinstance(batch, Mapping):
                output = model(**batch)
            else:
                output = model(*batch) if isinstance(batch, tuple | list) else model(batch)
            value = loss(output, batch)
            if not isinstance(value, Tensor) or value.numel() != 1:
                found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise TypeError(
                    f"the loss must be a tensor of one value, not {found}: give labels in the batch, or loss="
                )
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            on_step()
    finally:
        balancer.close()
