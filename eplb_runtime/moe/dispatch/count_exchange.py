"""Every rank's counts of a batch, from which the split of tokens over replicas starts; and the check that all ranks are
in the same forward, which travels with them."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...distributed.consensus import all_gather_into
from ...distributed.hang_watchdog import Meeting
from .channels import MicroBatchChannel, MicroBatchChannels
from .recompute import AsyncMismatchFlag


class CountExchange:
    """Every rank's counts of a batch: what the split of tokens over copies starts from.

    Apart from the dispatcher, which may have other ways to find out sizes. One collective a call, and one host sync
    where they are wanted on the host.

    Args:
        group: the EP group, on the counts' device.
        meeting: makes sure that ranks are in the same forward; None: they are.
        channels: where there may be a second way beside this group.
    """

    def __init__(
        self, group: dist.ProcessGroup, meeting: Meeting | None = None, channels: MicroBatchChannels | None = None
    ) -> None:
        self._channels = channels or MicroBatchChannels(MicroBatchChannel(group, group))
        self._meeting = meeting
        self._memory = _ThreadBuffers()

    def __call__(self, counts_E: Tensor) -> NDArray[np.int64]:
        """int64 ``[R, E]`` from each rank's int64 ``[E]``; valid until this thread's next call. Collective."""
        if self._meeting is None:
            return self._gather(counts_E)
        with self._meeting.watch.waiting():
            both = self._gather(torch.cat([counts_E, counts_E.new_full((1,), self._meeting.word)]))
        self._meeting.check(both[:, -1])
        memory = self._memory
        if memory.counts_RE.shape != (both.shape[0], both.shape[1] - 1):
            memory.counts_RE = np.empty((both.shape[0], both.shape[1] - 1), dtype=np.int64)
        np.copyto(memory.counts_RE, both[:, :-1])
        return memory.counts_RE

    def on_device(self, counts_E: Tensor) -> Tensor:
        """int64 ``[R, E]`` on the device from each rank's int64 ``[E]``; the host does not wait. Collective.

        Raises:
            OutOfStepError: ranks were in other forwards in an earlier call. (On a CPU in this one.)
        """
        group = self._channels.here().counts
        apart = self._memory.apart
        if apart is not None and self._meeting is not None:
            apart.raise_if_found(self._meeting)
        mine = counts_E
        if self._meeting is not None:
            mine = torch.cat([counts_E, counts_E.new_full((1,), self._meeting.word)])
        all_ = mine.new_empty(group.size(), mine.shape[0])
        waiting = nullcontext() if self._meeting is None else self._meeting.watch.waiting()
        with waiting, self._channels.launching():
            all_gather_into(all_.view(-1), mine, group=group)
        if self._meeting is None:
            return all_
        if apart is None:
            apart = self._memory.apart = _TagMismatch(group.size(), group.rank(), mine.device)
        apart.note(all_[:, -1])
        if mine.device.type == "cpu":
            apart.raise_if_found(self._meeting)
        self._meeting.told()
        return all_[:, :-1]

    def _gather(self, mine: Tensor) -> NDArray[np.int64]:
        group = self._channels.here().counts
        all_, on_host = self._memory.buffers(mine, group.size())
        with self._channels.launching():
            all_gather_into(all_.view(-1), mine, group=group)
        if on_host is not all_:
            on_host.copy_(all_, non_blocking=True)
            torch.accelerator.current_stream(mine.device).synchronize()
        result: NDArray[np.int64] = on_host.numpy()
        return result


class _TagMismatch:
    """Whether ranks have met in forwards that do not belong together: found out on the device, told to the host when it
    looks next. The first such meeting is kept.

    Args:
        rank: this one's place in the group.
    """

    def __init__(self, ranks: int, rank: int, device: torch.device) -> None:
        self._rank = rank
        with torch.inference_mode(False):
            self._words_R = torch.zeros(ranks, dtype=torch.int64, device=device)
        self._differed = AsyncMismatchFlag(device)

    def note(self, words_R: Tensor) -> None:
        """Compare what all ranks have said. No host sync."""
        self._words_R.copy_(torch.where(self._differed.found, self._words_R, words_R))
        self._differed.note((self._words_R != self._words_R[self._rank]).any())

    def raise_if_found(self, meeting: Meeting) -> None:
        """Raises OutOfStepError as `Meeting.check` does; what is under way on the device is not waited for."""
        if self._differed.on_host:
            words = self._words_R.cpu().numpy()
            meeting.check(words, int(words[self._rank]))


class _ThreadBuffers(threading.local):
    """What one thread's exchanges use again and again."""

    def __init__(self) -> None:
        self.counts_RE: NDArray[np.int64] = np.empty((0, 0), dtype=np.int64)
        self._all_RE: Tensor | None = None
        self._on_host_RE: Tensor | None = None
        self.apart: _TagMismatch | None = None

    def buffers(self, counts_E: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        """Rows of all ranks, where they arrive and on the host."""
        if self._all_RE is None or self._on_host_RE is None or self._all_RE.shape[1:] != counts_E.shape:
            with torch.inference_mode(False):  # kept: made inside it, nobody outside could write to them
                self._all_RE = self._on_host_RE = counts_E.new_empty(ranks, counts_E.shape[0])
                if counts_E.device.type != "cpu":
                    self._on_host_RE = torch.empty_like(self._all_RE, device="cpu", pin_memory=True)
        return self._all_RE, self._on_host_RE
