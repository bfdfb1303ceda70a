"""Exports of an attached model, for `Balancer`: streams of its weights, and comparisons with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..distributed.consensus import first_problem, maxima
from ..utils.checksums import as_bytes, checksum
from ..utils.errors import one_line
from .stream import BUCKET_BYTES, ExportError, LogicalTensors, Piece, TensorList
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
        """`Balancer.verify_export`: what is given is compared with a stream, by a checksum for each logical expert."""
        is_stream = isinstance(given, LogicalTensors)
        tensors = self._listed(dtype, f"{dtype}{', a stream' if is_stream else ''}", "")
        theirs, problem = _given(tensors, given)
        if problem and isinstance(given, LogicalTensors):
            given.close(problem)  # the caller holds it, and the others wait at its next bucket
        rebalancer, control = self._balancer._rebalancer, self._balancer._runtime.groups.control
        # A rank that takes longer to walk its weights is waited for here.
        outcome = rebalancer.run(lambda: rebalancer.agreement.go_on("", False, seconds), seconds)
        if found := outcome or rebalancer.run(lambda: first_problem(problem, control)):
            raise ExportError(str(found))
        pieces, numbers, ours = tensors.pieces, tensors.by_name(), dict[int, bytes]()
        for name, tensor in LogicalTensors(tensors, BUCKET_BYTES, None, seconds):
            ours.update(_checksums(pieces, numbers[name], tensor))
        experts = {own for number, own in ours.items() if pieces[number].expert is not None}
        states = torch.zeros(len(pieces), dtype=torch.uint8)
        for number, their in theirs.items():
            other = pieces[number].expert is not None and their in experts
            states[number] = _EQUAL if their == ours[number] else _ANOTHER if other else _DIFFERS
        return _said(pieces, rebalancer.run(lambda: maxima(states, control)).tolist())

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


def _checksums(pieces: Sequence[Piece], numbers: Sequence[int], tensor: Tensor) -> Iterator[tuple[int, bytes]]:
    """Yield the checksum of each piece of a tensor."""
    for number, part in zip(numbers, tensor if pieces[numbers[0]].rows else [tensor], strict=True):
        yield number, checksum([as_bytes(part.detach().contiguous())])


def _given(tensors: TensorList, given: object) -> tuple[dict[int, bytes], str]:
    """The checksums of what was given here, by the pieces' numbers; and what is wrong with it."""
    theirs: dict[int, bytes] = {}
    pieces, numbers, device = tensors.pieces, tensors.by_name(), tensors.balancer._runtime.device
    try:
        found: Any = given() if callable(given) else given
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if name not in numbers:
                some = next((known for known in numbers if known.rpartition(".")[2] in name), "")
                some = some or next(iter(numbers), "none")
                return theirs, f"verify_export was given {name}, and the model has no tensor of that name ({some})"
            spec = pieces[numbers[name][0]].whole
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                return theirs, (
                    f"verify_export was given {name} as {tensor.dtype} {list(tensor.shape)}; the model's is "
                    f"{spec.dtype} {list(spec.shape)} (dtype= says to which the export casts)"
                )
            theirs.update(_checksums(pieces, numbers[name], tensor.to(device)))
    except Exception as error:
        return theirs, f"the weights to verify could not be walked: {one_line(error, with_type=True)}"
    return theirs, ""


def _said(pieces: Sequence[Piece], states: Sequence[int]) -> str:
    """Return the line that all is equal; ExportError: it is not."""
    found = list(zip(pieces, states, strict=True))
    wrong = [piece for piece, state in found if state > _EQUAL and piece.expert is not None]
    others = [piece.name for piece, state in found if state > _EQUAL and piece.expert is None]
    if wrong or others:
        parts = [f"experts that are not the model's: {_listed(wrong)}"] if wrong else []
        parts += [f"tensors that are not the model's: {', '.join(others[:_MOST_NAMED])}"] if others else []
        if wrong and _DIFFERS not in states:
            parts.append(
                "each has the weights of another expert, as a walk by local index (ep_rank * E/R + i) exports them "
                "once experts have moved: take balancer.named_logical_tensors(), walk inside "
                "balancer.logical_order(), or let the walk be followed (launch/examples/rl_weights.py)"
            )
        raise ExportError(f"verify_export: {'; '.join(parts)}")
    if missing := [piece for piece, state in found if piece.expert is not None and not state]:
        raise ExportError(f"verify_export: experts that no rank has given: {_listed(missing)}")
    equal = {piece.name for piece, state in found if state}
    experts = {(piece.layer, piece.expert) for piece in pieces if piece.expert is not None}
    return f"{len(equal)} tensors are equal to the model's, among them those of all {len(experts)} experts"


def _listed(pieces: Sequence[Piece]) -> str:
    """Name layers and experts."""
    found: dict[Any, set[Any]] = defaultdict(set)
    for piece in pieces:
        found[piece.layer].add(piece.expert)
    parts = []
    for layer, experts in sorted(found.items())[:4]:
        more = f" and {len(experts) - _MOST_NAMED} more" if len(experts) > _MOST_NAMED else ""
        parts.append(f"layer {layer}: {', '.join(map(str, sorted(experts)[:_MOST_NAMED]))}{more}")
    return "; ".join(parts) + (f"; and of {len(found) - 4} more layers" if len(found) > 4 else "")
