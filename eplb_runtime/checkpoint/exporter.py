"""Exports of an attached model, for `Balancer`: streams of its weights, and comparisons with them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
        piece_of, ours = tensors.tensors, dict[_Part, bytes]()
        for name, tensor in LogicalTensors(tensors, BUCKET_BYTES, None, seconds):
            ours.update(_checksums(piece_of[name], tensor))
        experts = {value for part, value in ours.items() if part.expert is not None}
        states = torch.zeros(len(ours), dtype=torch.uint8)
        for number, (part, own) in enumerate(ours.items()):
            if part in theirs:
                other = part.expert is not None and theirs[part] in experts
                states[number] = _EQUAL if theirs[part] == own else _ANOTHER if other else _DIFFERS
        largest = rebalancer.run(lambda: maxima(states, control)).tolist()
        return _said(dict(zip(ours, largest, strict=True)))

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


class _Part(NamedTuple):
    """What is compared: a tensor, or an expert's row of one."""

    name: str
    layer: int | None
    expert: int | None


def _checksums(piece: Piece, tensor: Tensor) -> Iterator[tuple[_Part, bytes]]:
    parts = enumerate(tensor) if piece.rows else [(piece.expert, tensor)]
    for expert, part in parts:
        yield _Part(piece.name, piece.layer, expert), checksum([as_bytes(part.detach().contiguous())])


def _given(tensors: TensorList, given: object) -> tuple[dict[_Part, bytes], str]:
    """The checksums of what was given here; and what is wrong with it."""
    theirs: dict[_Part, bytes] = {}
    pieces, device = tensors.tensors, tensors.balancer._runtime.device
    try:
        found: Any = given() if callable(given) else given
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if (piece := pieces.get(name)) is None:
                some = next((known for known in pieces if known.rpartition(".")[2] in name), "")
                some = some or next(iter(pieces), "none")
                return theirs, f"verify_export was given {name}, and the model has no tensor of that name ({some})"
            spec = piece.whole
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                return theirs, (
                    f"verify_export was given {name} as {tensor.dtype} {list(tensor.shape)}; the model's is "
                    f"{spec.dtype} {list(spec.shape)} (dtype= says to which the export casts)"
                )
            theirs.update(_checksums(piece, tensor.to(device)))
    except Exception as error:
        return theirs, f"the weights to verify could not be walked: {one_line(error, with_type=True)}"
    return theirs, ""


def _said(states: Mapping[_Part, int]) -> str:
    differing: dict[int, set[int]] = defaultdict(set)
    missing: dict[int, set[int]] = defaultdict(set)
    others = [part.name for part, state in states.items() if part.expert is None and state > _EQUAL]
    for part, state in states.items():
        if part.layer is not None and part.expert is not None and state != _EQUAL:
            (differing if state else missing)[part.layer].add(part.expert)
    if differing or others:
        parts = [f"experts that are not the model's: {_listed(differing)}"] if differing else []
        parts += [f"tensors that are not the model's: {', '.join(others[:_MOST_NAMED])}"] if others else []
        if differing and _DIFFERS not in states.values():
            parts.append(
                "each has the weights of another expert, as a walk by local index (ep_rank * E/R + i) exports them "
                "once experts have moved: take balancer.named_logical_tensors(), walk inside "
                "balancer.logical_order(), or let the walk be followed (launch/examples/rl_weights.py)"
            )
        raise ExportError(f"verify_export: {'; '.join(parts)}")
    if missing:
        raise ExportError(f"verify_export: experts that no rank has given: {_listed(missing)}")
    experts = {(part.layer, part.expert) for part in states if part.expert is not None}
    equal = {part.name for part, state in states.items() if state}
    return f"{len(equal)} tensors are equal to the model's, among them those of all {len(experts)} experts"


def _listed(experts: Mapping[int, set[int]]) -> str:
    parts = []
    for layer, found in sorted(experts.items())[:4]:
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        parts.append(f"layer {layer}: {', '.join(map(str, sorted(found)[:_MOST_NAMED]))}{more}")
    return "; ".join(parts) + (f"; and of {len(experts) - 4} more layers" if len(experts) > 4 else "")
