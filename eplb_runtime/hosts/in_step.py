"""Evaluation loops of Transformers' Trainer with all ranks in step, where they have unequally many batches.

Training needs none of it: Accelerate deals out equally many batches, and each rank makes the same steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from ..balancer.balancer import Balancer
from ..distributed.consensus import gather_rows


class InStep:
    """Batches of a data loader, one for each rank in each round: every forward is a meeting of the ranks. A rank that
    has no more goes along with its last batch, and what comes of it is dropped."""

    def __init__(self, loader: Any, accelerator: Any, balancer: Balancer, gather: Any) -> None:
        self._loader = loader
        self._accelerator = accelerator
        self._balancer = balancer
        self._gather = gather
        self._rows_R = [0]  # of each rank's batch in this round; -1: it has none

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        own, last, is_first = iter(self._loader), None, True
        while True:
            batch = next(own, None)
            rows = (find_batch_size(batch) or 0) if batch is not None else -1
            mine = torch.tensor([rows], device=self._balancer.runtime.device)
            self._rows_R = gather_rows(mine, self._balancer.runtime.groups.everyone).flatten().tolist()
            if max(self._rows_R) < 0:
                return
            if is_first and -1 in self._rows_R:
                empty = [rank for rank, rows in enumerate(self._rows_R) if rows < 0]
                raise RuntimeError(
                    f"rank {', '.join(map(str, empty))} has no batch to evaluate, and takes part in every forward: "
                    "give each rank one at least (even_batches=True does)"
                )
            last, is_first = batch if batch is not None else last, False
            yield last

    def gather(self, tensors: Any) -> Any:
        """What the round gave on all ranks, in their order, without what was only to keep step."""
        if self._accelerator.even_batches and len(set(self._rows_R)) == 1:
            return self._gather(tensors)
        return recursively_apply(self._gather_rows, tensors)

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        most = max(self._rows_R)
        mine = tensor[:most]
        padded = torch.cat([mine, mine.new_zeros(most - mine.shape[0], *mine.shape[1:])])
        of_ranks = self._accelerator.gather(padded).split(most)
        return torch.cat([part[: max(0, rows)] for part, rows in zip(of_ranks, self._rows_R, strict=True)])
