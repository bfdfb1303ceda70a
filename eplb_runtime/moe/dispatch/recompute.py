"""Forwards of one layer whose backward is still to come: what was worked out for them is used again when activation
checkpointing repeats the forward.

PyTorch does not say which forward is being repeated, and a rank cannot tell by its own tokens (it may have none), yet
all ranks must choose alike: one that exchanges counts alone waits for ever. So the rule asks only for what is the same
on every rank: a forward that is alone in flight is the one. With several (a pipeline, or losses added up before one
backward), or with another batch at once, the route is worked out again - the same one: a function of the placement and
of all ranks' counts. The choices of this rank are compared as a check.
"""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from .channels import MicroBatchChannels

_DIFFERS = (
    "activation recompute chose other experts than the forward before it, so gradients would be wrong: make the "
    "forward deterministic (torch.use_deterministic_algorithms, and preserve_rng_state=True for dropout)"
)
MOVED = (
    "experts changed places, or copies ended, between a forward and its backward pass (balancer.rebalance(), "
    "load_state_dict(), close() or an optimizer's step in between): gradients would go to other experts; do that after "
    "backward() and the optimizer's step, or run the forward again"
)


class RecomputeError(RuntimeError):
    """Activation recompute chose other experts than its forward did."""


@dataclass(eq=False)
class InFlight:
    """A forward whose backward is still to come, with its step and how often the layer's placement had changed by then;
    of one that is alone also this rank's choices, int32 ``[T, K]``, and where they go."""

    cache: "RecomputeCache"
    step: int
    changes: int
    ids_TK: Tensor | None = None
    metadata: Any = None
    is_over: bool = False

    def check(self) -> None:
        """Raise RuntimeError if the layer's placement has changed since this forward, so that gradients would go to
        other experts; BackwardInsideError if `MicroBatchChannels.both` allows no backward pass. Alike on every rank."""
        self.cache.channels.before_backward()
        if self.cache.changes() != self.changes:
            raise RuntimeError(MOVED)

    def end(self) -> None:
        """Record that a backward pass is here: drop this forward's choices and metadata, and forget the forward. One
        whose graph is kept (``retain_graph``) stays in flight: another pass may repeat it."""
        if not self.is_over:
            self.is_over = not torch._C._autograd._get_current_graph_task_keep_graph()
            self.ids_TK = self.metadata = None
            self.cache.forget(self)


class RecomputeCache:
    """The forwards of one layer in the running step. ``changes`` returns how often the layer's placement has changed.
    While two batches run at once, on every rank alike, no forward is alone."""

    def __init__(self, channels: MicroBatchChannels, changes: Callable[[], int]) -> None:
        self.channels, self.changes = channels, changes
        self._lock, self._step, self._count = Lock(), -1, 0
        self._only: InFlight | None = None
        self._differed: tuple[Tensor, Tensor] | None = None  # whether anything has, on the device and told to the host

    def begin(self, step: int) -> None:
        """Begin a forward that repeats none, after ``step`` steps; forwards of other steps are forgotten. Raises
        RecomputeError if an earlier recompute on the device chose other experts than its forward."""
        if self._differed is not None and self._differed[1]:
            self._differed = None
            raise RecomputeError(_DIFFERS)
        with self._lock:
            if step != self._step:
                self._step, self._count, self._only = step, 0, None

    def track(self, topk_ids_TK: Tensor, metadata: Any, learns: bool, training: bool) -> InFlight | None:
        """Count a forward that repeats none, and return its record; None if gradients will not follow (not ``learns``).
        The record keeps choices and metadata only if the forward is alone in flight, and no other batch runs at once.
        In ``training`` a forward without gradients counts, too: reentrant checkpointing could repeat it unseen."""
        if not (learns or training):
            return None
        with self._lock:
            self._count += 1
            alone = self._count == 1 and learns and not self.channels.busy
        kept = (topk_ids_TK.to(torch.int32, copy=True), metadata) if alone else ()
        forward = InFlight(self, self._step, self.changes(), *kept)
        self._only = forward if alone else None
        return forward if learns else None

    def repeated(self, topk_ids_TK: Tensor) -> Any:
        """Return the metadata of the forward that is being repeated; None, alike on every rank, if that is not known.
        RecomputeError: this rank's choices differ from that forward's; on a device only the shape is compared here, and
        a later `begin` raises for values (no host sync). BackwardInsideError: as `InFlight.check` raises it."""
        self.channels.before_backward()
        only = self._only
        if only is None or self.channels.busy:
            return None
        ids_TK, metadata = only.ids_TK, only.metadata
        if ids_TK is None or ids_TK.shape != topk_ids_TK.shape:
            raise RecomputeError(_DIFFERS)
        differs = (ids_TK != topk_ids_TK).any()
        if differs.device.type == "cpu":
            if differs:
                raise RecomputeError(_DIFFERS)
            return metadata
        if self._differed is None:
            with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to it
                pinned = torch.zeros((), dtype=torch.bool, pin_memory=differs.device.type == "cuda")
                self._differed = torch.zeros_like(differs), pinned
        on_device, on_host = self._differed
        on_host.copy_(on_device.logical_or_(differs), non_blocking=True)
        return metadata

    def forget(self, forward: InFlight) -> None:
        """Let a forward be no longer the only one; take one that is over out of those in flight."""
        with self._lock:
            self._count -= forward.is_over and forward.step == self._step
        if forward is self._only:
            self._only = None
