"""Count tokens per logical expert while the model runs, one row of history per step (or bucket of steps).

What stands here: device-side counting without host sync, and its short history. Not here: sums over ranks
(`aggregate.py`) and what to expect next (`forecast.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ROWS = 32
"""Rows of history that one measurement carries over the wire at most; longer intervals add up several steps a row."""


def in_recompute() -> bool:
    """Whether this code runs inside a backward pass, where activation checkpointing repeats the forward."""
    return bool(torch._C._current_graph_task_id() != -1)


class LoadRecorder:
    """Tokens per logical expert, counted on the model's device into preallocated memory.

    ``counts`` is int64 ``[L, E]`` and never moves, so CUDA graphs can hold it. ``advance()`` closes a step; the steps
    since the last ``take()`` are kept as rows ``[T, L, E]`` with ``T <= MAX_ROWS``.

    Args:
        num_layers: L, MoE layers.
        num_experts: E, logical experts of a layer.
        interval: steps between two ``take()`` calls; more steps than that restart the history.
        device: where the router's choices are.
    """

    def __init__(self, num_layers: int, num_experts: int, interval: int, device: torch.device) -> None:
        self.steps_per_row = -(-interval // MAX_ROWS)
        rows = -(-interval // self.steps_per_row)
        # One column more than experts: masked tokens are counted there instead of being filtered out, because
        # filtering would need to know how many there are.
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._sink = torch.full((1,), num_experts, dtype=torch.int64, device=device)
        self._masked_ids = torch.empty(0, dtype=torch.int64, device=device)
        self._rows = torch.zeros(rows, num_layers, num_experts, dtype=torch.int64, device=device)
        self._steps = 0
        self.counts = self._counts[:, :num_experts]

    def count(self, layer: int, topk_ids_TK: Tensor, real_T: Tensor | None = None) -> None:
        """Add one batch of router choices. Enqueues device work only.

        Args:
            layer: index of the MoE layer.
            topk_ids_TK: int64 ``[T, K]``, logical expert ids.
            real_T: bool ``[T]``, False for padding; None: every token counts.
        """
        ids = topk_ids_TK
        if real_T is not None:
            if self._masked_ids.shape != ids.shape:
                self._masked_ids = torch.empty_like(ids)
            ids = torch.where(real_T[:, None], ids, self._sink, out=self._masked_ids)
        ids = ids.reshape(-1)
        self._counts[layer].scatter_add_(0, ids, self._one.expand(ids.shape[0]))

    def advance(self) -> None:
        """Close a step: its counts go into the history."""
        if self._steps == self._rows.shape[0] * self.steps_per_row:
            self._steps = 0
        row = self._rows[self._steps // self.steps_per_row]
        if self._steps % self.steps_per_row == 0:
            row.copy_(self.counts)
        else:
            row.add_(self.counts)
        self._counts.zero_()
        self._steps += 1

    @property
    def rows(self) -> int:
        """Rows of history so far."""
        return -(-self._steps // self.steps_per_row)

    def take(self) -> Tensor:
        """The rows since the last call, int64 ``[T, L, E]``, oldest first, as a copy on the device; starts anew."""
        rows = self._rows[: self.rows].clone()
        self._steps = 0
        return rows
