"""Protocols of what the hosts' room hands to the balancer: exports of weights, which `checkpoint` makes, and hooked
optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from ..utils.text import one_line
from .loop_state import LoopHooks

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


class OptimizerHooks(Protocol):
    """The hooked optimizers of one attached model."""

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """`Balancer.adopt`."""

    def add(self, optimizers: Sequence[Any], container: torch.optim.Optimizer | None = None) -> None:
        """Hook optimizers that were checked, or what steps them in one step of its own."""

    def around_step(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """Inside, an optimizer steps, or is skipped on all ranks (by a scaler at an overflow)."""

    def follow(self) -> None:
        """Take over parameters that ``add_param_group`` has added since."""
