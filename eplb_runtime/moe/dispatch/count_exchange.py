"""Every rank's counts of a batch, from which the split of tokens over replicas starts; and the check that all ranks are
in the same forward, which travels with them."""

from __future__ import annotations

import threading

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
        self._memory = _ThreadBuffers()

    def __call__(self, counts_E: Tensor) -> NDArray[np.int64]:
        """int64 ``[R, E]`` from each rank's int64 ``[E]``; valid until this thread's next call. Collective."""
        if self._forward_tag is None:
            return self._gather(counts_E)
        both = self._gather(torch.cat([counts_E, counts_E.new_full((1,), self._forward_tag.value)]))
        self._forward_tag.check(both[:, -1])
        memory = self._memory
        if memory.counts_RE.shape != (both.shape[0], both.shape[1] - 1):
            memory.counts_RE = np.empty((both.shape[0], both.shape[1] - 1), dtype=np.int64)
        np.copyto(memory.counts_RE, both[:, :-1])
        return memory.counts_RE

    def _gather(self, mine: Tensor) -> NDArray[np.int64]:
        group = self._channels.current().counts
        all_, on_host = self._memory.buffers(mine, group.size())
        with self._channels.launching():
            all_gather_into(all_.view(-1), mine, group=group)
        if on_host is not all_:
            on_host.copy_(all_, non_blocking=True)
            torch.accelerator.current_stream(mine.device).synchronize()
        result: NDArray[np.int64] = on_host.numpy()
        return result


class _ThreadBuffers(threading.local):
    """Buffers that one thread's exchanges reuse."""

    def __init__(self) -> None:
        self.counts_RE: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)
        self._all_RE: Tensor | None = None
        self._on_host_RE: Tensor | None = None

    def buffers(self, counts_E: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Return rows of all ranks: where they arrive, and on the host."""
        if self._all_RE is None or self._on_host_RE is None or self._all_RE.shape[1:] != counts_E.shape:
            with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to them
                self._all_RE = self._on_host_RE = counts_E.new_empty(ranks, counts_E.shape[0])
                if counts_E.device.type != "cpu":
                    self._on_host_RE = torch.empty_like(self._all_RE, device="cpu", pin_memory=True)
        return self._all_RE, self._on_host_RE
