"""Every rank's counts of a batch, from which the split of tokens over replicas starts; and the check that all ranks are
in the same forward, which travels with them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...distributed.consensus import all_gather_into
from ...distributed.step_tag import ForwardTag
from .channels import MicroBatchChannels


class CountExchange:
    """Every rank's counts of a batch: one collective per call, and one host sync for counts on the host."""

    def __init__(self, channels: MicroBatchChannels, forward_tag: ForwardTag | None = None) -> None:
        self._channels = channels
        self._forward_tag = forward_tag

    def __call__(self, counts_E: Tensor) -> NDArray[np.int64]:
        """Return int64 ``[R, E]`` from each rank's int64 ``[E]``. Collective."""
        tag, group = self._forward_tag, self._channels.current().counts
        mine = counts_E if tag is None else torch.cat([counts_E, counts_E.new_full((1,), tag.value)])
        all_RW = mine.new_empty(group.size(), len(mine))
        with self._channels.launching():
            all_gather_into(all_RW.view(-1), mine, group=group)
        counts_RW: NDArray[np.int64] = all_RW.cpu().numpy()
        if tag is None:
            return counts_RW
        tag.check(counts_RW[:, -1])
        return counts_RW[:, :-1]
