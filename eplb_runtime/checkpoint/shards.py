"""Shards: the part of each tensor that a rank holds, and which rank writes it if several hold the same.

A shard is a rectangular block of the logical tensor: an expert's row, a slice of it, or a shard of FSDP2. A checkpoint
may be loaded into other shards than it was saved from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..moe.experts.slices import columns, local
from .state import Entry, LogicalView


@dataclass(frozen=True)
class Shard:
    """A block of a tensor, live on this rank.

    Args:
        key: of the entry.
        size: of the whole tensor.
        offsets: where the part begins, in each dimension.
        tensor: the part itself; writing to it writes to the model.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: Tensor

    @property
    def name(self) -> str:
        """Return the name of this shard, unique in a checkpoint: ``<key>@<offset>,<offset>,...``."""
        return f"{self.key}@{','.join(map(str, self.offsets))}"


def local_shards(view: LogicalView, entry: Entry) -> Iterator[Shard]:
    """Yield every shard of a tensor that this rank holds."""
    size = tuple(view.whole_size(entry))
    here = local(entry.tensor).detach()
    if entry.layer is not None:
        rest = (columns(entry.tensor).start or 0, *[0] * len(size))
        for row, expert in enumerate(view.experts_here(entry.layer)):
            yield Shard(entry.key, size, (expert, *rest)[: len(size)], here[row : row + 1])
    elif isinstance(entry.tensor, DTensor):
        for chunk in entry.tensor.__create_chunk_list__():
            if here.numel():
                yield Shard(entry.key, size, tuple(chunk.offsets), here)
    else:
        yield Shard(entry.key, size, (0,) * len(size), here)


def shards_to_write(view: LogicalView, entries: Sequence[Entry], ranks: Sequence[int]) -> list[Shard]:
    """Return the shards that this rank writes; together, the ranks write each shard once.

    Args:
        ranks: that hold the model; they share out by size the tensors that all of them hold in full.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    bytes_of = dict.fromkeys(ranks, 0)
    found: list[Shard] = []
    for entry in entries:
        if entry.layer is not None:
            found.extend(_own_experts(view, entry, rank))
        elif isinstance(entry.tensor, DTensor):
            found.extend(local_shards(view, entry) if _is_first_copy(entry.tensor) else ())
        else:
            writer = min(bytes_of, key=lambda rank: bytes_of[rank])
            bytes_of[writer] += entry.tensor.nbytes
            found.extend(local_shards(view, entry) if writer == rank else ())
    return found


def _own_experts(view: LogicalView, entry: Entry, rank: int) -> Iterator[Shard]:
    """Yield this rank's share of the experts that several ranks hold in full, or its own slices of experts."""
    assert view.balancer is not None
    holders = (rank,) if isinstance(entry.tensor, DTensor) else view.balancer._runtime.job.edp_ranks
    for shard in local_shards(view, entry):
        if holders[shard.offsets[0] % len(holders)] == rank:
            yield shard


def _is_first_copy(tensor: DTensor) -> bool:
    """Return whether this rank is the first of those with the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )
