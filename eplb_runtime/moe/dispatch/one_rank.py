"""Dispatch in an EP group of one rank: nobody to exchange with, so rows are only put into the order of slots.

What a row's place is stays on the device: no host sync in a forward, a recompute or a backward pass, and no size that
depends on a value, so that a CUDA graph can hold them. The same rows and sums as of `AllToAll`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..experts.compute import SlotCounts
from ..routing.splitter import RowCounts
from . import permute
from .all_to_all import AllToAll
from .manifest import Cargo, Choices, Leg, Manifest


class OneRank(AllToAll):
    """`AllToAll` for a group of one. Each choice is a row, so M = T * K.

    Args: as of `AllToAll`.

    Raises:
        ValueError: there are more ranks.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self._num_ranks > 1:
            raise ValueError(f"OneRank is for a group of one rank, and this one has {self._num_ranks}: take AllToAll")

    def to_experts(self, source: Tensor, cargo: Cargo) -> Callable[[], Tensor]:
        rows_MD = self._memory.like(source, cargo.arrived_M.shape[0])
        permute.gather(source, cargo.arrived_M, rows_MD)
        return lambda: rows_MD

    def to_tokens(self, rows_MD: Tensor, manifest: Any) -> Callable[[], Tensor]:
        return rows_MD.contiguous

    def _manifest(self, slots_TK: Tensor, counts: RowCounts | None) -> Manifest:
        leaving = self._leaving(slots_TK, once=False, told=False)
        stays = Leg(None, slots_TK.numel(), [0], [0])
        ends_S = leaving.told_2RW[0, 0].cumsum(0, dtype=torch.int32)
        on_host = None if counts is None else counts.sent_P.tolist()
        place_TK = leaving.place_TK
        return Manifest(
            Choices(Cargo(stays, leaving.choice_N), place_TK, place_TK.view(-1), SlotCounts(ends_S, on_host)),
            Cargo(stays, leaving.token_N),
        )
