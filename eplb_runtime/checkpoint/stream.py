"""A model's tensors as a stream in logical order, a bucket at a time: how weights leave for an engine or a folder.

Hosts list the tensors of a model with what each becomes (`Weight`). Every rank makes the same list of pieces of it and
cuts that into the same buckets. Each bucket has two halves. First every rank takes the memory that it needs and fills
in what it has; then all agree to go on. Only then data travel, so a rank that has stopped or failed is known to the
others before they wait for its data.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..balancer.loop_state import TensorStream
from ..distributed.consensus import all_equal, first_problem, gather_bytes, maxima
from ..moe.experts.slices import has_memory, whole_row
from ..utils.checksums import as_bytes, checksum
from ..utils.text import one_line
from .state import Entry, JointAccess, LogicalView, Stored, TensorSpec, value_of

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

NamedTensor = tuple[str, Tensor]
BUCKET_BYTES = 1 << 26
"""Of a bucket, where no consumer says how much it takes."""
_EQUAL, _ANOTHER, _DIFFERS = 1, 2, 3
"""State of a piece that was given, of which the largest over ranks counts: as in the model, as another expert there,
as neither. 0: it was not given."""
_MOST_NAMED = 8


class ExportError(RuntimeError):
    """Weights that could not be exported, or are not the model's; one line, the same on every rank."""


@dataclass(frozen=True)
class Weight:
    """Tensors of a model that become tensors of its checkpoint together, and independent of all others.

    Args:
        sources: the live tensors, by name in the model. Of experts: this rank's rows ``[E/R, ...]``, or a tensor for
            each of its home slots.
        layer: the MoE layer, over the whole model, whose experts the rows are; None: of none.
        made: what becomes of the sources, whole, by name and in order.
        by: how the one source is cut, each expert by itself: a part without ``*`` in its name is a row of a tensor
            whose rows are the experts. Or what makes tensors by name from all sources, whole.
        shared: other pipeline stages may have the same tensors under the same names.
    """

    sources: Mapping[str, Tensor | tuple[Tensor, ...]]
    layer: int | None
    made: Mapping[str, TensorSpec]
    by: Stored | Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
    shared: bool = False

    @property
    def memory(self) -> list[Tensor]:
        """The live tensors one by one."""
        every = self.sources.values()
        return [part for source in every for part in (source if isinstance(source, tuple) else (source,))]


def as_named(view: LogicalView, entry: Entry) -> Weight:
    """A tensor under its own name, experts stacked."""
    stored = Stored((entry.name,), 0 if entry.layer is None else view.num_experts)
    return Weight({entry.name: entry.tensor}, entry.layer, {entry.name: view.spec_of(entry)}, stored)


def weights_of(model: nn.Module, first_layer: int) -> list[Weight]:
    """Tensors of a model under its own names, experts stacked ``[E, ...]``, as `logical_state_dict` has them;
    ``first_layer``: number of its first MoE layer over the whole model, which its balancer knows as well."""
    view = LogicalView(model)
    return [as_named(view, entry) for entry in view.entries("model")]


# -- pieces, and which rank has them -----------------------------------------------------------------------------------


WeightsOfStages = Mapping[int, Sequence[Weight]]


@dataclass(frozen=True)
class Piece:
    """One tensor of the stream, or one row of a tensor whose rows are the experts of a layer.

    Args:
        name: of the tensor, as the checkpoint has it.
        spec: as it leaves; of a row ``[1, ...]``.
        stage: pipeline stage that has it.
        weight: number of its `Weight` among those of the stage.
        layer: MoE layer of the whole model; None: of none.
        expert: the logical expert; None: of none, or all of a layer together.
        rows: of the tensor whose row ``expert`` it is; 0: it is a tensor.
        joint: made by several ranks together: those that hold the expert, or all of the stage.
        shared: as of `Weight`.
    """

    name: str
    spec: TensorSpec
    stage: int
    weight: int
    layer: int | None
    expert: int | None
    rows: int
    joint: bool
    shared: bool

    @property
    def whole(self) -> TensorSpec:
        """Of the tensor."""
        return replace(self.spec, shape=(self.rows, *self.spec.shape[1:])) if self.rows else self.spec


class TensorList:
    """All tensors of the model in pieces, which rank has what of them, and their values on this rank.

    Args:
        weights: of each pipeline stage of this rank.
        dtype: of tensors of floating point, as they leave; None: as they are.
        live: what is here whole leaves in live memory, and is not copied.
    """

    def __init__(
        self, balancer: Balancer, weights: WeightsOfStages, dtype: torch.dtype | None = None, live: bool = False
    ) -> None:
        self.balancer, self.job = balancer, balancer.runtime.job
        self._weights, self._dtype, self._live = weights, dtype, live
        self._last: tuple[Any, Mapping[str, Tensor]] = (None, {})
        self._placement = balancer.placement
        self.num_experts = self._placement.num_experts
        # int64 [L, E]: where each logical expert is among the rows of all ranks that have each row once.
        homes_LE = self._placement.homes_LRH.reshape(self._placement.num_layers, -1)
        self._places = np.argsort(homes_LE, axis=1, kind="stable")
        self._row_sets = {  # for each stage, the sets of ranks that have each of its rows once
            stage: [ranks for ranks in self.job.row_sets if ranks[0] in holders]
            for held, holders in zip(self.job.stage_sets, self.job.dp_groups, strict=True)
            for stage in held
        }
        # Each EDP rank has a slice of each expert.
        sliced = balancer.tensors.sliced and not self.job.divided_rows and len(self.job.edp_ranks) > 1
        self.pieces = [piece for stage, listed in weights.items() for piece in self._pieces_of(stage, listed, sliced)]

    def _pieces_of(self, stage: int, weights: Sequence[Weight], sliced: bool) -> Iterator[Piece]:
        for number, weight in enumerate(weights):
            layer = weight.layer
            if not isinstance(weight.by, Stored) or not weight.by.experts:
                joint = layer is not None or any(isinstance(part, DTensor) for part in weight.memory)
                for name, spec in weight.made.items():
                    yield Piece(name, self._cast(spec), stage, number, layer, None, 0, joint, weight.shared)
                continue
            for expert in range(self.num_experts):
                for name in weight.by.names_of(expert):
                    spec, rows = self._cast(weight.made[name]), 0
                    if name in weight.by.names:
                        spec, rows = replace(spec, shape=(1, *spec.shape[1:])), spec.shape[0]
                    yield Piece(name, spec, stage, number, layer, expert, rows, sliced, False)

    def _cast(self, spec: TensorSpec) -> TensorSpec:
        return replace(spec, dtype=self._dtype) if self._dtype is not None and spec.dtype.is_floating_point else spec

    def by_name(self) -> dict[str, list[int]]:
        """Return the numbers of each tensor's pieces."""
        found: dict[str, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            found.setdefault(piece.name, []).append(number)
        return found

    def problem(self) -> str:
        """Return why tensors of this rank cannot be read now; empty: they can."""
        if freed := self.balancer.tensors.memory.why_freed():
            return freed
        every = (one for weights in self._weights.values() for one in weights)
        names = (next(iter(one.made)) for one in every if not all(map(has_memory, one.memory)))
        return next((f"the memory of {name} is freed, as jobs do between phases: load it first" for name in names), "")

    def moved(self) -> str:
        """Return that experts have moved since this list was made; empty: they have not."""
        same = self.balancer.rebalancer.epoch_on_this_rank == self._placement.epoch
        return "" if same else "experts have moved since the export began: begin it again"

    def agree(self, options: str, problem: str, control: dist.ProcessGroup) -> str:
        """Learn the pieces of all stages. Collective on the control group. Returns, on all ranks, the first problem of
        a rank, that options differ, or that ranks of a stage have other tensors; empty: there is nothing of that."""
        sets = self.job.dp_groups
        if found := first_problem(problem or self.problem(), control):
            return found
        if odd := all_equal(xxhash.xxh3_128(options.encode()).digest(), "choice of options", control):
            return odd
        text = json.dumps([asdict(piece) for piece in self.pieces], default=str).encode()
        if odd := all_equal(xxhash.xxh3_128(text).digest(), "list of tensors", control, sets):
            return odd
        if len(sets) > 1:
            first = self.job.rank in [ranks[0] for ranks in sets]
            said = [json.loads(text) for text in gather_bytes(text if first else b"", control) if text]
            pieces = [Piece(**{**fields, "spec": _spec(**fields["spec"])}) for one in said for fields in one]
            self.pieces = sorted(pieces, key=lambda piece: piece.stage)
        first_of = {name: self.pieces[numbers[0]] for name, numbers in self.by_name().items()}
        for piece in self.pieces:
            known = first_of[piece.name]
            if known.stage != piece.stage and not (known.shared and piece.shared and known.spec == piece.spec):
                return (
                    f"pipeline stages {known.stage} and {piece.stage} have a {piece.name} each: give modules of "
                    "stages names over the whole model"
                )
        self.pieces = [piece for piece in self.pieces if piece.stage == first_of[piece.name].stage]
        return ""

    def owner_of(self, number: int, to: int | None = None) -> int | None:
        """Return the rank that gives a piece to all or to one rank; None: all have it, so nothing travels."""
        piece, sets = self.pieces[number], self._row_sets[self.pieces[number].stage]
        if piece.layer is not None and piece.expert is not None:
            ranks = sets[(piece.layer + piece.expert) % len(sets)]
            return ranks[int(self._places[piece.layer, piece.expert]) // (self.num_experts // len(ranks))]
        holders = sorted(rank for together in sets for rank in together)
        if to is None and len(holders) == len(self.job.ranks):
            return None
        return to if to in holders else holders[number % len(holders)]

    def value(self, piece: Piece, owner: int | None) -> Tensor | None:
        """Return a piece on its owner, in live memory where that is whole; else None. A joint piece is collective over
        the ranks that make it; others return at once."""
        mine = owner in (None, self.job.rank)
        ours = piece.joint and (piece.expert is None or owner in self.job.edp_ranks)
        if piece.stage not in self._weights or not (mine or ours):
            return None
        weight = self._weights[piece.stage][piece.weight]
        what = (piece.stage, piece.weight, piece.expert)
        if self._last[0] != what:  # the rest of what a conversion gives is held for the pieces that follow
            self.forget()
            with torch.no_grad():
                values = {name: self._source(weight, one, piece.expert) for name, one in weight.sources.items()}
                if isinstance(weight.by, Stored):
                    (value,) = values.values()
                    self._last = what, dict(weight.by.cut(value, piece.expert or 0))
                else:
                    self._last = what, weight.by(values)
        return self._last[1][piece.name].reshape(piece.spec.shape) if mine else None

    def _source(self, weight: Weight, source: Tensor | tuple[Tensor, ...], expert: int | None) -> Tensor:
        """A live tensor of a weight, whole; or its row of one expert."""
        if expert is None:
            assert isinstance(source, Tensor)
            return value_of(source) if weight.layer is None else self.balancer.gather_experts(weight.layer, source)
        row = int(self._places[weight.layer, expert]) % (self.num_experts // len(self.job.row_ranks))
        if isinstance(source, tuple):
            return source[row].detach()
        return whole_row(source, row, self.balancer.runtime.groups)[0]

    def forget(self) -> None:
        """Let go of what was made last."""
        self._last = (None, {})

    # -- a bucket, given by the numbers of its pieces, for one rank (None: for all) --

    def begin(self, numbers: Sequence[int], rank: int | None) -> dict[int, Tensor]:
        """Take the memory of what arrives, and read the pieces that this rank makes alone; returns both."""
        parts: dict[int, Tensor] = {}
        for number in numbers if rank in (None, self.job.rank) else ():
            if self.owner_of(number, rank) not in (None, self.job.rank):
                spec, device = self.pieces[number].spec, self.balancer.runtime.device
                parts[number] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        self._read(numbers, rank, parts, joint=False)
        return parts

    def end(self, numbers: Sequence[int], rank: int | None, parts: dict[int, Tensor]) -> list[tuple[Piece, Tensor]]:
        """Make the pieces that ranks make together, and send each to the ranks that need it. Collective. Returns what
        this rank has of the bucket, and empties ``parts``."""
        self._read(numbers, rank, parts, joint=True)
        group, here = self.balancer.runtime.groups.everyone, self.job.rank
        works: list[Any] = []
        messages: list[dist.P2POp] = []
        for number in numbers:
            owner = self.owner_of(number, rank)
            if rank is None and owner is not None:
                works.append(dist.broadcast(as_bytes(parts[number]), owner, group=group, async_op=True))
            elif owner != rank and here in (owner, rank):
                send, peer = (dist.isend, rank) if owner == here else (dist.irecv, owner)
                messages.append(dist.P2POp(send, as_bytes(parts[number]), peer, group))
        for work in works or (dist.batch_isend_irecv(messages) if messages else ()):
            work.wait()
        arrived = [(self.pieces[number], parts[number]) for number in numbers] if rank in (None, here) else []
        parts.clear()
        return arrived

    def _read(self, numbers: Sequence[int], rank: int | None, parts: dict[int, Tensor], joint: bool) -> None:
        for number in numbers:
            piece = self.pieces[number]
            if piece.joint == joint and (value := self.value(piece, self.owner_of(number, rank))) is not None:
                copied = not self._live and rank in (None, self.job.rank)
                parts[number] = value.to(piece.spec.dtype, copy=copied).contiguous()
        self.forget()


def _spec(shape: Sequence[int], dtype: str) -> TensorSpec:
    return TensorSpec(tuple(shape), getattr(torch, dtype.removeprefix("torch.")))


def _cut(pieces: Sequence[Piece], bucket_bytes: int) -> list[range]:
    """Return the numbers of neighbours that fit into a bucket together."""
    cuts: list[range] = []
    first = total = 0
    for number, piece in enumerate(pieces):
        if number > first and total + piece.spec.nbytes > bucket_bytes:
            cuts.append(range(first, number))
            first, total = number, 0
        total += piece.spec.nbytes
    return [*cuts, range(first, len(pieces))] if pieces else cuts


def _assembled(
    parts: list[tuple[Piece, Tensor]], stacks: dict[str, Tensor], device: torch.device | None = None
) -> Iterator[NamedTensor]:
    """Yield the tensors of a bucket, and hold none. Rows are put together in ``stacks``, over several buckets, on a
    device (None: where they are)."""
    while parts:
        piece, tensor = parts.pop(0)
        if piece.rows and piece.expert is not None:
            if piece.expert == 0:
                stacks[piece.name] = torch.empty(piece.whole.shape, dtype=tensor.dtype, device=device or tensor.device)
            stacks[piece.name][piece.expert] = tensor[0]
            if piece.expert < piece.rows - 1:
                continue
            tensor = stacks.pop(piece.name)
        yield piece.name, tensor
        del tensor


def brought(tensors: TensorList, joint: JointAccess, what: str) -> Iterator[NamedTensor]:
    """Yield all tensors on the first rank, where experts are stacked on the host, and none elsewhere. Collective; all
    ranks go through to the end, or raise with the one that fails, as `JointAccess.together` does."""
    stacks: dict[str, Tensor] = {}
    first = joint.ranks[0]
    for numbers in _cut(tensors.pieces, BUCKET_BYTES):
        parts = joint.together(what, partial(tensors.begin, numbers, first))
        yield from _assembled(tensors.end(numbers, first, parts), stacks, torch.device("cpu"))


# -- the stream --------------------------------------------------------------------------------------------------------


class LogicalTensors(TensorStream):
    """The stream of `Balancer.named_logical_tensors`.

    Args:
        bucket_bytes: of tensors that travel together; a larger tensor is a bucket of its own.
        rank: of the job, which alone receives; None: all do.
        seconds: that ranks wait for each other between buckets.
    """

    def __init__(self, tensors: TensorList, bucket_bytes: int, rank: int | None, seconds: float) -> None:
        self._tensors, self._rank, self._seconds = tensors, rank, seconds
        self._cuts = _cut(tensors.pieces, bucket_bytes)
        self._stacks: dict[str, Tensor] = {}
        self._next, self._open, self._refusal = 0, True, ""
        self._running: Iterator[NamedTensor] = iter(())
        self.num_experts = tensors.num_experts
        self.experts = {
            piece.name: (piece.layer, None if piece.rows else piece.expert)
            for piece in tensors.pieces
            if piece.layer is not None
        }

    def __next__(self) -> NamedTensor:
        while self._open:
            if (found := next(self._running, None)) is not None:
                return found
            if self._next == len(self._cuts):
                self._end()
            else:
                self._running = self._bring(self._cuts[self._next])
        if self._refusal:
            raise ExportError(self._refusal)
        raise StopIteration

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def close(self, reason: str = "") -> None:
        """`TensorStream.close`."""
        if not self._open:
            return
        self._end()
        if reason:
            self._refusal = (
                f"this stream of weights has ended: {reason}; begin a new one (a function begins it in time for "
                "verify_export: lambda: balancer.named_logical_tensors())"
            )
        if self._next < len(self._cuts):
            seconds, control = self._seconds, self._tensors.balancer.rebalancer.control
            control.broadcast_notice(lambda agreement: agreement.go_on(reason, True, seconds))

    def _end(self) -> None:
        self._open, self._running = False, iter(())
        self._tensors.forget()

    @torch.no_grad()
    def _bring(self, numbers: Sequence[int]) -> Iterator[NamedTensor]:
        """Fill a bucket, or raise what a rank has that stopped, failed or has not come. Collective."""
        tensors, parts = self._tensors, dict[int, Tensor]()
        problem = tensors.moved() or tensors.problem()
        if not problem:
            try:
                parts = tensors.begin(numbers, self._rank)
            except Exception as error:
                problem = one_line(error, with_type=True)
        where, seconds = f"bucket {self._next + 1} of {len(self._cuts)}", self._seconds
        try:
            outcome = tensors.balancer.rebalancer.run(lambda _, all_: all_.go_on(problem, False, seconds), seconds)
        except RuntimeError as error:
            self._end()
            raise ExportError(
                f"weights were not exported past {where}: a rank did not come within {seconds:g} s, or is lost "
                f"({one_line(error)}); where a consumer needs longer for a bucket, give timeout_seconds"
            ) from error
        if outcome:
            self._end()
            raise ExportError(f"weights were not exported past {where}: {outcome}")
        self._next += 1
        arrived = tensors.end(numbers, self._rank, parts)
        return _assembled(arrived, self._stacks)  # without a reference to the stream


# -- exports of a balancer -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exporter:
    """The exports of one balancer. Both methods are collective, between steps.

    Args:
        weights_of_stages: lists the tensors of each pipeline stage of this rank, as they are now.
    """

    balancer: Balancer
    weights_of_stages: Mapping[int, Callable[[], Sequence[Weight]]]

    def stream(self, bucket_bytes: int, dtype: torch.dtype | None, rank: int | None, seconds: float) -> LogicalTensors:
        """`Balancer.named_logical_tensors`."""
        ranks, problem = self.balancer.runtime.job.ranks, ""
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
        run = self.balancer.rebalancer.run
        # A rank that takes longer to walk its weights is waited for here.
        outcome = run(lambda _, agreement: agreement.go_on("", False, seconds), seconds)
        if found := outcome or run(lambda group, _: first_problem(problem, group)):
            raise ExportError(found)
        pieces, numbers, ours = tensors.pieces, tensors.by_name(), dict[int, bytes]()
        for name, tensor in LogicalTensors(tensors, BUCKET_BYTES, None, seconds):
            ours.update(_checksums(pieces, numbers[name], tensor))
        experts = {own for number, own in ours.items() if pieces[number].expert is not None}
        states = torch.zeros(len(pieces), dtype=torch.uint8)
        for number, their in theirs.items():
            other = pieces[number].expert is not None and their in experts
            states[number] = _EQUAL if their == ours[number] else _ANOTHER if other else _DIFFERS
        return _said(pieces, run(lambda group, _: maxima(states, group)).tolist())

    def _listed(self, dtype: torch.dtype | None, options: str, problem: str) -> TensorList:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            problem, dtype = f"dtype is {dtype!r}: give one of floating point, or None", None
        tensors = TensorList(self.balancer, {}, dtype)
        try:
            problem = problem or self.balancer.tensors.memory.why_freed()  # a list of empty weights fails otherwise
            weights = {stage: listed() for stage, listed in self.weights_of_stages.items()}
            tensors = TensorList(self.balancer, weights, dtype)
        except Exception as error:
            problem = problem or one_line(error, with_type=True)
        if found := self.balancer.rebalancer.run(lambda group, _: tensors.agree(options, problem, group)):
            raise ExportError(f"weights cannot be exported: {found}")
        return tensors


def _checksums(pieces: Sequence[Piece], numbers: Sequence[int], tensor: Tensor) -> Iterator[tuple[int, bytes]]:
    """Yield the checksum of each piece of a tensor."""
    for number, part in zip(numbers, tensor if pieces[numbers[0]].rows else [tensor], strict=True):
        yield number, checksum([as_bytes(part.detach().contiguous())])


def _given(tensors: TensorList, given: object) -> tuple[dict[int, bytes], str]:
    """The checksums of what was given here, by the pieces' numbers; and what is wrong with it."""
    theirs: dict[int, bytes] = {}
    pieces, numbers, device = tensors.pieces, tensors.by_name(), tensors.balancer.runtime.device
    try:
        found: Any = given() if callable(given) else given
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if name not in numbers:
                some = next((known for known in numbers if known.rpartition(".")[2] in name), "none alike")
                return theirs, f"verify_export was given {name}, and the model has no tensor of that name ({some})"
            spec = pieces[numbers[name][0]].whole
            if TensorSpec(tuple(tensor.shape), tensor.dtype) != spec:
                return theirs, (
                    f"verify_export was given {name} as {tensor.dtype} {list(tensor.shape)}; the model's is "
                    f"{spec.dtype} {list(spec.shape)} (dtype= says to which the export casts)"
                )
            theirs.update(_checksums(pieces, numbers[name], tensor.to(device)))
    except Exception as error:
        return theirs, f"the weights to verify could not be read: {one_line(error, with_type=True)}"
    return theirs, ""


def _said(pieces: Sequence[Piece], states: Sequence[int]) -> str:
    """Return the line that all is equal; ExportError: it is not."""
    found = list(zip(pieces, states, strict=True))
    wrong = [piece for piece, state in found if state > _EQUAL and piece.expert is not None]
    others = [piece.name for piece, state in found if state > _EQUAL and piece.expert is None]
    if wrong or others:
        parts = [f"experts that are not the model's: {_named(wrong)}"] if wrong else []
        parts += [f"tensors that are not the model's: {_first(others)}"] if others else []
        if wrong and _DIFFERS not in states:
            parts.append(
                "each has the weights of another expert, as a walk by local index (ep_rank * E/R + i) exports them "
                "once experts have moved: take balancer.named_logical_tensors(), walk inside "
                "balancer.logical_order(), or let the walk be followed (launch/examples/rl_weights.py)"
            )
        raise ExportError(f"verify_export: {'; '.join(parts)}")
    if missing := [piece for piece, state in found if piece.expert is not None and not state]:
        raise ExportError(f"verify_export: experts that no rank has given: {_named(missing)}")
    equal = {piece.name for piece, state in found if state}
    experts = {(piece.layer, piece.expert) for piece in pieces if piece.expert is not None}
    return f"{len(equal)} tensors are equal to the model's, among them those of all {len(experts)} experts"


def _named(pieces: Sequence[Piece]) -> str:
    """Layers and experts of pieces, as a message has them."""
    found: dict[Any, set[Any]] = defaultdict(set)
    for piece in pieces:
        found[piece.layer].add(piece.expert)
    parts = [f"layer {layer}: {_first(sorted(experts))}" for layer, experts in sorted(found.items())]
    return "; ".join(parts[:4]) + (f"; and of {len(parts) - 4} more layers" if len(parts) > 4 else "")


def _first(names: Sequence[Any]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(map(str, names[:_MOST_NAMED])) + (f" and {more} more" if more > 0 else "")
