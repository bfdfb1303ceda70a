"""A model's tensors as a stream in logical order, a bucket at a time: how weights leave for an inference engine.

Every rank makes the same list of tensors and cuts it into the same buckets. Each bucket has two halves. First every
rank takes the memory that it needs and fills in what it has; then all agree to go on. Only then data travel, so a rank
that has stopped or failed is known to the others before they wait for its data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..distributed.consensus import all_equal, first_problem
from ..moe.experts.gathering import whole_rows
from ..utils.errors import one_line
from .weights import TensorSpec, Weight, value_of

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

logger = logging.getLogger("eplb_runtime")

NamedTensor = tuple[str, Tensor]
ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes of its bucket."""


class ExportError(RuntimeError):
    """Weights that could not be exported, or are not the model's; one line, the same on every rank."""


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream, the same on all ranks.

    Args:
        bucket_bytes: of tensors that travel together; a larger tensor is a bucket of its own.
        dtype: of tensors of floating point; None: as they are.
        rank: of the job, which alone receives; None: all do.
        seconds: that ranks wait for each other between buckets.
    """

    bucket_bytes: int
    dtype: torch.dtype | None
    rank: int | None
    seconds: float


@dataclass(frozen=True)
class StreamItem:
    """One tensor of the stream.

    Args:
        name: as the checkpoint has it.
        spec: whole, as it leaves.
        stage: pipeline stage that has it.
        weight: number of its `Weight` among those of the stage.
        key: what the weight's conversion calls it; of one expert as of all others.
        layer: MoE layer of the whole model; None: of none.
        expert: the logical expert; None: of none, or all of a layer, stacked.
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
    joint: bool
    shared: bool = False

    @property
    def is_stacked(self) -> bool:
        """Return whether its rows are the experts of a layer, each from the rank that has it."""
        return self.layer is not None and self.expert is None and not self.joint


@dataclass(frozen=True)
class Chunk:
    """Part of a tensor that one rank adds.

    Args:
        item: number of the tensor.
        expert: logical expert; None: of none.
        row: of a stacked tensor; None: all of it.
        owner: global rank it comes from.
        everywhere: every rank has it, so nothing travels.
    """

    item: int
    expert: int | None
    row: int | None
    owner: int
    everywhere: bool


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class LogicalTensorList:
    """All tensors of the model, which rank has what of them, and their values on this rank.

    Args:
        weights: of each pipeline stage of this rank.
        dtype: as of `StreamOptions`.
    """

    def __init__(self, balancer: Balancer, weights: Mapping[int, Sequence[Weight]], dtype: torch.dtype | None) -> None:
        self._balancer = balancer
        self._groups = balancer._runtime.groups
        self._job = balancer._runtime.job
        self._weights = weights
        self._dtype = dtype
        self._last: tuple[Any, Mapping[str, Tensor]] = (None, {})
        self._placement = balancer.placement
        self.items: list[StreamItem] = []

    @property
    def num_experts(self) -> int:
        return self._placement.num_experts

    def problem(self) -> str:
        """Return why tensors of this rank cannot be read now; empty: they can."""
        if freed := self._balancer._why_freed():
            return freed
        for weights in self._weights.values():
            for weight in weights:
                if weight.freed:
                    return f"the memory of {next(iter(weight.made))} is freed, as jobs do between phases: load it first"
        return ""

    def own_items(self) -> dict[int, list[StreamItem]]:
        """The tensors of each stage of this rank, in order."""
        return {stage: list(self._items_of(stage, weights)) for stage, weights in self._weights.items()}

    def _items_of(self, stage: int, weights: Sequence[Weight]) -> Iterator[StreamItem]:
        for number, weight in enumerate(weights):
            specs = {name: self._leaving(spec) for name, spec in weight.made.items()}
            if weight.layer is None or weight.by_expert is None:
                joint = weight.is_sharded or weight.layer is not None
                for name, spec in specs.items():
                    yield StreamItem(name, spec, stage, number, name, weight.layer, None, joint, weight.shared)
                continue
            seen: set[str] = set()
            for expert, places in enumerate(weight.by_expert):
                for key, (name, row) in places.items():
                    if name not in seen:
                        seen.add(name)
                        one = expert if row is None else None
                        yield StreamItem(name, specs[name], stage, number, key, weight.layer, one, False)

    def _leaving(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, self._dtype) if self._dtype is not None and spec.dtype.is_floating_point else spec

    def agree(self, options: str, problem: str) -> str:
        """Learn the tensors of all stages, or why the ranks cannot go on. Collective on the control group.

        Args:
            options: must be the same on all ranks.
            problem: why this rank cannot go on; empty: it can.

        Returns:
            Empty, or what is wrong on which rank, the same on all ranks: a problem, other options, or other tensors
            than those of the ranks that share its stages.
        """
        control, job = self._groups.control, self._job
        own: dict[int, list[StreamItem]] = {}
        text = ""
        try:
            own = {} if problem else self.own_items()
            text = json.dumps({str(stage): [_fields_of(item) for item in items] for stage, items in own.items()})
            problem = problem or self.problem()
        except Exception as error:
            problem = one_line(error, with_type=True)
        if found := first_problem(problem, control):
            return str(found)
        if odd := all_equal(xxhash.xxh3_128(options.encode()).digest(), "choice of options", control):
            return odd
        if odd := all_equal(xxhash.xxh3_128(text.encode()).digest(), "list of tensors", control, job.data_sets):
            return odd
        stages = dict(own)
        for ranks in job.data_sets if len(job.data_sets) > 1 else ():
            said = json.loads(_from_rank(text, ranks[0], control))
            stages.update({int(stage): [_item_of(int(stage), row) for row in rows] for stage, rows in said.items()})
        named: dict[str, StreamItem] = {}
        for stage in sorted(stages):
            for item in stages[stage]:
                known = named.setdefault(item.name, item)
                if known is not item and not (known.shared and item.shared and known.spec == item.spec):
                    return (
                        f"pipeline stages {known.stage} and {item.stage} have a {item.name} each: give modules of "
                        "stages names over the whole model"
                    )
        self.items = list(named.values())
        return ""

    # -- which rank has what -----------------------------------------------------------------------------------------

    @cached_property
    def _places(self) -> np.ndarray[Any, Any]:
        """int64 ``[L, E]``: where each logical expert is among the rows of all ranks that have each row once."""
        return np.argsort(self._placement.homes_LRH.reshape(self._placement.num_layers, -1), axis=1, kind="stable")

    @cached_property
    def _row_sets(self) -> dict[int, list[tuple[int, ...]]]:
        """For each stage, the sets of ranks that have each of its rows once."""
        job = self._job
        holders = {
            stage: set(ranks) for held, ranks in zip(job.stage_sets, job.data_sets, strict=True) for stage in held
        }
        return {stage: [ranks for ranks in job.row_sets if ranks[0] in held] for stage, held in holders.items()}

    def _owner_of_expert(self, stage: int, layer: int, expert: int) -> int:
        sets = self._row_sets[stage]
        ranks = sets[(layer + expert) % len(sets)]
        return ranks[int(self._places[layer, expert]) // (self._placement.num_experts // len(ranks))]

    def chunks_of(self, number: int, to: int | None = None) -> list[Chunk]:
        """Return the parts of a tensor, each from one rank.

        Args:
            to: the only rank that needs it; None: all do.
        """
        item = self.items[number]
        if item.is_stacked:
            assert item.layer is not None
            rows = range(item.spec.shape[0])
            return [Chunk(number, e, e, self._owner_of_expert(item.stage, item.layer, e), False) for e in rows]
        if item.expert is not None:
            assert item.layer is not None
            owner = self._owner_of_expert(item.stage, item.layer, item.expert)
            return [Chunk(number, item.expert, None, owner, False)]
        ranks = sorted(rank for together in self._row_sets[item.stage] for rank in together)
        owner = to if to in ranks else ranks[number % len(ranks)]
        return [Chunk(number, None, None, owner, to is None and len(ranks) == len(self._job.ranks))]

    # -- values ------------------------------------------------------------------------------------------------------

    def is_plain(self, chunk: Chunk) -> bool:
        """Return whether its owner makes it alone."""
        item = self.items[chunk.item]
        return not item.joint and not (chunk.expert is not None and self._sliced)

    @cached_property
    def _sliced(self) -> bool:
        """Return whether each EDP rank has a slice of each expert."""
        return self._balancer._sliced and not self._job.divided_rows and self._groups.expert_data is not None

    def is_mine(self, chunk: Chunk) -> bool:
        return chunk.everywhere or chunk.owner == self._job.rank

    def value(self, chunk: Chunk) -> Tensor | None:
        """Return a chunk on its owner (one that is everywhere: on every rank), else None. What is not plain is
        collective over the ranks that make it together; others return at once."""
        item = self.items[chunk.item]
        if item.stage not in self._weights:
            return None
        weight = self._weights[item.stage][item.weight]
        if self.is_plain(chunk) and not self.is_mine(chunk):
            return None
        if chunk.expert is None:
            return self._made((item.stage, item.weight, None), weight, item.key)
        if chunk.owner not in (self._job.edp_ranks if self._sliced else (self._job.rank,)):
            return None
        made = self._made((item.stage, item.weight, chunk.expert), weight, item.key)
        return made if self.is_mine(chunk) else None

    def _made(self, what: tuple[int, int, int | None], weight: Weight, key: str) -> Tensor:
        """Return what a weight's conversion gives under a key; the rest is held for the tensors that follow."""
        if self._last[0] != what:
            self.forget()
            expert = what[2]
            if expert is None:
                values = [self._whole(weight, source) for source in weight.sources]
            else:
                values = [self._row(weight, expert)]
            self._last = (what, weight.convert(values))
        return self._last[1][key]

    def _row(self, weight: Weight, expert: int) -> Tensor:
        assert weight.layer is not None
        row = int(self._places[weight.layer, expert]) % (self._placement.num_experts // len(self._job.row_ranks))
        if not self._sliced:
            return weight.row(row)
        (source,) = weight.sources
        assert isinstance(source, Tensor)
        out = torch.empty((1, *source.shape[1:]), dtype=source.dtype, device=self._balancer._runtime.device)
        return whole_rows(source, row, out, self._groups)

    def _whole(self, weight: Weight, source: Tensor | tuple[Tensor, ...]) -> Tensor:
        assert isinstance(source, Tensor)
        return value_of(source) if weight.layer is None else self._balancer.gather_experts(weight.layer, source)

    def forget(self) -> None:
        """Let go of what was made last."""
        self._last = (None, {})

    def moved(self) -> str:
        """Return that experts have moved since this list was made; empty: they have not."""
        same = self._balancer._rebalancer.epoch_on_this_rank == self._placement.epoch
        return "" if same else "experts have moved since the export began: begin it anew"


def _fields_of(item: StreamItem) -> list[Any]:
    return [
        item.name,
        item.spec.shape,
        str(item.spec.dtype).removeprefix("torch."),
        item.weight,
        item.key,
        item.layer,
        item.expert,
        item.joint,
        item.shared,
    ]


def _item_of(stage: int, fields: Sequence[Any]) -> StreamItem:
    name, shape, dtype, weight, key, layer, expert, joint, shared = fields
    return StreamItem(
        name, TensorSpec(tuple(shape), getattr(torch, dtype)), stage, weight, key, layer, expert, joint, shared
    )


def _from_rank(text: str, rank: int, group: dist.ProcessGroup) -> str:
    """One rank's text, on all."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    dist.broadcast(length, rank, group=group)
    if dist.get_rank() != rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, rank, group=group)
    return data.numpy().tobytes().decode()


# -- the stream --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Bucket:
    """Tensors that travel together, and the bytes of each chunk.

    Args:
        items: their numbers.
        places: of each chunk, from the begin of the bucket; chunks of one owner are neighbours.
        segments: of each rank whose bytes travel.
        nbytes: of all.
    """

    items: range
    places: Mapping[Chunk, tuple[int, int]]
    segments: Mapping[int, tuple[int, int]]
    nbytes: int

    def arrives_at(self, rank: int) -> int:
        """Return the bytes that come from other ranks."""
        return sum(last - first for owner, (first, last) in self.segments.items() if owner != rank)


class LogicalTensors(Iterator[NamedTensor]):
    """The stream of `Balancer.named_logical_tensors`.

    Attributes:
        experts: MoE layer and logical expert of each tensor of experts, by name; None for the expert: all of a layer,
            stacked.
    """

    def __init__(self, balancer: Balancer, tensors: LogicalTensorList, options: StreamOptions) -> None:
        self._balancer = balancer
        self._tensors = tensors
        self._options = options
        self._cuts = _cut([item.spec.nbytes for item in tensors.items], options.bucket_bytes)
        self._next = 0
        self._open = True
        self._refusal = ""
        self._running: Iterator[NamedTensor] = iter(())
        self.experts: Mapping[str, tuple[int, int | None]] = {
            item.name: (item.layer, item.expert) for item in tensors.items if item.layer is not None
        }

    @property
    def num_experts(self) -> int:
        """Number of logical experts of each MoE layer."""
        return self._tensors.num_experts

    def __iter__(self) -> LogicalTensors:
        return self

    def __next__(self) -> NamedTensor:
        while self._open:
            if (found := next(self._running, None)) is not None:
                return found
            if self._next == len(self._cuts):
                self._end()
            else:
                self._running = self._bring(self._bucket(self._cuts[self._next]))
        if self._refusal:
            raise ExportError(self._refusal)
        raise StopIteration

    def __enter__(self) -> LogicalTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("" if error is None else f"its consumer failed: {one_line(error, with_type=True)}")

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def close(self, reason: str = "", refuses: bool = False) -> None:
        """Stop on this rank. The others learn it at their next bucket; this one does not wait for them.

        Args:
            reason: why, in a line for the other ranks.
            refuses: a loop that goes on with the stream raises, and does not only end.
        """
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
            seconds = self._options.seconds
            self._balancer._rebalancer.say(lambda agreement: agreement.go_on(reason, True, seconds))

    def _end(self) -> None:
        self._open = False
        self._running = iter(())
        self._tensors.forget()

    def _bucket(self, items: range) -> _Bucket:
        chunks = [chunk for item in items for chunk in self._tensors.chunks_of(item, self._options.rank)]
        chunks.sort(key=lambda chunk: -1 if chunk.everywhere else chunk.owner)
        places: dict[Chunk, tuple[int, int]] = {}
        segments: dict[int, tuple[int, int]] = {}
        at = 0
        for chunk in chunks:
            spec = self._tensors.items[chunk.item].spec
            nbytes = spec.nbytes if chunk.row is None else spec.nbytes // spec.shape[0]
            places[chunk] = (at, at + nbytes)
            end = at + aligned(nbytes)
            if not chunk.everywhere:
                segments[chunk.owner] = (segments.get(chunk.owner, (at, at))[0], end)
            at = end
        return _Bucket(items, places, segments, at)

    @torch.no_grad()
    def _bring(self, bucket: _Bucket) -> Iterator[NamedTensor]:
        """Fill a bucket. Collective.

        Raises:
            ExportError: a rank has stopped or failed, or has not come.
        """
        rank, only = self._balancer._runtime.job.rank, self._options.rank
        number, tensors = self._next + 1, self._tensors
        first, last = (0, bucket.nbytes) if only in (None, rank) else bucket.segments.get(rank, (0, 0))
        problem, memory = tensors.moved() or tensors.problem(), torch.empty(0, dtype=torch.uint8)
        arriving, device = memory, self._balancer._runtime.device
        plain = [chunk for chunk in bucket.places if tensors.is_plain(chunk) and tensors.is_mine(chunk)]
        if not problem:
            try:
                memory = torch.empty(last - first, dtype=torch.uint8, device=device)
                arriving = torch.empty(bucket.arrives_at(rank) if rank == only else 0, dtype=torch.uint8, device=device)
                for chunk in plain:
                    self._write(chunk, memory, bucket.places[chunk][0] - first)
            except Exception as error:
                problem = one_line(error, with_type=True)
        self._agree(number, problem)
        self._next = number
        for item in bucket.items:
            for chunk in tensors.chunks_of(item, only):
                if not tensors.is_plain(chunk):
                    self._write(chunk, memory, bucket.places[chunk][0] - first)
        tensors.forget()
        self._travel(bucket, memory, arriving)
        del arriving
        return _handed_out(tensors, bucket, memory, only) if only in (None, rank) else iter(())

    def _write(self, chunk: Chunk, memory: Tensor, at: int) -> None:
        """Write this rank's part of a tensor into a bucket."""
        value = self._tensors.value(chunk)
        if value is None or not self._tensors.is_mine(chunk):
            return
        spec = self._tensors.items[chunk.item].spec
        shape = spec.shape if chunk.row is None else (1, *spec.shape[1:])
        nbytes = torch.Size(shape).numel() * spec.dtype.itemsize
        memory[at : at + nbytes].view(spec.dtype).view(shape).copy_(value.reshape(shape))

    def _agree(self, number: int, problem: str) -> None:
        where, seconds = f"bucket {number} of {len(self._cuts)}", self._options.seconds
        try:
            outcome = self._balancer._rebalancer.run(
                lambda: self._balancer._rebalancer.agreement.go_on(problem, False, seconds), seconds
            )
        except RuntimeError as error:
            self._end()
            raise ExportError(
                f"weights were not exported past {where}: a rank did not come within {seconds:g} s, or is lost "
                f"({one_line(error)}); where a consumer needs longer for a bucket, give timeout_seconds"
            ) from error
        if outcome:
            self._end()
            raise ExportError(f"weights were not exported past {where}: {outcome}")

    def _travel(self, bucket: _Bucket, memory: Tensor, arriving: Tensor) -> None:
        """Send each rank's part to those that need it."""
        groups, only = self._balancer._runtime.groups, self._options.rank
        if only is None:
            for owner, (first, last) in bucket.segments.items():
                dist.broadcast(memory[first:last], owner, group=groups.everyone)
            return
        rank, ranks = groups.job.rank, groups.job.ranks
        senders = {owner: ends for owner, ends in bucket.segments.items() if owner != only}
        if not senders:
            return
        sizes = [senders[other][1] - senders[other][0] if other in senders else 0 for other in ranks]
        nothing = [0] * len(ranks)
        leaving, to_each, from_each = memory[:0], list(nothing), sizes if rank == only else nothing
        if rank != only and rank in senders:
            leaving, to_each[ranks.index(only)] = memory, len(memory)
        dist.all_to_all_single(arriving, leaving, from_each, to_each, group=groups.everyone)
        if rank == only:
            at = 0
            for other in ranks:
                if other in senders:
                    first, last = senders[other]
                    memory[first:last] = arriving[at : at + last - first]
                    at += last - first


def _handed_out(tensors: LogicalTensorList, bucket: _Bucket, memory: Tensor, to: int | None) -> Iterator[NamedTensor]:
    """Hand out tensors one by one, without a reference to the stream, which ends with its last reference.

    The last of a bucket is a copy: who still has it, as a loop has, would hold all of the bucket while the next one
    comes.
    """
    for number in bucket.items:
        item, chunks, is_last = tensors.items[number], tensors.chunks_of(number, to), number == bucket.items[-1]
        if item.is_stacked:
            tensor = torch.empty(item.spec.shape, dtype=item.spec.dtype, device=memory.device)
            for chunk in chunks:
                first, last = bucket.places[chunk]
                assert chunk.row is not None
                tensor[chunk.row] = memory[first:last].view(item.spec.dtype).view(item.spec.shape[1:])
        else:
            first, last = bucket.places[chunks[0]]
            tensor = memory[first:last].view(item.spec.dtype).view(item.spec.shape)
            tensor = tensor.clone() if is_last and len(bucket.items) > 1 else tensor
        if is_last:
            del memory
        yield item.name, tensor
        del tensor


def _cut(sizes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Neighbours that fit into a bucket together."""
    cuts: list[range] = []
    first = total = 0
    for number, size in enumerate(sizes):
        if number > first and total + aligned(size) > bucket_bytes:
            cuts.append(range(first, number))
            first, total = number, 0
        total += aligned(size)
    return [*cuts, range(first, len(sizes))] if sizes else cuts
