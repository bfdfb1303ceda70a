"""Count tokens per logical expert while the model runs; sum the counts over ranks; save them in a checkpoint."""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from .series import decode, encode

logger = logging.getLogger("eplb_runtime")

MAX_BUCKETS = 32
"""Rows of history that one measurement carries over the wire at most; longer intervals add up several steps in one."""


def in_recompute() -> bool:
    """Return whether this thread is inside a backward pass, where activation checkpointing repeats the forward."""
    return bool(torch._C._current_graph_task_id() != -1)


class LoadCounter:
    """Tokens per logical expert, counted on the model's device without host sync.

    ``advance()`` closes a step; the steps since the last ``take()`` are buckets ``[T, L, E]``, T <= `MAX_BUCKETS`.

    Args:
        interval: steps between two ``take()`` calls; more steps than that restart the history. None: any number of
            steps, all in one bucket.

    Attributes:
        counts: int64 ``[L, E]``, of the running step. It never moves, so CUDA graphs can hold it.
        steps_per_bucket: steps that a bucket covers; 0: all steps between two ``take()`` calls.
        open_steps: steps in the history so far; ``closed_steps``: how often ``advance`` was called.
        token_bytes: what a counted (token, choice) pair sends in a step, as layers say; 0 before the first.
    """

    def __init__(self, num_layers: int, num_experts: int, interval: int | None, device: torch.device) -> None:
        self.steps_per_bucket = 0 if interval is None else -(-interval // MAX_BUCKETS)
        buckets = 1 if interval is None else -(-interval // self.steps_per_bucket)
        # One column more than experts counts masked tokens; to filter them out needs to know how many they are.
        self._counts = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._one = torch.ones(1, dtype=torch.int64, device=device)
        self._sink = torch.full((1,), num_experts, dtype=torch.int64, device=device)
        self._buckets = torch.zeros(buckets, num_layers, num_experts, dtype=torch.int64, device=device)
        self.counts = self._counts[:, :num_experts]
        self.open_steps = self.closed_steps = self.token_bytes = 0

    def count(self, layer: int, chosen: Tensor, real_T: Tensor | None = None) -> None:
        """Add a batch of router choices to ``counts[layer]`` on the device. ``chosen``: int64 ids of logical experts
        ``[T, K]``, or bool ``[T, E]``, True where a token goes. ``real_T``: False for padding, which is left out."""
        if chosen.dtype is torch.bool:
            self.counts[layer].add_((chosen if real_T is None else chosen & real_T[:, None]).sum(dim=0))
            return
        ids = chosen if real_T is None else torch.where(real_T[:, None], chosen, self._sink)
        ids = ids.reshape(-1)
        self._counts[layer].scatter_add_(0, ids, self._one.expand(ids.shape[0]))

    def advance(self) -> None:
        """Close a step: move ``counts`` into the history, set them to zero, and add 1 to ``open_steps`` and
        ``closed_steps``. A history that is full is dropped first."""
        if self.steps_per_bucket and self.open_steps == len(self._buckets) * self.steps_per_bucket:
            self.open_steps = 0
        before, self.open_steps = self.buckets, self.open_steps + 1
        bucket = self._buckets[self.buckets - 1]
        if self.buckets > before:
            bucket.copy_(self.counts)
        else:
            bucket.add_(self.counts)
        self._counts.zero_()
        self.closed_steps += 1

    @property
    def buckets(self) -> int:
        """Return the number of buckets, at most `MAX_BUCKETS`, that have counts since the last `take`."""
        return -(-self.open_steps // self.steps_per_bucket) if self.steps_per_bucket else min(self.open_steps, 1)

    def peek(self) -> Tensor:
        """Return a copy of the buckets since the last `take`, int64 ``[T, L, E]``, oldest first, on the device."""
        return self._buckets[: self.buckets].clone()

    def take(self) -> Tensor:
        """Return what `peek` returns, and begin a new history: ``open_steps`` is 0 then."""
        buckets = self.peek()
        self.open_steps = 0
        return buckets

    def resume(self, buckets: Tensor, steps: int) -> None:
        """Replace the history by another run's buckets, ``open_steps`` by ``steps``. ValueError: they do not fit."""
        before, self.open_steps = self.open_steps, steps
        if len(buckets) != self.buckets or len(buckets) > len(self._buckets):
            self.open_steps = before
            raise ValueError(f"{len(buckets)} buckets of {steps} steps do not fit {len(self._buckets)} here")
        self._buckets[: len(buckets)].copy_(buckets)


class HostCopy:
    """A device tensor on its way to the host: started without waiting, awaited where the numbers are needed."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # a waiting thread sleeps instead of spinning
            # The copy runs on the tensor's GPU, which need not be the one that this thread works on.
            self._event.record(torch.cuda.current_stream(tensor.device))
        else:
            self._host = tensor.to("cpu", copy=True)

    def wait(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def aggregate(buckets: HostCopy, group: dist.ProcessGroup, numbers: Sequence[int] = ()) -> tuple[Tensor, list[int]]:
    """Return the sum of ``buckets`` over the ranks of ``group`` (EP and EDP), int64 ``[T, L, E]`` on the CPU, and the
    sums of ``numbers``, as many on each rank. Waits for the copy to the host. Collective: one all-reduce."""
    here = buckets.wait()
    total = torch.cat([here.reshape(-1), torch.tensor(numbers, dtype=here.dtype)])
    dist.all_reduce(total, group=group)
    counts, sums = total.split([here.numel(), len(numbers)])
    return counts.view(here.shape), sums.tolist()


def saved_load(
    history: Sequence[NDArray[np.int64]], counter: LoadCounter, summed: Callable[[Tensor], NDArray[np.int64]]
) -> dict[str, Any]:
    """Return the history (arrays ``[L, E]``) and a copy of the counter's buckets as a JSON-able dict. ``summed`` adds
    the buckets up over ranks; if it raises RuntimeError, buckets are left out, and a warning is logged."""
    state: dict[str, Any] = {"steps_per_bucket": counter.steps_per_bucket}
    if history:
        state["history"] = encode(np.stack(history))
    try:
        if counter.open_steps:
            state |= {"open": encode(summed(counter.peek())), "open_steps": counter.open_steps}
    except RuntimeError as error:
        logger.warning("the load since the last decision is not saved: %s", error)
    return state


def resume_load(state: Mapping[str, Any], history: deque[NDArray[np.int64]], counter: LoadCounter, share: int) -> None:
    """Replace ``history`` and the counter's buckets, in place, by those in a dict of `saved_load`. An empty dict
    changes nothing, nor does one of another ``steps_per_bucket``, which is logged. ``share``: 1 on the one rank that
    takes the buckets, 0 on the others, which take zeros. ValueError: the dict cannot be read."""
    if not state:
        return
    if state.get("steps_per_bucket") != counter.steps_per_bucket:
        logger.info("the saved load was measured at another interval; forecasts start from scratch")
        return
    shape = counter.counts.shape
    rows = decode(state["history"], *shape) if "history" in state else ()
    if "open" in state:
        counter.resume(torch.from_numpy(decode(state["open"], *shape)) * share, int(state["open_steps"]))
    history.clear()
    history.extend(rows)
