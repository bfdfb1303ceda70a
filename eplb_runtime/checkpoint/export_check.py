"""Compares exported weights with the model's: a checksum for each logical expert, wherever it is.

What a walk over a rank's modules exports under ``ep_rank * E/R + i`` is wrong once experts have moved. It is known
what such a walk gives, so it is named where it is found.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..distributed.consensus import first_problem, gather_bytes, maxima
from ..utils.checksums import CHECKSUM_BYTES, as_bytes, checksum
from ..utils.errors import one_line
from .logical_tensors import Chunk, ExportError, LogicalTensorList, LogicalTensors

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

_EQUAL, _BY_LOCAL_INDEX, _DIFFERS = 1, 2, 3
"""State of a chunk that was given; 0: it was not. The largest over ranks counts."""
_MOST_NAMED = 8

Checksums = NDArray[np.uint8]


class ExportCheck:
    """One comparison. Every method is called on all ranks.

    Args:
        tensors: all tensors of the model, agreed upon.
        seconds: that ranks wait for each other.
    """

    def __init__(self, balancer: Balancer, tensors: LogicalTensorList, seconds: float) -> None:
        self._balancer = balancer
        self._tensors = tensors
        self._seconds = seconds
        self._chunks: list[Chunk] = []
        self._first: list[int] = []
        for number in range(len(tensors.items)):
            self._first.append(len(self._chunks))
            self._chunks += tensors.chunks_of(number)
        self._number_of = {item.name: number for number, item in enumerate(tensors.items)}

    @torch.no_grad()
    def compare(self, given: object) -> str:
        """Compare what is given, over all ranks: pairs, a mapping, or a function that returns either.

        Returns:
            What was found equal, in a line.

        Raises:
            ExportError: what differs, in a line.
        """
        theirs, problem = self._checksums_of(given)
        if problem and isinstance(given, LogicalTensors):
            given.close(problem)  # the caller holds it, and the others wait at its next bucket
        self._agree(problem)  # a rank that takes longer to walk its weights is waited for here
        ours = self._checksums()
        found = torch.from_numpy(self._compared(theirs, ours))
        control = self._balancer._runtime.groups.control
        return self._said(self._balancer._rebalancer.run(lambda: maxima(found, control)).numpy())

    def _checksums_of(self, given: object) -> tuple[dict[int, bytes], str]:
        """The checksum of each chunk that was given here, by its number; and what is wrong with it."""
        theirs: dict[int, bytes] = {}
        try:
            for name, tensor in pairs_of(given):
                number = self._number_of.get(name)
                if number is None:
                    some = next((known for known in self._number_of if known.rpartition(".")[2] in name), "")
                    some = some or next(iter(self._number_of), "none")
                    return theirs, f"verify_export was given {name}, and the model has no tensor of that name ({some})"
                spec = self._tensors.items[number].spec
                if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                    return theirs, (
                        f"verify_export was given {name} as {tensor.dtype} {list(tensor.shape)}; the model's is "
                        f"{spec.dtype} {list(spec.shape)} (dtype= says to which the export casts)"
                    )
                for at in range(self._first[number], self._end(number)):
                    row = self._chunks[at].row
                    theirs[at] = self._checksum(tensor if row is None else tensor[row])
        except Exception as error:
            return theirs, f"the weights to verify could not be walked: {one_line(error, with_type=True)}"
        return theirs, ""

    def _checksum(self, tensor: Tensor) -> bytes:
        held = tensor.detach().to(self._balancer._runtime.device)
        return checksum([as_bytes(held.contiguous())])

    def _end(self, number: int) -> int:
        return self._first[number + 1] if number + 1 < len(self._first) else len(self._chunks)

    def _agree(self, problem: str) -> None:
        rebalancer, seconds = self._balancer._rebalancer, self._seconds
        problem = problem or self._tensors.moved() or self._tensors.problem()
        outcome = rebalancer.run(lambda: rebalancer.agreement.go_on("", False, seconds), seconds)
        found = outcome or rebalancer.run(lambda: first_problem(problem, self._balancer._runtime.groups.control))
        if found:
            raise ExportError(str(found))

    def _checksums(self) -> Checksums:
        """uint8 ``[chunks, 16]``: of the model's own, each made by one rank. Collective."""
        job, mine = self._balancer._runtime.job, []
        for chunk in self._chunks:
            if self._tensors.is_plain(chunk) and chunk.owner != job.rank:
                continue
            value = self._tensors.value(chunk)
            if value is not None and chunk.owner == job.rank:
                spec = self._tensors.items[chunk.item].spec
                mine.append(self._checksum(value.to(spec.dtype)))
        self._tensors.forget()
        rebalancer, control = self._balancer._rebalancer, self._balancer._runtime.groups.control
        of_ranks = rebalancer.run(lambda: gather_bytes(b"".join(mine), control))
        rows = {
            rank: iter(np.frombuffer(data, np.uint8).reshape(-1, CHECKSUM_BYTES))
            for rank, data in zip(job.ranks, of_ranks, strict=True)
        }
        ours = [next(rows[chunk.owner]) for chunk in self._chunks]
        return np.stack(ours) if ours else np.empty((0, CHECKSUM_BYTES), np.uint8)

    def _compared(self, theirs: Mapping[int, bytes], ours: Checksums) -> NDArray[np.uint8]:
        found = np.zeros(len(self._chunks), np.uint8)
        walked = self._by_local_index()
        for at, value in theirs.items():
            if value == ours[at].tobytes():
                found[at] = _EQUAL
            else:
                found[at] = _BY_LOCAL_INDEX if at in walked and value == ours[walked[at]].tobytes() else _DIFFERS
        return found

    def _by_local_index(self) -> dict[int, int]:
        """For each chunk of an expert, the chunk that a walk by local index exports under its name."""
        homes_LE = self._balancer.placement.homes_LRH.reshape(self._balancer.placement.num_layers, -1)
        number_of = {self._key(chunk): at for at, chunk in enumerate(self._chunks) if chunk.expert is not None}
        return {
            at: number_of[kind, layer, int(homes_LE[layer, expert])] for (kind, layer, expert), at in number_of.items()
        }

    def _key(self, chunk: Chunk) -> tuple[tuple[int, int, str], int, int]:
        """Kind of tensor within its expert, layer, and expert of a chunk."""
        item = self._tensors.items[chunk.item]
        assert item.layer is not None and chunk.expert is not None
        return (item.stage, item.weight, item.key), item.layer, chunk.expert

    def _said(self, found: NDArray[np.uint8]) -> str:
        differing: dict[int, set[int]] = defaultdict(set)
        missing: dict[int, set[int]] = defaultdict(set)
        others: list[str] = []
        for chunk, state in zip(self._chunks, found.tolist(), strict=True):
            item = self._tensors.items[chunk.item]
            if chunk.expert is None:
                others += [item.name] * (state > _EQUAL)
                continue
            assert item.layer is not None
            if state != _EQUAL:
                (differing if state else missing)[item.layer].add(chunk.expert)
        if differing or others:
            parts = [f"experts that are not the model's: {_listed(differing)}"] if differing else []
            parts += [f"tensors that are not the model's: {', '.join(others[:_MOST_NAMED])}"] if others else []
            wrong = found[found > _EQUAL]
            if differing and (wrong == _BY_LOCAL_INDEX).all():
                parts.append(
                    "each has the weights of the expert that is now where it was at launch, as a walk by local index "
                    "(ep_rank * E/R + i) exports them: take balancer.named_logical_tensors(), walk inside "
                    "balancer.logical_order(), or let the walk be followed (eplb_runtime.hosts.walks)"
                )
            raise ExportError(f"verify_export: {'; '.join(parts)}")
        if missing:
            raise ExportError(f"verify_export: experts that no rank has given: {_listed(missing)}")
        experts = {(self._tensors.items[c.item].layer, c.expert) for c in self._chunks if c.expert is not None}
        tensors = {chunk.item for chunk, state in zip(self._chunks, found.tolist(), strict=True) if state}
        return f"{len(tensors)} tensors are equal to the model's, among them those of all {len(experts)} experts"


def _listed(experts: Mapping[int, set[int]]) -> str:
    """``layer 0: 1, 2, 5; layer 1: all 8`` and so on."""
    layers = [
        f"layer {layer}: {', '.join(map(str, sorted(found)[:_MOST_NAMED]))}{_more(len(found))}"
        for layer, found in sorted(experts.items())
    ]
    rest = f"; and of {len(layers) - 4} more layers" if len(layers) > 4 else ""
    return "; ".join(layers[:4]) + rest


def _more(count: int) -> str:
    return f" and {count - _MOST_NAMED} more" if count > _MOST_NAMED else ""


def pairs_of(tensors: object) -> Iterable[tuple[str, Tensor]]:
    """Pairs of what a user gives to be verified: pairs, a mapping, or a function that returns either."""
    found = tensors() if callable(tensors) else tensors
    return found.items() if isinstance(found, Mapping) else found  # type: ignore[return-value]
