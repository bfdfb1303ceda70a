"""Exports of an attached model, for `Balancer`: streams of its weights, and comparisons with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.consensus import first_problem, gather_bytes, maxima
from ..utils.checksums import CHECKSUM_BYTES, as_bytes, checksum
from ..utils.errors import one_line
from .stream import Chunk, ExportError, LogicalTensors, TensorList
from .weights import Weight

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

Weights = Callable[[], Sequence[Weight]]

_EQUAL, _ANOTHER, _DIFFERS = 1, 2, 3
"""State of a chunk that was given, of which the largest over ranks counts: as in the model, as another expert there,
as neither. 0: it was not given."""
_MOST_NAMED = 8


class Exporter:
    """The exports of one balancer. Both methods are collective, between steps.

    Args:
        weights_of_stages: lists the tensors of each pipeline stage of this rank, as they are now.
    """

    def __init__(self, balancer: Balancer, weights_of_stages: Mapping[int, Weights]) -> None:
        self._balancer = balancer
        self._weights_of_stages = weights_of_stages

    def stream(self, bucket_bytes: int, dtype: torch.dtype | None, rank: int | None, seconds: float) -> LogicalTensors:
        """`Balancer.named_logical_tensors`."""
        ranks, problem = self._balancer._runtime.job.ranks, ""
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            problem = f"bucket_bytes is {bucket_bytes!r}: give a whole number of bytes from 1 on"
        if rank is not None and rank not in ranks:
            problem = f"rank is {rank!r}: give a rank of the job ({ranks[0]} to {ranks[-1]}), or None for all"
        tensors = self._listed(dtype, repr((bucket_bytes, dtype, rank, seconds)), problem)
        return LogicalTensors(tensors, bucket_bytes, rank, seconds)

    @torch.no_grad()
    def verify(self, given: object, dtype: torch.dtype | None, seconds: float) -> str:
        """`Balancer.verify_export`: a checksum for each logical expert, wherever it is."""
        is_stream = isinstance(given, LogicalTensors)
        tensors = self._listed(dtype, f"{dtype}{', a stream' if is_stream else ''}", "")
        chunks = [chunk for number in range(len(tensors.items)) for chunk in tensors.chunks_of(number)]
        theirs, problem = _given(tensors, chunks, given)
        if problem and isinstance(given, LogicalTensors):
            given.close(problem)  # the caller holds it, and the others wait at its next bucket
        rebalancer, control = self._balancer._rebalancer, self._balancer._runtime.groups.control
        problem = problem or tensors.moved() or tensors.problem()
        # A rank that takes longer to walk its weights is waited for here.
        outcome = rebalancer.run(lambda: rebalancer.agreement.go_on("", False, seconds), seconds)
        if found := outcome or rebalancer.run(lambda: first_problem(problem, control)):
            raise ExportError(str(found))
        mine = b"".join(self._own(tensors, chunks))
        of_ranks = rebalancer.run(lambda: gather_bytes(mine, control))
        ours = _in_order(tensors, chunks, of_ranks)
        experts = {value for chunk, value in zip(chunks, ours, strict=True) if chunk.expert is not None}
        states = torch.zeros(len(chunks), dtype=torch.uint8)
        for number, value in theirs.items():
            other = chunks[number].expert is not None and value in experts
            states[number] = _EQUAL if value == ours[number] else _ANOTHER if other else _DIFFERS
        return _said(tensors, chunks, rebalancer.run(lambda: maxima(states, control)).tolist())

    def _own(self, tensors: TensorList, chunks: Sequence[Chunk]) -> Iterable[bytes]:
        """Checksums of the chunks that this rank gives. Collective where ranks make them together."""
        for chunk in chunks:
            value = (
                None if tensors.is_plain(chunk) and _giver(tensors, chunk) != tensors.job.rank else tensors.value(chunk)
            )
            if value is not None and _giver(tensors, chunk) == tensors.job.rank:
                yield _checksum(tensors, value.to(tensors.items[chunk.item].spec.dtype))
        tensors.forget()

    def _listed(self, dtype: torch.dtype | None, options: str, problem: str) -> TensorList:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            problem, dtype = f"dtype is {dtype!r}: give one of floating point, or None", None
        tensors = TensorList(self._balancer, {}, dtype)
        try:
            problem = problem or self._balancer._why_freed()  # first: a list of empty weights may fail in other words
            weights = {stage: listed() for stage, listed in self._weights_of_stages.items()}
            tensors = TensorList(self._balancer, weights, dtype)
        except Exception as error:
            problem = problem or one_line(error, with_type=True)
        if found := self._balancer._rebalancer.run(lambda: tensors.agree(options, problem)):
            raise ExportError(f"weights cannot be exported: {found}")
        return tensors


# -- comparing what was exported ---------------------------------------------------------------------------------------


def _given(tensors: TensorList, chunks: Sequence[Chunk], given: object) -> tuple[dict[int, bytes], str]:
    """The checksum of each chunk that was given here, by its number; and what is wrong with it."""
    theirs: dict[int, bytes] = {}
    item_of = {item.name: number for number, item in enumerate(tensors.items)}
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, chunk in enumerate(chunks):
        numbers[chunk.item].append(number)
    try:
        found: Any = given() if callable(given) else given
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if (item := item_of.get(name)) is None:
                some = next((known for known in item_of if known.rpartition(".")[2] in name), "")
                some = some or next(iter(item_of), "none")
                return theirs, f"verify_export was given {name}, and the model has no tensor of that name ({some})"
            spec = tensors.items[item].spec
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                return theirs, (
                    f"verify_export was given {name} as {tensor.dtype} {list(tensor.shape)}; the model's is "
                    f"{spec.dtype} {list(spec.shape)} (dtype= says to which the export casts)"
                )
            for number in numbers[item]:
                row = chunks[number].row
                theirs[number] = _checksum(tensors, tensor if row is None else tensor[row])
    except Exception as error:
        return theirs, f"the weights to verify could not be walked: {one_line(error, with_type=True)}"
    return theirs, ""


def _checksum(tensors: TensorList, tensor: Tensor) -> bytes:
    return checksum([as_bytes(tensor.detach().to(tensors.balancer._runtime.device).contiguous())])


def _giver(tensors: TensorList, chunk: Chunk) -> int:
    """The rank that makes the checksum of a chunk."""
    return chunk.owner if chunk.owner is not None else tensors.job.ranks[chunk.item % len(tensors.job.ranks)]


def _in_order(tensors: TensorList, chunks: Sequence[Chunk], of_ranks: Sequence[bytes]) -> list[bytes]:
    """The checksum of each chunk, from those of the ranks."""
    at = dict.fromkeys(tensors.job.ranks, 0)
    of_rank = dict(zip(tensors.job.ranks, of_ranks, strict=True))
    ours = []
    for chunk in chunks:
        rank = _giver(tensors, chunk)
        ours.append(of_rank[rank][at[rank] : at[rank] + CHECKSUM_BYTES])
        at[rank] += CHECKSUM_BYTES
    return ours


def _said(tensors: TensorList, chunks: Sequence[Chunk], states: Sequence[int]) -> str:
    differing: dict[int, set[int]] = defaultdict(set)
    missing: dict[int, set[int]] = defaultdict(set)
    others: list[str] = []
    for chunk, state in zip(chunks, states, strict=True):
        item = tensors.items[chunk.item]
        if chunk.expert is None or item.layer is None:
            others += [item.name] * (state > _EQUAL)
        elif state != _EQUAL:
            (differing if state else missing)[item.layer].add(chunk.expert)
    if differing or others:
        parts = [f"experts that are not the model's: {_listed(differing)}"] if differing else []
        parts += [f"tensors that are not the model's: {', '.join(others[:_MOST_NAMED])}"] if others else []
        if differing and _DIFFERS not in states:
            parts.append(
                "each has the weights of another expert, as a walk by local index (ep_rank * E/R + i) exports them "
                "once experts have moved: take balancer.named_logical_tensors(), walk inside "
                "balancer.logical_order(), or let the walk be followed (eplb_runtime.hosts.walks)"
            )
        raise ExportError(f"verify_export: {'; '.join(parts)}")
    if missing:
        raise ExportError(f"verify_export: experts that no rank has given: {_listed(missing)}")
    experts = {(tensors.items[chunk.item].layer, chunk.expert) for chunk in chunks if chunk.expert is not None}
    equal = {chunk.item for chunk, state in zip(chunks, states, strict=True) if state}
    return f"{len(equal)} tensors are equal to the model's, among them those of all {len(experts)} experts"


def _listed(experts: Mapping[int, set[int]]) -> str:
    """``layer 0: 1, 2, 5; layer 1: 0 and 12 more`` and so on."""
    parts = []
    for layer, found in sorted(experts.items())[:4]:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        parts.append(f"layer {layer}: {', '.join(map(str, sorted(found)[:_MOST_NAMED]))}{more}")
    return "; ".join(parts) + (f"; and of {len(experts) - 4} more layers" if len(experts) > 4 else "")
