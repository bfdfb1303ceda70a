"""Sum the load of all ranks: one all-reduce for all layers, on the balancer's own CPU group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


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
    """The load of all ranks of ``group`` (EP and EDP), int64 ``[T, L, E]`` on the CPU, and the sums over ranks of a few
    more numbers, as many on each rank, in the same all-reduce."""
    here = buckets.wait()
    total = torch.cat([here.reshape(-1), torch.tensor(numbers, dtype=here.dtype)])
    dist.all_reduce(total, group=group)
    counts, sums = total.split([here.numel(), len(numbers)])
    return counts.view(here.shape), sums.tolist()
