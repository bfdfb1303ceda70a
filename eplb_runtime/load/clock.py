"""How long a step, its expert work (dispatch to combine) and a rebalance take, for the gate's prediction of what pays.

Layers mark expert work in a few steps now and then. A mark is a time of the host's clock on a CPU and an event in the
running stream on a GPU, so that nothing waits.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

ASSUMED_SHARE = 0.5
"""Share of a step in expert work until it is measured."""
SAMPLED_STEPS, REST_STEPS = 3, 30
"""Steps that are measured before a decision, and steps that lie between two measurements at least."""
WEIGHT, STALL_WEIGHT = 0.2, 0.5
"""Of the newest in the smoothed seconds of a step, and of a rebalance's fixed part."""

Mark = float | torch.cuda.Event


@dataclass(frozen=True)
class Progress:
    """How far training is: step, smoothed seconds of one, and seconds since the last one ended."""

    step: int
    step_seconds: float
    idle_seconds: float


@dataclass
class StepClock:
    """Smoothed seconds of a step, without the pauses that rebalancing made itself, and of a rebalance's fixed part."""

    stall_seconds: float  # what a migration takes on top of carrying, checking and copying experts
    step_seconds: float = 0.0  # of a training step; 0 before the second one
    _last: float | None = None
    _excluded: float = 0.0
    _has_begun: bool = False

    def tick(self) -> None:
        """End a step: update the moving average ``step_seconds`` by the time since the last call, less exclusions."""
        now = time.perf_counter()
        if self._last is not None:
            seconds = now - self._last - self._excluded
            self.step_seconds += (WEIGHT if self.step_seconds else 1.0) * (seconds - self.step_seconds)
        self._last, self._excluded, self._has_begun = now, 0.0, False

    def begin(self) -> bool:
        """Mark the begin of a step and return True; or return False, if the step has begun since the last `tick`. The
        time from that `tick` to this call is left out of the step's seconds."""
        begins, self._has_begun = not self._has_begun, True
        if begins and self._last is not None:
            self._excluded = time.perf_counter() - self._last
        return begins

    def progress(self, step: int) -> Progress:
        """Return ``step``, smoothed seconds of a step, and seconds since the last `tick` (0: none). On any thread."""
        last = self._last
        return Progress(step, self.step_seconds, 0.0 if last is None else time.perf_counter() - last)

    def exclude(self, seconds: float) -> None:
        """Leave a pause of ``seconds`` out of the running step, which `tick` ends."""
        self._excluded += seconds

    def stalled(self, seconds: float) -> None:
        """Update the moving average ``stall_seconds`` by what a migration took beyond carrying and copying experts."""
        self.stall_seconds += STALL_WEIGHT * (seconds - self.stall_seconds)


@dataclass(frozen=True)
class ExpertShare:
    """Share of a step, as the job is now, in which expert work runs: from dispatch to combine, forward and backward.

    A rank's expert seconds include its wait for the busiest rank, which ends combine. So each rank measures in a layer
    about the busiest rank's time, W x imbalance, where W is the time with even load; `even` gives W. Time that ranks
    wait in dispatch for a rank that is late from before the layer is measured, too.
    """

    value: float  # in (0, 1]
    source: str  # "measured", "given" (``MigrationConfig(moe_share=...)``) or "assumed"
    at: float = 0.0  # imbalance, mean over layers, of the steps that were measured; 0: as it is now

    @classmethod
    def before_measuring(cls, given: float | None) -> "ExpertShare":
        """Return the share ``given`` by the user, with the source "given"; None: 0.5, with the source "assumed"."""
        return cls(ASSUMED_SHARE, "assumed") if given is None else cls(given, "given")

    def updated(self, expert_seconds: float, step_seconds: float) -> "ExpertShare":
        """Return ``expert_seconds / step_seconds``, at most 1, as a "measured" share with ``at`` 0. A "given" share is
        returned unchanged, and so is any share if one of the times is not positive."""
        if self.source == "given" or not 0 < expert_seconds <= math.inf or step_seconds <= 0:
            return self
        return ExpertShare(min(1.0, expert_seconds / step_seconds), "measured")

    def measured_at(self, imbalance: float) -> "ExpertShare":
        """Return this share with ``at`` set to ``imbalance``; a given or assumed share is returned unchanged."""
        return replace(self, at=imbalance) if self.source == "measured" else self

    def even(self, imbalance: float) -> float:
        """Return seconds of expert work with even load (imbalance 1), as a fraction of a step with this imbalance."""
        even = self.value / max(1.0, self.at or imbalance)
        return even / (1.0 - self.value + even * max(1.0, imbalance)) if self.at else even


@dataclass(eq=False)
class SampledStep:
    """The marks of one step on this rank: its begin and end, and those of each span of expert work."""

    begin: Mark
    end: Mark
    spans: list[tuple[Mark, Mark]] = field(default_factory=list)

    def time(self) -> tuple[float, float] | None:
        """Return (seconds of the step, seconds in which expert work ran), without waiting for the device. Spans that
        overlap (two micro-batches at once) count once. None: the device has not reached all marks, or no layer ran."""
        begin: Any = self.begin
        marks: list[Any] = [self.end, *(mark for span in self.spans for mark in span)]
        if not self.spans or not all(mark.query() for mark in [begin, *marks] if not isinstance(mark, float)):
            return None
        on_cpu = isinstance(begin, float)
        step_seconds, *ends = (mark - begin if on_cpu else begin.elapsed_time(mark) / 1e3 for mark in marks)
        covered, last = 0.0, -math.inf
        for begin, end in sorted(zip(ends[::2], ends[1::2], strict=True)):
            covered += max(0.0, end - max(begin, last))
            last = max(last, end)
        return step_seconds, covered


class ExpertClock:
    """Marks the expert work of this rank while the running step is sampled (``on``). ``steps``: those sampled since the
    last `take`."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self.on = False
        self._step: SampledStep | None = None
        self._backwards: dict[int, Mark] = {}
        self.steps: list[SampledStep] = []

    def begin_step(self) -> None:
        """Set ``on`` and begin a sample of a step, dropping one that is running; nothing in CUDA graph capture."""
        self._backwards.clear()
        begin = self.mark()
        if begin is not None:
            self._step = SampledStep(begin, begin)
            self.on = True

    def end_step(self) -> None:
        """Clear ``on`` and append the sample that is running, if any, to ``steps``. A sample in which no layer ran and
        backward passes that have not ended are dropped."""
        step, self._step = self._step, None
        if step is None:
            return
        self.on = False
        self._backwards.clear()
        end = self.mark()
        if end is not None and step.spans:
            step.end = end
            self.steps.append(step)

    def take(self) -> tuple[SampledStep, ...]:
        """Return the sampled steps since the last call, and empty ``steps``."""
        taken, self.steps = tuple(self.steps), []
        return taken

    def mark(self) -> Mark | None:
        """Return the host's clock in seconds; on a GPU an event recorded now, or None in CUDA graph capture."""
        if self._device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def forward_ends(self, begin: Mark | None) -> None:
        """Add the span from ``begin`` to now to the running sample; nothing if there is none, or with None."""
        end = self.mark()
        if self._step is not None and begin is not None and end is not None:
            self._step.spans.append((begin, end))

    def backward_begins(self, metadata: object) -> None:
        """Store a mark of now, the begin of a layer's backward pass, under ``id(metadata)`` for `backward_ends`."""
        begin = self.mark()
        if begin is not None:
            self._backwards[id(metadata)] = begin

    def backward_ends(self, metadata: object) -> None:
        """Add the span since `backward_begins` of this ``metadata`` to the running sample, if that was called."""
        self.forward_ends(self._backwards.pop(id(metadata), None))


def median_time(steps: Sequence[SampledStep]) -> tuple[float, float] | None:
    """Return `SampledStep.time` of the step whose share of expert work is the median: an evaluation or a checkpoint
    between two steps makes one of them odd. None: no step has a time."""
    times = [found for step in steps if (found := step.time()) is not None and found[0] > 0]
    return sorted(times, key=lambda found: found[1] / found[0])[len(times) // 2] if times else None
