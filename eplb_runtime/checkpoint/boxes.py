"""Which part of each tensor is on this rank, as a box within the whole one, and who writes what several ranks have.

An expert's row is a box, so is a slice of it, so is a shard of FSDP2. Boxes are saved and boxes are loaded; they need
not be the same ones.
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
class Box:
    """A part of a tensor, live on this rank.

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
        """Tells it from all other parts: ``<key>@<offset>,<offset>,...``."""
        return f"{self.key}@{','.join(map(str, self.offsets))}"


def boxes_here(view: LogicalView, entry: Entry) -> Iterator[Box]:
    """Every part of a tensor that this rank has."""
    size = tuple(view.whole_size(entry))
    here = local(entry.tensor).detach()
    if entry.layer is not None:
        rest = (columns(entry.tensor).start or 0, *[0] * len(size))
        for row, expert in enumerate(view.experts_here(entry.layer)):
            yield Box(entry.key, size, (expert, *rest)[: len(size)], here[row : row + 1])
    elif isinstance(entry.tensor, DTensor):
        for chunk in entry.tensor.__create_chunk_list__():
            if here.numel():
                yield Box(entry.key, size, tuple(chunk.offsets), here)
    else:
        yield Box(entry.key, size, (0,) * len(size), here)


def boxes_to_write(view: LogicalView, entries: Sequence[Entry], ranks: Sequence[int]) -> list[Box]:
    """The parts that this rank writes: together, the ranks write each part once.

    Args:
        ranks: that have the model; tensors that all of them have whole are shared out by size.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    bytes_of = dict.fromkeys(ranks, 0)
    found: list[Box] = []
    for entry in entries:
        if entry.layer is not None:
            found.extend(_own_experts(view, entry, rank))
        elif isinstance(entry.tensor, DTensor):
            found.extend(boxes_here(view, entry) if _is_first_copy(entry.tensor) else ())
        else:
            writer = min(bytes_of, key=lambda rank: bytes_of[rank])
            bytes_of[writer] += entry.tensor.nbytes
            found.extend(boxes_here(view, entry) if writer == rank else ())
    return found


def _own_experts(view: LogicalView, entry: Entry, rank: int) -> Iterator[Box]:
    """Of ranks that hold the same experts whole, each writes its share; of their slices, each its own."""
    assert view.balancer is not None
    holders = (rank,) if isinstance(entry.tensor, DTensor) else view.balancer._runtime.job.edp_ranks
    for box in boxes_here(view, entry):
        if holders[box.offsets[0] % len(holders)] == rank:
            yield box


def _is_first_copy(tensor: DTensor) -> bool:
    """Whether this rank is the first of those that have the same shard."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return all(
        at == 0 for at, placement in zip(coordinate, tensor.placements, strict=True) if isinstance(placement, Replicate)
    )
