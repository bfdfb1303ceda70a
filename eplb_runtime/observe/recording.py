"""Record the load of a job: a series on disk that `simulate` plays through policies, and `eplb_runtime.record`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ..events import Event, LoadMeasured
from ..load.clock import SAMPLED_STEPS, ExpertClock, SampledStep, StepClock, median_time
from ..load.counter import HostCopy, LoadCounter, aggregate, in_recompute
from ..load.series import NAME, RecordedJob, first_line, line_of, shape_recorded
from ..utils.files import FileError
from ..utils.worker import Worker
from .events_file import LineFile

logger = logging.getLogger("eplb_runtime")

MOST_WAITING, CLOSING_SECONDS = 64, 30.0
"""Measurements that wait for the disk or for other ranks, with more of which it ends; longest wait at its end."""
SeeChoices = Callable[[Tensor, int, int], None]
"""Called with a forward's choices in a layer, int64 ``[T, K]`` or bool ``[T, E]``, columns of a token, and K."""


class Recorder:
    """Appends to the series of a run; a disk that is full or gone does not stop training.

    Args:
        run: folder of the run.
        job: what is known of the job at its start.

    Raises FileError: the run holds the load of another model; OSError: the folder cannot be written to.
    """

    def __init__(self, run: Path, num_layers: int, num_experts: int, job: RecordedJob | None = None) -> None:
        try:
            if (before := shape_recorded(run)) not in (None, (num_layers, num_experts)):
                now = num_layers, num_experts
                raise FileError("it holds the load of {} layers of {} experts, not {} of {}".format(*before, *now))
        except FileError as error:
            raise FileError(f"{run}: {error}; or name another folder for this run") from None
        self.run, self._expert_bytes = run, 0 if job is None else job.expert_bytes
        self._file: LineFile | None = LineFile(run / NAME, first_line(num_layers, num_experts, job))

    def hear(self, event: Event) -> None:
        """`write` the load of a `LoadMeasured` event, and what it says of the job; ignore events without a load."""
        if isinstance(event, LoadMeasured) and event.load is not None:
            share = event.moe_share if event.moe_share_source == "measured" else None
            known = RecordedJob(
                optimizer_bytes=max(0, event.home_bytes - self._expert_bytes),  # 0 before the first step
                step_seconds=event.step_seconds,
                expert_seconds=(share or 0.0) * event.step_seconds,
                imbalance=float(np.mean(event.imbalance)),
            )
            self.write(event.load, -(-event.steps // len(event.load)), known)

    def write(self, load_TLE: NDArray[np.int64], steps: int, job: RecordedJob | None = None) -> None:
        """Append windows, ``[T, L, E]`` summed over ranks, of ``steps`` training steps each, and what has been measured
        of the job. Never raises: the first error is logged, and closes the file. Nothing is written after `close`."""
        try:
            if self._file is not None:
                self._file.write(line_of(load_TLE, steps, job))
        except (OSError, FileError) as error:
            self.close()
            logger.warning("%s: load is not recorded any more: %s", self.run, error)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class Recording:
    """What `eplb_runtime.record` returns: counts while it is open. A context manager.

    Args:
        model: its ``training`` flag says what counts.
        watch: for each MoE layer, a function that lets another see its choices from now on, and a clock measure its
            expert work, and returns how to end it.
        num_experts: E.
        interval: steps between two writings.
        recorder: of rank 0; None on the others.
        group: gloo, for the sums over ranks; None: there is one rank.
        real_tokens: as a host says it.
        optimizer_bytes: bytes that the optimizer keeps for one expert; 0: unknown. Asked once, after the first steps.
        in_training_only: whether forwards in evaluation mode are left out. False: until the first in training mode,
            since then the model is trained, and what is evaluated in between is not its load.
    """

    def __init__(
        self,
        model: nn.Module,
        watch: Sequence[Callable[[SeeChoices, ExpertClock], Callable[[], None]]],
        num_experts: int,
        *,
        interval: int,
        device: torch.device,
        recorder: Recorder | None,
        group: dist.ProcessGroup | None,
        real_tokens: Callable[[int], Tensor | None],
        in_training_only: bool,
        optimizer_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._model = model
        self._interval = interval
        self._recorder = recorder
        self._group = group
        self._real_tokens = real_tokens
        self._in_training_only = in_training_only
        self._optimizer_bytes = optimizer_bytes
        self._state_bytes: int | None = None
        self._hidden_size = self._top_k = 0
        self._clock = StepClock(0.0)
        self._counter = LoadCounter(len(watch), num_experts, interval, device)
        self._worker = Worker("eplb_runtime recording")
        self._closed = False
        self._failed = False
        self._has_stepped = False
        self._expert_clock = ExpertClock(device)
        self._undo = [hook(partial(self._see, layer), self._expert_clock) for layer, hook in enumerate(watch)]

    def until_closed(self, undo: Callable[[], None]) -> None:
        """Add ``undo`` to what `close` calls; what was added last is called first."""
        self._undo.append(undo)

    @torch.compiler.disable
    def step(self) -> None:
        """End a step: its counts join the history. Every ``interval`` steps, on all ranks alike, a thread sums the
        counts over ranks, and rank 0 writes them. In the last steps before that, rank 0 measures its expert work.
        Hooked to the optimizer if one was given. Nothing happens after `close`."""
        if self._closed:
            return
        self._has_stepped = True
        self._expert_clock.end_step()
        self._clock.tick()
        self._counter.advance()
        if self._counter.open_steps >= self._interval:
            self._flush()
        if self._interval - self._counter.open_steps <= SAMPLED_STEPS and self._recorder is not None:
            self._expert_clock.begin_step()

    def close(self) -> None:
        """Sum and write what is left, waiting up to 30 s for it, and take all hooks off the model and optimizer. Every
        rank calls it after as many steps. Logs a warning if counts are lost, or no step was ended; rank 0 logs where
        the record is. A second call does nothing."""
        if self._closed:
            return
        if self._counter.open_steps:
            self._flush()
        self._closed = True
        if not self._has_stepped and bool(self._counter.counts.any()):
            logger.warning(
                "tokens were counted, but no step has ended, and nothing is recorded: give record() the optimizer, or "
                "call recording.step() after each of its steps (with eplb.record(model, folder) as recording: ...)"
            )
        self._expert_clock.end_step()
        if not self._worker.close(CLOSING_SECONDS):
            logger.warning("the last counts of load are not recorded: a rank did not come within %g s", CLOSING_SECONDS)
        for undo in reversed(self._undo):  # one may have wrapped what another had
            undo()
        if self._recorder is not None:
            self._recorder.close()
            logger.info("what is recorded: eplb-runtime assess %s says whether balancing would pay", self._recorder.run)

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @torch.compiler.disable
    def _see(self, layer: int, chosen: Tensor, hidden_size: int, top_k: int) -> None:
        if self._closed or in_recompute() or (self._in_training_only and not self._model.training):
            return
        if self._model.training and not self._in_training_only:
            self._in_training_only = True
            self._counter.counts.zero_()  # an evaluation ahead of the first step
        self._hidden_size, self._top_k = hidden_size, top_k
        self._counter.count(layer, chosen.detach(), self._real_tokens(chosen.shape[0]))

    def _flush(self) -> None:
        copy, job = HostCopy(self._counter.take()), None
        if not self._failed and self._worker.waiting >= MOST_WAITING:
            self._failed = True
            logger.warning("load is not recorded any more: the disk is too slow, or another rank does not come")
        if self._failed:
            return
        if self._recorder is not None:
            if self._state_bytes is None:  # once: experts that are modules of their own have many tensors
                self._state_bytes = self._optimizer_bytes()
            job = RecordedJob(
                hidden_size=self._hidden_size,
                top_k=self._top_k,
                optimizer_bytes=self._state_bytes,
                step_seconds=self._clock.step_seconds,
            )
        steps = self._expert_clock.take()
        self._worker.submit(lambda: self._sum_and_write(copy, job, steps))

    def _sum_and_write(self, copy: HostCopy, job: RecordedJob | None, sampled: Sequence[SampledStep]) -> None:
        if self._failed:
            return
        try:
            total = copy.wait() if self._group is None else aggregate(copy, self._group)[0]
        except RuntimeError as error:
            logger.warning("load is not recorded any more: the ranks could not add up their counts (%s)", error)
            self._failed = True
            return
        if self._recorder is not None and job is not None:
            if (found := median_time(sampled)) is not None:
                step_seconds, expert_seconds = found
                job = replace(job, expert_seconds=expert_seconds / step_seconds * job.step_seconds)
            self._recorder.write(total.numpy(), self._counter.steps_per_bucket, job)
