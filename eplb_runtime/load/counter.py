"""Count tokens per logical expert while the model runs, one bucket of history per step, for several, or for all.

What stands here: device-side counting without host sync, and its short history. Not here: sums over ranks
(`aggregate.py`).
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

MAX_BUCKETS = 32
"""Rows of history that one measurement carries over the wire at most; longer intervals add up several steps in one."""


def in_recompute() -> bool:
    """Whether this code runs inside a backward pass, where activation checkpointing repeats the forward."""
    return bool(torch._C._current_graph_task_id() != -1)


class LoadCounter:
    """Tokens per logical expert, counted on the model's device into preallocated memory.

    ``counts`` is int64 ``[L, E]`` and never moves, so CUDA graphs can hold it. ``advance()`` closes a step; the steps
    since the last ``take()`` are kept as buckets ``[T, L, E]`` with ``T <= MAX_BUCKETS``.

    Args:
        interval: steps between two ``take()`` calls; more steps than that restart the history. None: any number of
            steps, all in one bucket.

    Attributes:
        steps_per_bucket: steps that a bucket covers; 0: all steps between two ``take()`` calls.
        closed_steps: how often ``advance`` was called.
        padding: int64, padded tokens so far, and all of the batches that a mask was given for.
        token_bytes: what a counted (token, choice) pair sends in a step, as layers say; 0 before the first.
    """

    def __init__(self, num_layers: int, num_experts: int, interval: int | None, device: torch.device) -> None:
        self.steps_per_bucket = 0 if interval is None else -(-interval // MAX_BUCKETS)
        buckets = 1 if interval is None else -(-interval // self.steps_per_bucket)
        # One column more than experts: masked tokens are counted there instead of being filtered out, because
        # filtering would need to know how many there are.
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._sink = torch.full((1,), num_experts, dtype=torch.int64, device=device)
        self._memory = _Memory()
        self._buckets = torch.zeros(buckets, num_layers, num_experts, dtype=torch.int64, device=device)
        self._steps = 0
        self.closed_steps = 0
        self.padding = torch.zeros(2, dtype=torch.int64, device=device)
        self._layer_of_padding = -1
        self.token_bytes = 0
        self.counts = self._counts[:, :num_experts]

    def count(self, layer: int, topk_ids_TK: Tensor, real_T: Tensor | None = None) -> None:
        """Add one batch of router choices; ``real_T`` is False for padding. Enqueues device work only."""
        ids = topk_ids_TK
        if real_T is not None:
            memory = self._memory
            if memory.masked_ids is None or memory.masked_ids.shape != ids.shape:
                with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to it
                    memory.masked_ids = torch.empty_like(ids)
            ids = torch.where(real_T[:, None], ids, self._sink, out=memory.masked_ids)
        ids = ids.reshape(-1)
        self._counts[layer].scatter_add_(0, ids, self._one.expand(ids.shape[0]))

    def note_padding(self, layer: int, real_T: Tensor) -> None:
        """Count padded tokens of a batch, in the first layer that has a mask alone."""
        if self._layer_of_padding in (-1, layer):
            self._layer_of_padding = layer
            self.padding[0] += real_T.logical_not().sum()
            self.padding[1] += len(real_T)

    def count_chosen(self, layer: int, chosen_TE: Tensor, real_T: Tensor | None = None) -> None:
        """As `count`, of choices that are given as bool ``[T, E]``: whether a token goes to a logical expert."""
        if real_T is not None:
            chosen_TE = chosen_TE & real_T[:, None]
        self.counts[layer].add_(chosen_TE.sum(dim=0))

    def advance(self) -> None:
        """Close a step: its counts go into the history."""
        if self.steps_per_bucket and self._steps == self._buckets.shape[0] * self.steps_per_bucket:
            self._steps = 0
        used = self._buckets_of(self._steps + 1)
        bucket = self._buckets[used - 1]
        if used > self._buckets_of(self._steps):
            bucket.copy_(self.counts)
        else:
            bucket.add_(self.counts)
        self._counts.zero_()
        self._steps += 1
        self.closed_steps += 1

    @property
    def buckets(self) -> int:
        """Rows of history so far."""
        return self._buckets_of(self._steps)

    def _buckets_of(self, steps: int) -> int:
        return -(-steps // self.steps_per_bucket) if self.steps_per_bucket else min(steps, 1)

    @property
    def open_steps(self) -> int:
        """Steps in the history so far."""
        return self._steps

    def peek(self) -> Tensor:
        """The buckets since the last ``take``, int64 ``[T, L, E]``, as a copy on the device; they stay."""
        return self._buckets[: self.buckets].clone()

    def resume(self, buckets: Tensor, steps: int) -> None:
        """Go on from what another run had counted since its last ``take``; ValueError: there is no room for it."""
        if len(buckets) != self._buckets_of(steps) or len(buckets) > len(self._buckets):
            raise ValueError(f"{len(buckets)} buckets of {steps} steps do not fit {len(self._buckets)} here")
        self._buckets[: len(buckets)].copy_(buckets)
        self._steps = steps

    def take(self) -> Tensor:
        """The buckets since the last call, int64 ``[T, L, E]``, oldest first, as a copy on the device; starts anew."""
        buckets = self._buckets[: self.buckets].clone()
        self._steps = 0
        return buckets


class _Memory(threading.local):
    """What one thread counts with: two batches at once may be in two layers."""

    masked_ids: Tensor | None = None
