"""Protocols of weight exports, and a migration to logical order and back.

Weights are exported by `checkpoint`, which the hosts' room hands to the balancer.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..placement import Placement
from ..utils.text import one_line
from .loop_state import LoopHooks
from .rebalancer import Rebalancer

logger = logging.getLogger("eplb_runtime")

EXPORT_SECONDS = 120.0
"""Ranks wait so long for each other between buckets of an export, if the balancer's timeout is no longer."""


class TensorStream(Iterator[tuple[str, Tensor]]):
    """Named tensors one after another, of which all ranks take all; as a context it ends with its block. ``experts``:
    MoE layer (of ``num_experts``) and logical expert of each tensor of experts, by name; None: all, stacked."""

    experts: Mapping[str, tuple[int, int | None]]
    num_experts: int

    def close(self, reason: str = "") -> None:
        """Stop on this rank, without waiting for the others, which learn it at their next bucket. ``reason``: for the
        other ranks, in a line; a loop here that goes on with the stream raises it, and does not only end."""
        raise NotImplementedError

    def __enter__(self) -> TensorStream:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close("" if error is None else f"its consumer failed: {one_line(error, with_type=True)}")


class OpenStream(LoopHooks):
    """The stream of weights that is open on this rank; it ends when the rank goes on to something else."""

    stream: weakref.ref[TensorStream] | None = None

    def end(self, what: str) -> None:
        stream, self.stream = self.stream() if self.stream is not None else None, None
        if stream is not None:
            stream.close(f"it called {what} while its stream of weights was open")

    def before_reduce(self) -> None:
        self.end("optimizer.step()")

    def on_step_end(self) -> None:
        self.end("the end of a training step")


class WeightExport(Protocol):
    """The exports of one balancer."""

    def stream(self, bucket_bytes: int, dtype: torch.dtype | None, rank: int | None, seconds: float) -> TensorStream:
        """`Balancer.named_logical_tensors`."""

    def verify(self, tensors: object, dtype: torch.dtype | None, seconds: float) -> str:
        """`Balancer.verify_export`."""


@contextmanager
def placed_logically(rebalancer: Rebalancer, barrier: Callable[[], None], moved: Callable[[], None]) -> Iterator[None]:
    """Inside, each rank has the experts ``ep_rank * E/R + i`` in this order. Collective, in and out. ``barrier``
    returns when all ranks are here; ``moved`` follows a change of the placement."""

    def go(target: Placement, what: str) -> None:
        if np.array_equal(rebalancer.placement().physical_to_logical, target.physical_to_logical):
            return
        progress = rebalancer.move_to(target)
        moved()
        if progress.failed_phase is not None:
            phase = progress.failed_phase.value
            raise RuntimeError(f"experts could not be moved into logical order or back ({phase}): {progress.cause}")
        logger.info("%s: %d experts moved", what, progress.moved_experts)

    def back() -> None:
        barrier()
        go(before, "experts are back from logical order")

    barrier()
    if rebalancer.drain():  # what is in flight would commit inside, also where nothing has to move
        moved()
    before = rebalancer.placement()
    rebalancer.quiesced += 1
    try:
        sizes = before.num_layers, before.num_experts, before.num_ranks, before.replica_slots
        go(Placement.initial(*sizes), "experts are in logical order")
        try:
            yield
        except BaseException:
            try:
                back()
            except RuntimeError as error:  # what the body raised must not be hidden
                logger.error("%s; experts are in placement epoch %d", error, rebalancer.placement().epoch)
            raise
        back()
    finally:
        rebalancer.quiesced -= 1
