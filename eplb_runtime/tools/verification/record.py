"""What a run leaves behind for comparing: a checksum of every tensor, and of every expert's part of it, step by step.

Experts are named by their logical ids, so records compare whatever slots they stood in. Checksums of all ranks are
gathered, never the tensors: a record is small however large the model is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from ...checkpoint.state import LogicalView
from ...distributed.consensus import gather_rows
from ...moe.experts.slices import local
from ...utils.checksums import as_bytes, checksum

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CapturedState:
    """All ranks' state after a step.

    Args:
        names: of the tensors, in model order, parameters before optimizer state; equal on every rank.
        layers: MoE layer of each, or None.
        whole: int64 ``[W, D, 3]`` of tensors without an expert dimension: (index in ``names``, checksum in two halves).
        experts: int64 ``[G, N, 5]`` of the others, for each EP group: (index, logical expert, checksum in two halves,
            rank that holds it), sorted.
    """

    names: tuple[str, ...]
    layers: tuple[int | None, ...]
    whole: IntArray
    experts: IntArray


@dataclass(frozen=True)
class Place:
    """A tensor, or an expert's part of one, that is not the same in two states; ``rank`` holds it in the second."""

    index: int
    expert: int | None
    rank: int


class StateReader:
    """Reads states of a model that is being trained. Every method is collective.

    Args:
        group: gloo, all ranks of the job.
        ep_sets: the ranks of every EP group.
    """

    def __init__(self, group: dist.ProcessGroup, ep_sets: list[list[int]]) -> None:
        self._group = group
        self._ep_sets = ep_sets

    def read(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CapturedState:
        view = LogicalView(model, optimizer)
        entries = list(view.entries())
        whole: list[tuple[int, ...]] = []
        experts: list[tuple[int, ...]] = []
        for index, entry in enumerate(entries):
            tensor = local(entry.tensor).detach()
            if entry.layer is None:
                whole.append((index, *_checksum(tensor)))
                continue
            for row, expert in zip(tensor, view.experts_here(entry.layer), strict=True):
                experts.append((index, expert, *_checksum(row), dist.get_rank()))
        gathered = self._gather(experts, 5)
        by_group = [np.concatenate([gathered[rank] for rank in ranks]) for ranks in self._ep_sets]
        ordered = [rows[np.lexsort((rows[:, 1], rows[:, 0]))] for rows in by_group]
        names, layers = tuple(entry.key for entry in entries), tuple(entry.layer for entry in entries)
        return CapturedState(names, layers, self._gather(whole, 3), np.stack(ordered))

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's, ``[W, ...]``, on the CPU."""
        return gather_rows(mine.contiguous(), self._group)

    def fetch(self, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place, ep_set: list[int]) -> Tensor:
        """The values at a place, float64, on every rank; ``ep_set``: the EP group to read it from.

        The tensor or expert may be on another rank than ``place`` says; whoever has it sends it.
        """
        view = LogicalView(model, optimizer)
        entry = list(view.entries())[place.index]
        row: Tensor | None = entry.tensor.detach()
        if place.expert is not None and entry.layer is not None:
            here = view.experts_here(entry.layer)
            shape = entry.tensor.shape[1:]
            row = entry.tensor.detach()[here.index(place.expert)] if place.expert in here else None
            is_owner = row is not None and dist.get_rank() in ep_set
        else:
            shape, is_owner = entry.tensor.shape, dist.get_rank() == place.rank
        # One rank's values and zeros from all others: the sum is exact.
        values = torch.zeros(shape, dtype=torch.float64)
        if is_owner and row is not None:
            values.copy_(row)
        dist.all_reduce(values, group=self._group)
        return values

    def _gather(self, rows: list[tuple[int, ...]], columns: int) -> IntArray:
        mine = torch.tensor(rows, dtype=torch.int64).reshape(-1, columns)
        return np.asarray(self.gather(mine).numpy())


def _checksum(tensor: Tensor) -> tuple[int, int]:
    high, low = np.frombuffer(checksum([as_bytes(tensor.contiguous())]), dtype=np.int64)
    return int(high), int(low)


def differing(one: CapturedState, other: CapturedState) -> list[Place]:
    """Where two states differ, in model order; the places of all ranks.

    Raises:
        ValueError: they don't hold the same tensors.
    """
    if one.names != other.names:
        odd = sorted(set(one.names) ^ set(other.names))
        raise ValueError(f"one run has {odd[0] if odd else 'its tensors in another order'}, the other has not")
    found = []
    ranks, rows = np.nonzero((one.whole[:, :, 1:] != other.whole[:, :, 1:]).any(axis=2))
    found += [Place(int(other.whole[rank, row, 0]), None, int(rank)) for rank, row in zip(ranks, rows, strict=True)]
    groups, rows = np.nonzero((one.experts[:, :, 2:4] != other.experts[:, :, 2:4]).any(axis=2))
    for group, row in zip(groups, rows, strict=True):
        index, expert, _, _, rank = other.experts[group, row].tolist()
        found.append(Place(index, expert, rank))
    return sorted(found, key=lambda place: (place.index, -1 if place.expert is None else place.expert, place.rank))
