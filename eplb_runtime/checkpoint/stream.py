"""A model's tensors as a stream in logical order, a bucket at a time: how weights leave for an engine or a folder.

Every rank makes the same list of pieces and cuts it into the same buckets. Each bucket has two halves. First every
rank takes the memory that it needs and fills in what it has; then all agree to go on. Only then data travel, so a rank
that has stopped or failed is known to the others before they wait for its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..balancer.exports import TensorStream
from ..distributed.consensus import all_equal, first_problem, gather_bytes
from ..moe.experts.gathering import whole_row
from ..utils.errors import one_line
from .weights import TensorSpec, Weight, value_of

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

NamedTensor = tuple[str, Tensor]
ALIGNMENT = 64
"""Each piece begins at a multiple of so many bytes of its bucket."""
BUCKET_BYTES = 1 << 26
"""Of a bucket, where no consumer says how much it takes."""


class ExportError(RuntimeError):
    """Weights that could not be exported, or are not the model's; one line, the same on every rank."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the stream, or one row of a tensor whose rows are the experts of a layer.

    Args:
        name: of the tensor, as the checkpoint has it.
        spec: as it leaves; of a row ``[1, ...]``.
        stage: pipeline stage that has it.
        weight: number of its `Weight` among those of the stage.
        key: its name in the weight's conversion; of one expert as of all others.
        layer: MoE layer of the whole model; None: of none.
        expert: the logical expert; None: of none, or all of a layer together.
        rows: of the tensor whose row ``expert`` it is; 0: it is a tensor.
        joint: made whole by all ranks of the stage together.
        shared: as of `Weight`.
    """

    name: str
    spec: TensorSpec
    stage: int
    weight: int
    key: str
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
    """

    def __init__(
        self, balancer: Balancer, weights: Mapping[int, Sequence[Weight]], dtype: torch.dtype | None = None
    ) -> None:
        self.balancer = balancer
        self.job = balancer._runtime.job
        self._weights = weights
        self._dtype = dtype
        self._last: tuple[Any, Mapping[str, Tensor]] = (None, {})
        self._placement = balancer.placement
        self.num_experts = self._placement.num_experts
        self.pieces = [piece for stage, listed in weights.items() for piece in self._pieces_of(stage, listed)]

    def by_name(self) -> dict[str, list[int]]:
        """Return the numbers of each tensor's pieces."""
        found: dict[str, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            found.setdefault(piece.name, []).append(number)
        return found

    def problem(self) -> str:
        """Return why tensors of this rank cannot be read now; empty: they can."""
        if freed := self.balancer._why_freed():
            return freed
        names = (next(iter(one.made)) for weights in self._weights.values() for one in weights if one.freed)
        return next((f"the memory of {name} is freed, as jobs do between phases: load it first" for name in names), "")

    def _pieces_of(self, stage: int, weights: Sequence[Weight]) -> Iterator[Piece]:
        for number, weight in enumerate(weights):
            layer = weight.layer
            if layer is None or weight.by_expert is None:
                joint = weight.is_sharded or layer is not None
                for name, spec in weight.made.items():
                    yield Piece(name, self._cast(spec), stage, number, name, layer, None, 0, joint, weight.shared)
                continue
            for key, name in weight.by_expert.items():
                if "*" not in name:
                    whole = self._cast(weight.made[name])
                    row = TensorSpec((1, *whole.shape[1:]), whole.dtype)
                    for expert in range(self.num_experts):
                        yield Piece(name, row, stage, number, key, layer, expert, whole.shape[0], False, False)
            for expert in range(self.num_experts):
                for key, name, row_of in weight.places_of(expert):
                    if row_of is None:
                        spec = self._cast(weight.made[name])
                        yield Piece(name, spec, stage, number, key, layer, expert, 0, False, False)

    def _cast(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, self._dtype) if self._dtype is not None and spec.dtype.is_floating_point else spec

    def agree(self, options: str, problem: str) -> str:
        """Learn the pieces of all stages. Collective on the control group. Returns, on all ranks, the first problem of
        a rank, that options differ, or that ranks of a stage have other tensors; empty: there is nothing of that."""
        control, sets = self.balancer._runtime.groups.control, self.job.data_sets
        if found := first_problem(problem or self.problem(), control):
            return str(found)
        if odd := all_equal(xxhash.xxh3_128(options.encode()).digest(), "choice of options", control):
            return odd
        text = json.dumps([_fields_of(piece) for piece in self.pieces]).encode()
        if odd := all_equal(xxhash.xxh3_128(text).digest(), "list of tensors", control, sets):
            return odd
        if len(sets) > 1:
            first = self.job.rank in [ranks[0] for ranks in sets]
            said = [json.loads(text) for text in gather_bytes(text if first else b"", control) if text]
            self.pieces = sorted((_piece_of(fields) for one in said for fields in one), key=lambda piece: piece.stage)
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

    # -- which rank has what -----------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> np.ndarray[Any, Any]:
        """int64 ``[L, E]``: where each logical expert is among the rows of all ranks that have each row once."""
        return np.argsort(self._placement.homes_LRH.reshape(self._placement.num_layers, -1), axis=1, kind="stable")

    @cached_property
    def _row_sets(self) -> dict[int, list[tuple[int, ...]]]:
        """For each stage, the sets of ranks that have each of its rows once."""
        holders = {
            stage: set(ranks)
            for held, ranks in zip(self.job.stage_sets, self.job.data_sets, strict=True)
            for stage in held
        }
        return {stage: [ranks for ranks in self.job.row_sets if ranks[0] in held] for stage, held in holders.items()}

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

    # -- values ------------------------------------------------------------------------------------------------------

    def is_plain(self, piece: Piece) -> bool:
        """Return whether its owner makes it alone."""
        return not piece.joint and not (piece.expert is not None and self._sliced)

    @cached_property
    def _sliced(self) -> bool:
        """Return whether each EDP rank has a slice of each expert."""
        expert_data = self.balancer._runtime.groups.expert_data
        return self.balancer._sliced and not self.job.divided_rows and expert_data is not None

    def value(self, piece: Piece, owner: int | None) -> Tensor | None:
        """Return a piece on its owner, in live memory where that is whole; else None. What is not plain is collective
        over the ranks that make it together; others return at once."""
        rank = self.job.rank
        mine = owner in (None, rank)
        if piece.stage not in self._weights or (self.is_plain(piece) and not mine):
            return None
        if piece.expert is not None and owner not in (self.job.edp_ranks if self._sliced else (rank,)):
            return None
        weight = self._weights[piece.stage][piece.weight]
        what = (piece.stage, piece.weight, piece.expert)
        if self._last[0] != what:  # the rest of what a conversion gives is held for the pieces that follow
            self.forget()
            with torch.no_grad():
                self._last = what, weight.convert([self._source(weight, one, piece.expert) for one in weight.sources])
        return self._last[1][piece.key].reshape(piece.spec.shape) if mine else None

    def _source(self, weight: Weight, source: Tensor | tuple[Tensor, ...], expert: int | None) -> Tensor:
        """A live tensor of a weight, whole; or its row of one expert."""
        if expert is None:
            assert isinstance(source, Tensor)
            return value_of(source) if weight.layer is None else self.balancer.gather_experts(weight.layer, source)
        row = int(self._places[weight.layer, expert]) % (self.num_experts // len(self.job.row_ranks))
        if isinstance(source, tuple):
            return source[row].detach()
        return whole_row(source, row, self.balancer._runtime.groups)

    def forget(self) -> None:
        """Let go of what was made last."""
        self._last = (None, {})

    def moved(self) -> str:
        """Return that experts have moved since this list was made; empty: they have not."""
        same = self.balancer._rebalancer.epoch_on_this_rank == self._placement.epoch
        return "" if same else "experts have moved since the export began: begin it again"


def _fields_of(piece: Piece) -> list[Any]:
    shape, dtype = piece.spec.shape, str(piece.spec.dtype).removeprefix("torch.")
    return [value for name, value in vars(piece).items() if name != "spec"] + [shape, dtype]


def _piece_of(fields: Sequence[Any]) -> Piece:
    name, *rest, shape, dtype = fields
    return Piece(name, TensorSpec(tuple(shape), getattr(torch, dtype)), *rest)


# -- a bucket --------------------------------------------------------------------------------------------------------


class Bucket:
    """Pieces that travel together, and the memory of this rank for them.

    Args:
        to: by a piece's number, the rank that it goes to; None: to all. All go to all, or each to one.
        copies: of what goes nowhere; else it is handed out in live memory.
    """

    def __init__(self, tensors: TensorList, to: Mapping[int, int | None], copies: bool) -> None:
        self._tensors, self._to, self._copies = tensors, to, copies
        self._owner = {number: tensors.owner_of(number, rank) for number, rank in to.items()}
        self._parts: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Take all memory, and write the pieces that this rank makes alone."""
        rank, owner = self._tensors.job.rank, self._owner
        self._sent = self._take({n: to for n, to in self._to.items() if owner[n] == rank and to not in (None, rank)})
        self._received = self._take(
            {n: owner[n] for n, to in self._to.items() if to is None or (to == rank != owner[n])}
        )
        self._write(plain=True)

    def end(self) -> list[tuple[Piece, Tensor]]:
        """Write the pieces that ranks make together and send each to the ranks that need it. Collective. Returns what
        this rank has of the bucket, which holds on to none of it."""
        self._write(plain=False)
        self._travel()
        pieces, rank = self._tensors.pieces, self._tensors.job.rank
        found = [(pieces[number], self._parts[number]) for number, to in self._to.items() if to in (None, rank)]
        self._parts.clear()
        del self._sent, self._received
        return found

    def _take(self, peers: Mapping[int, int | None]) -> tuple[Tensor, list[int]]:
        """Take memory for pieces, by the rank at their other end. Returns it with the bytes of no rank and of each."""
        ranks, at = [None, *self._tensors.job.ranks], 0
        specs = {number: self._tensors.pieces[number].spec for number in peers}
        nbytes = dict.fromkeys(ranks, 0)
        for number, peer in peers.items():
            nbytes[peer] += aligned(specs[number].nbytes)
        memory = torch.empty(sum(nbytes.values()), dtype=torch.uint8, device=self._tensors.balancer._runtime.device)
        place = {rank: number for number, rank in enumerate(ranks)}
        for number in sorted(peers, key=lambda number: place[peers[number]]):
            spec = specs[number]
            self._parts[number] = memory[at : at + spec.nbytes].view(spec.dtype).view(spec.shape)
            at += aligned(spec.nbytes)
        return memory, list(nbytes.values())

    def _write(self, plain: bool) -> None:
        for number, to in self._to.items():
            piece = self._tensors.pieces[number]
            if self._tensors.is_plain(piece) != plain:
                continue
            if (value := self._tensors.value(piece, self._owner[number])) is None:
                continue
            if to == self._tensors.job.rank:
                self._parts[number] = value.to(piece.spec.dtype, copy=self._copies)
            else:
                self._parts[number].copy_(value)
        self._tensors.forget()

    def _travel(self) -> None:
        group, ranks = self._tensors.balancer._runtime.groups.everyone, self._tensors.job.ranks
        (sent, leaving), (received, arriving) = self._sent, self._received
        if None in self._to.values():
            for rank, part in zip((None, *ranks), received.split(arriving), strict=True):
                if rank is not None and len(part):
                    dist.broadcast(part, rank, group=group)
        elif self._owner != self._to:
            dist.all_to_all_single(received, sent, arriving[1:], leaving[1:], group=group)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(pieces: Sequence[Piece], bucket_bytes: int) -> list[range]:
    """Return the numbers of neighbours that fit into a bucket together."""
    cuts: list[range] = []
    first = total = 0
    for number, piece in enumerate(pieces):
        size = aligned(piece.spec.nbytes)
        if number > first and total + size > bucket_bytes:
            cuts.append(range(first, number))
            first, total = number, 0
        total += size
    return [*cuts, range(first, len(pieces))] if pieces else cuts


def _assembled(parts: list[tuple[Piece, Tensor]], stacks: dict[str, Tensor], on_host: bool) -> Iterator[NamedTensor]:
    """Yield the tensors of a bucket, and hold none. Rows are put together in ``stacks``, over several buckets.

    Args:
        on_host: rows are put together there; else where they are, and the last tensor is a copy: who still has it, as
            a loop has, would hold all of the bucket while the next one comes.
    """
    alone = len(parts) == 1
    while parts:
        piece, tensor = parts.pop(0)
        if piece.rows and piece.expert is not None:
            if piece.expert == 0:
                device = torch.device("cpu") if on_host else tensor.device
                stacks[piece.name] = torch.empty(piece.whole.shape, dtype=tensor.dtype, device=device)
            stacks[piece.name][piece.expert] = tensor[0]
            if piece.expert < piece.rows - 1:
                continue
            tensor = stacks.pop(piece.name)
        elif not (parts or alone or on_host):
            tensor = tensor.clone()
        yield piece.name, tensor
        del tensor


def brought(tensors: TensorList, to: Sequence[int]) -> Iterator[NamedTensor]:
    """Bring each piece to a rank; there, yield each tensor: in live memory where it is there whole, and on the host
    where experts are stacked. Collective; all ranks go through to the end."""
    stacks: dict[str, Tensor] = {}
    for numbers in cut(tensors.pieces, BUCKET_BYTES):
        bucket = Bucket(tensors, {number: to[number] for number in numbers}, copies=False)
        bucket.begin()
        yield from _assembled(bucket.end(), stacks, on_host=True)


# -- the stream --------------------------------------------------------------------------------------------------------


class LogicalTensors(TensorStream):
    """The stream of `Balancer.named_logical_tensors`.

    Args:
        bucket_bytes: of tensors that travel together; a larger tensor is a bucket of its own.
        rank: of the job, which alone receives; None: all do.
        seconds: that ranks wait for each other between buckets.
    """

    def __init__(self, tensors: TensorList, bucket_bytes: int, rank: int | None, seconds: float) -> None:
        self._tensors = tensors
        self._rank = rank
        self._seconds = seconds
        self._cuts = cut(tensors.pieces, bucket_bytes)
        self._stacks: dict[str, Tensor] = {}
        self._next = 0
        self._open = True
        self._refusal = ""
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

    def close(self, reason: str = "", refuses: bool = False) -> None:
        """`TensorStream.close`."""
        if not self._open:
            return
        left = self._next < len(self._cuts)
        self._end()
        if refuses:
            self._refusal = (
                f"this stream of weights has ended: {reason}; begin a new one (a function begins it in time for "
                "verify_export: lambda: balancer.named_logical_tensors())"
            )
        if left:
            seconds = self._seconds
            self._tensors.balancer._rebalancer.say(lambda agreement: agreement.go_on(reason, True, seconds))

    def _end(self) -> None:
        self._open = False
        self._running = iter(())
        self._tensors.forget()

    @torch.no_grad()
    def _bring(self, numbers: range) -> Iterator[NamedTensor]:
        """Fill a bucket, or raise what a rank has that stopped, failed or has not come. Collective."""
        tensors, problem = self._tensors, self._tensors.moved() or self._tensors.problem()
        bucket = Bucket(tensors, dict.fromkeys(numbers, self._rank), copies=True)
        if not problem:
            try:
                bucket.begin()
            except Exception as error:
                problem = one_line(error, with_type=True)
        self._agree(problem)
        self._next += 1
        return _assembled(bucket.end(), self._stacks, on_host=False)  # without a reference to the stream

    def _agree(self, problem: str) -> None:
        where, seconds = f"bucket {self._next + 1} of {len(self._cuts)}", self._seconds
        rebalancer = self._tensors.balancer._rebalancer
        try:
            outcome = rebalancer.run(lambda: rebalancer.agreement.go_on(problem, False, seconds), seconds)
        except RuntimeError as error:
            self._end()
            raise ExportError(
                f"weights were not exported past {where}: a rank did not come within {seconds:g} s, or is lost "
                f"({one_line(error)}); where a consumer needs longer for a bucket, give timeout_seconds"
            ) from error
        if outcome:
            self._end()
            raise ExportError(f"weights were not exported past {where}: {outcome}")
