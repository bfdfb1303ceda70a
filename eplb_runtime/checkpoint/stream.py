"""A model's tensors as a stream in logical order, a bucket at a time: how weights leave for an engine or a folder.

Every rank makes the same list of tensors and cuts it into the same buckets. Each bucket has two halves. First every
rank takes the memory that it needs and fills in what it has; then all agree to go on. Only then data travel, so a rank
that has stopped or failed is known to the others before they wait for its data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from ..distributed.consensus import all_equal, first_problem
from ..moe.experts.gathering import whole_row
from ..utils.errors import one_line
from .weights import TensorSpec, Weight, value_of

if TYPE_CHECKING:
    from ..balancer.balancer import Balancer

NamedTensor = tuple[str, Tensor]
ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes of its bucket."""
BUCKET_BYTES = 1 << 26
"""Of a bucket, where no consumer says how much it takes."""


class ExportError(RuntimeError):
    """Weights that could not be exported, or are not the model's; one line, the same on every rank."""


@dataclass(frozen=True)
class StreamItem:
    """One tensor of the stream.

    Args:
        name: as the checkpoint has it.
        spec: whole, as it leaves.
        stage: pipeline stage that has it.
        weight: number of its `Weight` among those of the stage.
        key: its name in the weight's conversion; of one expert as of all others.
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
        """Its rows are the experts of a layer, each from the rank that has it."""
        return self.layer is not None and self.expert is None and not self.joint


@dataclass(frozen=True)
class Chunk:
    """Part of a tensor that one rank adds: of the item of that number."""

    item: int
    expert: int | None
    """The logical expert; None: of none."""
    row: int | None
    """Of a stacked tensor; None: all of it."""
    owner: int | None
    """Global rank that it comes from; None: every rank has it, so nothing travels."""
    to: int | None
    """Global rank that it goes to; None: to all."""


class TensorList:
    """All tensors of the model, which rank has what of them, and their values on this rank.

    Args:
        weights: of each pipeline stage of this rank.
        dtype: of tensors of floating point, as they leave; None: as they are.
    """

    def __init__(
        self, balancer: Balancer, weights: Mapping[int, Sequence[Weight]], dtype: torch.dtype | None = None
    ) -> None:
        self.balancer = balancer
        self.job = balancer.runtime.job
        self._weights = weights
        self._dtype = dtype
        self._last: tuple[Any, Mapping[str, Tensor]] = (None, {})
        self._placement = balancer.placement
        self.items = [item for stage, listed in weights.items() for item in self._items_of(stage, listed)]

    @property
    def num_experts(self) -> int:
        return self._placement.num_experts

    def problem(self) -> str:
        """Return why tensors of this rank cannot be read now; empty: they can."""
        if freed := self.balancer.tensors.memory.why_freed():
            return freed
        names = (next(iter(one.made)) for weights in self._weights.values() for one in weights if one.freed)
        return next((f"the memory of {name} is freed, as jobs do between phases: load it first" for name in names), "")

    def _items_of(self, stage: int, weights: Sequence[Weight]) -> Iterator[StreamItem]:
        for number, weight in enumerate(weights):
            if weight.layer is None or weight.by_expert is None:
                joint = weight.is_sharded or weight.layer is not None
                for name, spec in weight.made.items():
                    yield StreamItem(
                        name, self._leaving(spec), stage, number, name, weight.layer, None, joint, weight.shared
                    )
                continue
            for expert in range(self.num_experts):
                for key, name, row in weight.places_of(expert):
                    if not row:  # a stacked tensor once
                        one, spec = expert if row is None else None, self._leaving(weight.made[name])
                        yield StreamItem(name, spec, stage, number, key, weight.layer, one, False)

    def _leaving(self, spec: TensorSpec) -> TensorSpec:
        return TensorSpec(spec.shape, self._dtype) if self._dtype is not None and spec.dtype.is_floating_point else spec

    def agree(self, options: str, problem: str) -> str:
        """Learn the tensors of all stages. Collective on the control group. Returns, on all ranks, the first problem of
        a rank, that options differ, or that ranks of a stage have other tensors; empty: there is nothing of that."""
        control = self.balancer.runtime.groups.control
        text = json.dumps([_fields_of(item) for item in self.items])
        if found := first_problem(problem or self.problem(), control):
            return str(found)
        if odd := all_equal(xxhash.xxh3_128(options.encode()).digest(), "choice of options", control):
            return odd
        if odd := all_equal(xxhash.xxh3_128(text.encode()).digest(), "list of tensors", control, self.job.data_sets):
            return odd
        items = list(self.items)
        if len(self.job.data_sets) > 1:
            texts = [_from_rank(text, ranks[0], control) for ranks in self.job.data_sets]
            items = [_item_of(row) for said in texts for row in json.loads(said)]
        named: dict[str, StreamItem] = {}
        for item in sorted(items, key=lambda item: item.stage):
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
        holders = {
            stage: set(ranks)
            for held, ranks in zip(self.job.stage_sets, self.job.data_sets, strict=True)
            for stage in held
        }
        return {stage: [ranks for ranks in self.job.row_sets if ranks[0] in held] for stage, held in holders.items()}

    def owner_of(self, item: StreamItem, expert: int) -> int:
        """The rank that gives an expert of a tensor."""
        assert item.layer is not None
        sets = self._row_sets[item.stage]
        ranks = sets[(item.layer + expert) % len(sets)]
        return ranks[int(self._places[item.layer, expert]) // (self.num_experts // len(ranks))]

    def chunks_of(self, number: int, to: int | None = None) -> list[Chunk]:
        """Return the parts of a tensor, each from one rank, that go to all or to the one rank that needs it."""
        item = self.items[number]
        if item.is_stacked:
            return [Chunk(number, e, e, self.owner_of(item, e), to) for e in range(self.num_experts)]
        if item.expert is not None:
            return [Chunk(number, item.expert, None, self.owner_of(item, item.expert), to)]
        ranks = sorted(rank for together in self._row_sets[item.stage] for rank in together)
        owner = to if to in ranks else ranks[number % len(ranks)]
        return [Chunk(number, None, None, None if to is None and len(ranks) == len(self.job.ranks) else owner, to)]

    def spec_of(self, chunk: Chunk) -> TensorSpec:
        spec = self.items[chunk.item].spec
        return spec if chunk.row is None else TensorSpec((1, *spec.shape[1:]), spec.dtype)

    # -- values ------------------------------------------------------------------------------------------------------

    def is_plain(self, chunk: Chunk) -> bool:
        """Return whether its owner makes it alone."""
        return not self.items[chunk.item].joint and not (chunk.expert is not None and self._sliced)

    @cached_property
    def _sliced(self) -> bool:
        """Return whether each EDP rank has a slice of each expert."""
        expert_data = self.balancer.runtime.groups.expert_data
        return self.balancer.tensors.sliced and not self.job.divided_rows and expert_data is not None

    def is_mine(self, chunk: Chunk) -> bool:
        return chunk.owner in (None, self.job.rank)

    def value(self, chunk: Chunk) -> Tensor | None:
        """Return a chunk on its owner, in live memory where that is whole; else None. What is not plain is collective
        over the ranks that make it together; others return at once."""
        item = self.items[chunk.item]
        if item.stage not in self._weights or (self.is_plain(chunk) and not self.is_mine(chunk)):
            return None
        if chunk.expert is not None and chunk.owner not in (self.job.edp_ranks if self._sliced else (self.job.rank,)):
            return None
        weight = self._weights[item.stage][item.weight]
        what = (item.stage, item.weight, chunk.expert)
        if self._last[0] != what:  # the rest of what a conversion gives is held for the tensors that follow
            self.forget()
            with torch.no_grad():
                self._last = what, weight.convert([self._source(weight, one, chunk.expert) for one in weight.sources])
        return self._last[1][item.key].reshape(self.spec_of(chunk).shape) if self.is_mine(chunk) else None

    def _source(self, weight: Weight, source: Tensor | tuple[Tensor, ...], expert: int | None) -> Tensor:
        """A live tensor of a weight, whole; or its row of one expert."""
        if expert is None:
            assert isinstance(source, Tensor)
            return value_of(source) if weight.layer is None else self.balancer.gather_experts(weight.layer, source)
        row = int(self._places[weight.layer, expert]) % (self.num_experts // len(self.job.row_ranks))
        if isinstance(source, tuple):
            return source[row].detach()
        return whole_row(source, row, self.balancer.runtime.groups)

    def forget(self) -> None:
        """Let go of what was made last."""
        self._last = (None, {})

    def moved(self) -> str:
        """Return that experts have moved since this list was made; empty: they have not."""
        same = self.balancer.rebalancer.epoch_on_this_rank == self._placement.epoch
        return "" if same else "experts have moved since the export began: begin it again"


def _fields_of(item: StreamItem) -> list[Any]:
    rest = [getattr(item, field.name) for field in fields(item)[2:]]
    return [item.name, item.spec.shape, str(item.spec.dtype).removeprefix("torch."), *rest]


def _item_of(said: Sequence[Any]) -> StreamItem:
    name, shape, dtype, *rest = said
    return StreamItem(name, TensorSpec(tuple(shape), getattr(torch, dtype)), *rest)


def _from_rank(text: str, rank: int, group: dist.ProcessGroup) -> str:
    """One rank's text, on all."""
    data = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(data)])
    dist.broadcast(length, rank, group=group)
    if dist.get_rank() != rank:
        data = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(data, rank, group=group)
    return data.numpy().tobytes().decode()


# -- a bucket --------------------------------------------------------------------------------------------------------


class Bucket:
    """Parts of tensors that travel together, and the memory of this rank for them.

    Args:
        chunks: the same on all ranks; all go to all, or each to one rank.
        copies: of what goes nowhere; else it is handed out in live memory.
    """

    def __init__(self, tensors: TensorList, chunks: Sequence[Chunk], copies: bool) -> None:
        self._tensors, self._chunks, self._rank, self._copies = tensors, chunks, tensors.job.rank, copies
        self._leaving = [c for c in chunks if c.owner == self._rank and c.to not in (None, self._rank)]
        self._leaving.sort(key=lambda chunk: chunk.to or 0)
        self._arriving = [c for c in chunks if c.to is None or (c.to == self._rank != c.owner)]
        self._arriving.sort(key=lambda chunk: -1 if chunk.owner is None else chunk.owner)
        self._parts: dict[Chunk, Tensor] = {}
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)

    def begin(self) -> None:
        """Take all memory, and write the parts that this rank makes alone."""
        self._sent, self._received = self._memory_of(self._leaving), self._memory_of(self._arriving)
        self._write(plain=True)

    def end(self) -> list[tuple[Chunk, Tensor]]:
        """Write the parts that ranks make together and send each to the ranks that need it. Collective. Returns what
        this rank has of the bucket, which holds on to none of it."""
        self._write(plain=False)
        self._travel()
        found = [(chunk, self._parts[chunk]) for chunk in self._chunks if chunk.to in (None, self._rank)]
        self._parts.clear()
        self._sent = self._received = torch.empty(0, dtype=torch.uint8)
        return found

    def _memory_of(self, chunks: Sequence[Chunk]) -> Tensor:
        specs, at = [self._tensors.spec_of(chunk) for chunk in chunks], 0
        nbytes, device = sum(aligned(spec.nbytes) for spec in specs), self._tensors.balancer.runtime.device
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        for chunk, spec in zip(chunks, specs, strict=True):
            self._parts[chunk] = memory[at : at + spec.nbytes].view(spec.dtype).view(spec.shape)
            at += aligned(spec.nbytes)
        return memory

    def _write(self, plain: bool) -> None:
        for chunk in self._chunks:
            if self._tensors.is_plain(chunk) == plain and (value := self._tensors.value(chunk)) is not None:
                if chunk.to == self._rank:
                    self._parts[chunk] = value.to(self._tensors.spec_of(chunk).dtype, copy=self._copies)
                else:
                    self._parts[chunk].copy_(value)
        self._tensors.forget()

    def _travel(self) -> None:
        group, ranks = self._tensors.balancer.runtime.groups.everyone, self._tensors.job.ranks
        of, to = (dict.fromkeys((None, *ranks), 0) for _ in range(2))
        for chunk in self._arriving:
            of[chunk.owner] += aligned(self._tensors.spec_of(chunk).nbytes)
        for chunk in self._leaving:
            to[chunk.to] += aligned(self._tensors.spec_of(chunk).nbytes)
        if self._chunks[0].to is None:
            begin = of[None]
            for rank in ranks:
                if of[rank]:
                    dist.broadcast(self._received[begin : begin + of[rank]], rank, group=group)
                begin += of[rank]
        elif any(chunk.owner != chunk.to for chunk in self._chunks):
            sizes = [of[rank] for rank in ranks], [to[rank] for rank in ranks]
            dist.all_to_all_single(self._received, self._sent, *sizes, group=group)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def cut(sizes: Sequence[int], bucket_bytes: int) -> list[range]:
    """Neighbours that fit into a bucket together."""
    cuts: list[range] = []
    first = total = 0
    for number, size in enumerate(map(aligned, sizes)):
        if number > first and total + size > bucket_bytes:
            cuts.append(range(first, number))
            first, total = number, 0
        total += size
    return [*cuts, range(first, len(sizes))] if sizes else cuts


def brought(tensors: TensorList, to: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Bring each tensor to a rank; there, yield its name and its values: in live memory where they are there whole, and
    on the host where experts are stacked. Collective; all ranks go through to the end."""
    chunks = [chunk for number, rank in enumerate(to) for chunk in tensors.chunks_of(number, rank)]
    for numbers in cut([tensors.spec_of(chunk).nbytes for chunk in chunks], BUCKET_BYTES):
        bucket = Bucket(tensors, chunks[numbers.start : numbers.stop], copies=False)
        bucket.begin()
        parts = bucket.end()
        while parts:
            chunk, tensor = parts.pop(0)
            item = tensors.items[chunk.item]
            if chunk.row is not None:
                if chunk.row == 0:
                    stack = torch.empty(item.spec.shape, dtype=item.spec.dtype)
                stack[chunk.row] = tensor[0]
                if chunk.row < len(stack) - 1:
                    continue
                tensor = stack
                del stack
            yield item.name, tensor
            del tensor


# -- the stream --------------------------------------------------------------------------------------------------------


class LogicalTensors(Iterator[NamedTensor]):
    """The stream of `Balancer.named_logical_tensors`.

    Args:
        bucket_bytes: of tensors that travel together; a larger tensor is a bucket of its own.
        rank: of the job, which alone receives; None: all do.
        seconds: that ranks wait for each other between buckets.

    Attributes:
        experts: MoE layer and logical expert of each tensor of experts, by name; None for the expert: all of a layer,
            stacked.
    """

    def __init__(self, tensors: TensorList, bucket_bytes: int, rank: int | None, seconds: float) -> None:
        self._tensors = tensors
        self._rank = rank
        self._seconds = seconds
        self._cuts = cut([item.spec.nbytes for item in tensors.items], bucket_bytes)
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
                self._running = self._bring(self._cuts[self._next])
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
            self._tensors.balancer.rebalancer.say(lambda agreement: agreement.go_on(reason, True, seconds))

    def _end(self) -> None:
        self._open = False
        self._running = iter(())
        self._tensors.forget()

    @torch.no_grad()
    def _bring(self, numbers: range) -> Iterator[NamedTensor]:
        """Fill a bucket, or raise what a rank has that stopped, failed or has not come. Collective."""
        tensors, problem = self._tensors, self._tensors.moved() or self._tensors.problem()
        chunks = [chunk for number in numbers for chunk in tensors.chunks_of(number, self._rank)]
        bucket = Bucket(tensors, chunks, copies=True)
        if not problem:
            try:
                bucket.begin()
            except Exception as error:
                problem = one_line(error, with_type=True)
        self._agree(problem)
        self._next += 1
        return _handed_out(tensors.items, bucket.end())

    def _agree(self, problem: str) -> None:
        where, seconds = f"bucket {self._next + 1} of {len(self._cuts)}", self._seconds
        rebalancer = self._tensors.balancer.rebalancer
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


def _handed_out(items: Sequence[StreamItem], parts: list[tuple[Chunk, Tensor]]) -> Iterator[NamedTensor]:
    """Hand out the tensors of a bucket, without a reference to the stream, which ends with its last reference. The last
    tensor is a copy: who still has it, as a loop has, would hold all of the bucket while the next one comes."""
    alone = len({chunk.item for chunk, _ in parts}) == 1
    while parts:
        chunk, tensor = parts.pop(0)
        item = items[chunk.item]
        if chunk.row is not None:
            rows = [tensor, *(value for _, value in parts[: item.spec.shape[0] - 1])]
            del parts[: len(rows) - 1]
            tensor = torch.cat(rows)
            del rows
        elif not parts and not alone:
            tensor = tensor.clone()
        yield item.name, tensor
        del tensor
