"""What ranks tell each other before they can carry anything: a few words of each, to all, on the migration group."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from ...utils.errors import one_line
from ..process_groups import wait_on_host
from .base import TransportError


def tell_all(group: dist.ProcessGroup, device: torch.device, word: bytes, deadline: float) -> list[bytes]:
    """The words of all ranks, in the order of the group. Collective over it.

    Args:
        device: that the group's backend works on.
        word: of this rank; those of others may be longer or shorter.
        deadline: a time of `time.monotonic`.

    Raises:
        TransportError: a rank did not come in time.
    """
    lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
    _gather(group, lengths, torch.tensor([len(word)], device=device), deadline)
    longest = int(lengths.max())
    if not longest:
        return [b""] * group.size()
    mine = torch.zeros(longest, dtype=torch.uint8)
    if word:
        mine[: len(word)] = torch.frombuffer(bytearray(word), dtype=torch.uint8)
    words = torch.empty(group.size() * longest, dtype=torch.uint8, device=device)
    _gather(group, words, mine.to(device), deadline)
    rows = words.view(group.size(), longest).cpu().numpy()
    return [rows[rank, :length].tobytes() for rank, length in enumerate(lengths.tolist())]


def _gather(group: dist.ProcessGroup, into: torch.Tensor, mine: torch.Tensor, deadline: float) -> None:
    try:
        work = dist.all_gather(list(into.chunk(group.size())), mine, group=group, async_op=True)
        assert work is not None
        seconds = max(0.001, deadline - time.monotonic())
        wait_on_host([work], group, seconds, on_device=into.device.type != "cpu")
    except RuntimeError as error:
        raise TransportError(f"the ranks could not meet: {one_line(error)}") from error
