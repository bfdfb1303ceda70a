"""A model's tensors as a stream in logical order, a bucket at a time: how weights leave for an engine or a folder.

Hosts list the tensors of a model with what each becomes (`Weight`). Every rank makes the same list of pieces of it and
cuts that into the same buckets. Each bucket has two halves. First every rank takes the memory that it needs and fills
in what it has; then all agree to go on. Only then data travel, so a rank that has stopped or failed is known to the
others before they wait for its data.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..balancer.balancer import Balancer
from ..balancer.loop_state import TensorStream
from ..distributed.consensus import all_equal, first_problem, gather_bytes, maxima
from ..moe.experts.slices import has_memory, whole_row
from ..utils.checksums import as_bytes, checksum
from ..utils.text import one_line
from .state import JointAccess, LogicalView, Stored, TensorSpec, value_of

NamedTensor = tuple[str, Tensor]
BUCKET_BYTES = 1 << 26
"""Of a bucket, where no consumer says how much it takes."""


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
        """Return the live tensors of all sources in a list."""
        every = self.sources.values()
        return [part for source in every for part in (source if isinstance(source, tuple) else (source,))]


def weights_of(model: nn.Module, first_layer: int) -> list[Weight]:
    """Return a `Weight` for each parameter and persistent buffer of a model, under its own name, experts stacked
    ``[E, ...]``. ``first_layer`` is not used: hosts have functions of their own in place of this one, which need it."""
    view, found = LogicalView(model), []
    for entry in view.entries("model"):
        stored = Stored((entry.name,), 0 if entry.layer is None else view.num_experts)
        found.append(Weight({entry.name: entry.tensor}, entry.layer, {entry.name: view.spec_of(entry)}, stored))
    return found


# -- parts of the model, and which rank has them -----------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tensors that are made at once: all that a `Weight` becomes, or what one expert of it becomes.

    Args:
        made: tensors as they leave, by name.
        stage: pipeline stage that has it.
        weight: number of its `Weight` among those of the stage.
        layer: MoE layer of the whole model; None: of none.
        expert: the logical expert; None: of none, or all of a layer together.
        stacked: rows of the tensors are the experts of the layer, and come from where each is.
        shared: as of `Weight`.
    """

    made: Mapping[str, TensorSpec]
    stage: int
    weight: int
    layer: int | None
    expert: int | None
    stacked: bool
    shared: bool


Row = tuple[int, int | None]
"""Number of a piece and the expert that it has; of a stack, one of its experts."""
Tensors = tuple[dict[str, Tensor], dict[Row, dict[str, Tensor]]]
"""Tensors of a bucket that this rank is given, by name; and those of each row, with those that it sends."""


class TensorList:
    """All tensors of the model, which rank has what of them, and their values on this rank.

    Args:
        weights: of each pipeline stage of this rank.
        rank: of the job, which alone is given them; None: all are.
        dtype: of tensors of floating point, as they leave; None: as they are.
    """

    def __init__(
        self,
        balancer: Balancer,
        weights: Mapping[int, Sequence[Weight]],
        rank: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.balancer, self._job, self._rank = balancer, balancer.runtime.job, rank
        self._weights, self._dtype = weights, dtype
        self._placement = balancer.placement
        self.num_experts = self._placement.num_experts
        # int64 [L, E]: where each logical expert is among the rows of all ranks that have each row once.
        homes_LE = self._placement.homes_LRH.reshape(self._placement.num_layers, -1)
        self._places = np.argsort(homes_LE, axis=1, kind="stable")
        self._row_sets = {  # for each stage, the sets of ranks that have each of its rows once
            stage: [ranks for ranks in self._job.row_sets if ranks[0] in holders]
            for held, holders in zip(self._job.stage_sets, self._job.dp_groups, strict=True)
            for stage in held
        }
        # Each EDP rank has a slice of each expert.
        self._sliced = balancer.tensors.sliced and not self._job.divided_rows and len(self._job.edp_ranks) > 1
        self.pieces = [piece for stage in weights for piece in self._pieces_of(stage)]

    def _pieces_of(self, stage: int) -> Iterator[Piece]:
        for number, weight in enumerate(self._weights[stage]):
            by = weight.by
            made = {
                name: replace(spec, dtype=self._dtype) if self._dtype and spec.dtype.is_floating_point else spec
                for name, spec in weight.made.items()
            }
            stacked = isinstance(by, Stored) and by.experts > 0 and made.keys() == set(by.names)
            if not isinstance(by, Stored) or not by.experts or stacked:
                yield Piece(made, stage, number, weight.layer, None, stacked, weight.shared)
                continue
            for expert in range(by.experts):
                of_expert = {name: made[name] for name in by.names_of(expert)}
                yield Piece(of_expert, stage, number, weight.layer, expert, False, False)

    def buckets(self, most_bytes: int) -> list[list[Row]]:
        """Return all rows, in order, in buckets of up to ``most_bytes``; a larger piece is a bucket by itself."""
        buckets, total = list[list[Row]](), 0
        for number, piece in enumerate(self.pieces):
            nbytes = sum(spec.nbytes for spec in piece.made.values())
            if not buckets or total + nbytes > most_bytes:
                buckets.append([])
                total = 0
            experts = range(self.num_experts) if piece.stacked else (piece.expert,)
            buckets[-1] += [(number, expert) for expert in experts]
            total += nbytes
        return buckets

    def problem(self) -> str:
        """Return why this rank cannot read its tensors now (experts have moved, memory is freed); empty: it can."""
        if self.balancer.rebalancer.epoch_on_this_rank != self._placement.epoch:
            return "experts have moved since the export began: begin it again"
        every = (one for weights in self._weights.values() for one in weights)
        names = (next(iter(one.made)) for one in every if not all(map(has_memory, one.memory)))
        freed = next((f"{name}: its memory is freed: load it first" for name in names), "")
        return self.balancer.tensors.memory.why_freed() or freed

    def agree(self, options: str, problem: str, control: dist.ProcessGroup) -> str:
        """Exchange the lists of pieces of all stages, and set ``pieces`` to all of them, shared ones once. Collective
        on ``control``. Returns, on all ranks, the first problem of a rank, or which ranks or stages have other options,
        or tensors that conflict; empty: there is none."""
        sets = self._job.dp_groups
        text = json.dumps([asdict(piece) for piece in self.pieces], default=str).encode()
        if found := first_problem(problem or self.problem(), control):
            return found
        for what, mine, together in (("choice of options", options.encode(), None), ("list of tensors", text, sets)):
            if odd := all_equal(xxhash.xxh3_128(mine).digest(), what, control, together):
                return odd
        if len(sets) > 1:
            texts = gather_bytes(text if self._job.rank in [ranks[0] for ranks in sets] else b"", control)
            pieces = [Piece(**of) for one in texts if one for of in json.loads(one, object_hook=_spec)]
            self.pieces = sorted(pieces, key=lambda piece: piece.stage)
        first_of: dict[str, Piece] = {}
        for name, piece in [(name, one) for one in self.pieces for name in one.made]:
            known = first_of.setdefault(name, piece)
            if known.stage != piece.stage and not (known.shared and piece.shared and known.made == piece.made):
                return (
                    f"pipeline stages {known.stage} and {piece.stage} have a {name} each: give modules of stages names "
                    "over the whole model"
                )
        self.pieces = [piece for piece in self.pieces if first_of[next(iter(piece.made))] is piece]
        return ""

    def owner_of(self, row: Row) -> int | None:
        """Return the rank that sends a row to those that are given it; None: all ranks have and are given it."""
        (number, expert), layer = row, self.pieces[row[0]].layer
        sets = self._row_sets[self.pieces[number].stage]
        if layer is not None and expert is not None:
            ranks = sets[(layer + expert) % len(sets)]
            return ranks[int(self._places[layer, expert]) // (self.num_experts // len(ranks))]
        holders = sorted(rank for together in sets for rank in together)
        if self._rank in holders or (self._rank is None and len(holders) == len(self._job.ranks)):
            return self._rank
        return holders[number % len(holders)]

    def value(self, row: Row, joint: bool) -> Mapping[str, Tensor] | None:
        """Return the tensors of a row, by name, on its owner, in live memory where that is whole; None on other ranks.
        ``joint``: True: rows that several ranks make together, collective over these (they hold the expert or all of
        the stage); False: all other rows. Rows of the other kind give None."""
        piece, expert, owner = self.pieces[row[0]], row[1], self.owner_of(row)
        if piece.stage not in self._weights:
            return None
        weight, mine = self._weights[piece.stage][piece.weight], owner in (None, self._job.rank)
        several, ours = self._sliced, owner in self._job.edp_ranks
        if expert is None:
            several, ours = piece.layer is not None or any(isinstance(one, DTensor) for one in weight.memory), True
        if several != joint or not (mine or (several and ours)):
            return None
        values = {name: self._source(weight, one, expert) for name, one in weight.sources.items()}
        if not isinstance(weight.by, Stored):
            made = weight.by(values)
        else:
            (value,) = values.values()
            made = dict(weight.by.cut(value, expert or 0))
        return made if mine else None

    def _source(self, weight: Weight, source: Tensor | tuple[Tensor, ...], expert: int | None) -> Tensor:
        """A live tensor of a weight, whole; or its row of one expert."""
        if expert is None:
            assert isinstance(source, Tensor)
            return value_of(source) if weight.layer is None else self.balancer.gather_experts(weight.layer, source)
        row = int(self._places[weight.layer, expert]) % (self.num_experts // len(self._job.row_ranks))
        if isinstance(source, tuple):
            return source[row].detach()
        return whole_row(source, row, self.balancer.runtime.groups)[0]

    # -- a bucket --

    @torch.no_grad()
    def begin(self, bucket: Sequence[Row]) -> Tensors:
        """Allocate the tensors of a bucket that this rank is given, and fill in the rows that it makes alone. Return
        these tensors by name, and the tensors of each row that this rank is given or has made. Not collective."""
        given, rows = dict[str, Tensor](), dict[Row, dict[str, Tensor]]()
        for row in bucket if self._rank in (None, self._job.rank) else ():
            piece, device = self.pieces[row[0]], self.balancer.runtime.device
            for name, spec in piece.made.items():
                if name not in given:
                    given[name] = torch.empty(spec.shape, dtype=spec.dtype, device=device)
            rows[row] = {name: given[name][row[1]] if piece.stacked else given[name] for name in piece.made}
        self._read(bucket, rows, joint=False)
        return given, rows

    @torch.no_grad()
    def end(self, bucket: Sequence[Row], tensors: Tensors) -> list[NamedTensor]:
        """Return the tensors of a bucket that this rank is given, now filled in; empty: it is given none. Collective:
        makes the rows that ranks make together, and sends each row from its owner to the ranks that are given it."""
        given, rows = tensors
        self._read(bucket, rows, joint=True)
        group, here, to = self.balancer.runtime.groups.everyone, self._job.rank, self._rank
        works: list[Any] = []
        messages: list[dist.P2POp] = []
        for owner, row in ((self.owner_of(row), row) for row in bucket):
            if to is None and owner is not None:
                works += [dist.broadcast(as_bytes(one), owner, group, async_op=True) for one in rows[row].values()]
            elif owner != to and here in (owner, to):
                send, peer = (dist.isend, to) if owner == here else (dist.irecv, owner)
                messages += [dist.P2POp(send, as_bytes(one), peer, group) for one in rows[row].values()]
        for work in works or (dist.batch_isend_irecv(messages) if messages else ()):
            work.wait()
        return list(given.items())

    def _read(self, bucket: Sequence[Row], rows: dict[Row, dict[str, Tensor]], joint: bool) -> None:
        for row in bucket:
            if (value := self.value(row, joint)) is None:
                continue
            specs = self.pieces[row[0]].made.items()
            if row not in rows:
                rows[row] = {name: value[name].to(spec.dtype).contiguous() for name, spec in specs}
            else:
                for name, tensor in rows[row].items():
                    tensor.copy_(value[name])


def _spec(fields: dict[str, Any]) -> Any:
    """Of `json.loads`: a `TensorSpec`, or what it is."""
    if fields.keys() != {"shape", "dtype"}:
        return fields
    return TensorSpec(tuple(fields["shape"]), getattr(torch, fields["dtype"].removeprefix("torch.")))


def brought(balancer: Balancer, weights: Sequence[Weight], joint: JointAccess, what: str) -> Iterator[NamedTensor]:
    """Yield (name, tensor) of all tensors on the first rank; other ranks run through it, too, and get none. Collective.
    If one rank fails all raise, as in `JointAccess.together`."""
    tensors = TensorList(balancer, {balancer.runtime.job.stages[0]: weights}, joint.ranks[0])
    for bucket in tensors.buckets(BUCKET_BYTES):
        arrived = tensors.end(bucket, joint.together(what, partial(tensors.begin, bucket)))
        while arrived:
            yield arrived.pop(0)


# -- the stream --------------------------------------------------------------------------------------------------------


class LogicalTensors(TensorStream):
    """The stream of `Balancer.named_logical_tensors`. ``bucket_bytes``: of tensors that travel together; a larger
    tensor is a bucket of its own. ``seconds``: that ranks wait for each other between buckets."""

    def __init__(self, tensors: TensorList, bucket_bytes: int, seconds: float) -> None:
        self._tensors, self._seconds, self._refusal = tensors, seconds, ""
        self._left, self._arrived = deque(tensors.buckets(bucket_bytes)), deque[NamedTensor]()
        self.num_experts = tensors.num_experts
        self.experts = {name: (p.layer, p.expert) for p in tensors.pieces if p.layer is not None for name in p.made}

    def __next__(self) -> NamedTensor:
        while self._left and not self._arrived:
            self._bring(self._left[0])
        if self._arrived:
            return self._arrived.popleft()
        raise ExportError(self._refusal) if self._refusal else StopIteration

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()

    def close(self, reason: str = "") -> None:
        """Stop here and drop tensors that are not taken yet. If buckets are left, other ranks are told, without waiting
        for them, and raise ExportError at the next one. With a ``reason`` a later ``next`` here raises it, too."""
        tells = bool(self._left)
        if reason and (tells or self._arrived):
            self._refusal = (
                f"this stream of weights has ended: {reason}; begin a new one (a function begins it in time for "
                "verify_export: lambda: balancer.named_logical_tensors())"
            )
        self._left.clear()
        self._arrived.clear()
        if tells:
            seconds, control = self._seconds, self._tensors.balancer.rebalancer.control
            control.broadcast_notice(lambda agreement: agreement.go_on(reason, True, seconds))

    def _bring(self, bucket: Sequence[Row]) -> None:
        """Fill a bucket, or raise what a rank has that stopped, failed or has not come. Collective."""
        tensors, seconds = self._tensors, self._seconds
        begun: Tensors = ({}, {})
        cause = None
        try:
            if not (problem := tensors.problem()):
                begun = tensors.begin(bucket)
        except Exception as error:
            problem = one_line(error, with_type=True)
        try:
            problem = tensors.balancer.rebalancer.run(lambda _, all_: all_.go_on(problem, False, seconds), seconds)
        except RuntimeError as error:
            cause = error
            problem = (
                f"a rank did not come within {seconds:g} s, or is lost ({one_line(error)}); where a consumer needs "
                "longer for a bucket, give timeout_seconds"
            )
        if problem:
            self._left.clear()
            raise ExportError(f"weights were not exported to their end: {problem}") from cause
        self._left.popleft()
        self._arrived.extend(tensors.end(bucket, begun))


# -- exports of a balancer -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exporter:
    """The exports of one balancer. Both methods are collective, between steps. ``weights_of_stages``: lists the tensors
    of each pipeline stage of this rank, as they are now."""

    balancer: Balancer
    weights_of_stages: Mapping[int, Callable[[], Sequence[Weight]]]

    def stream(self, bucket_bytes: int, dtype: torch.dtype | None, rank: int | None, seconds: float) -> LogicalTensors:
        """Return `Balancer.named_logical_tensors`, after ranks agree on these arguments and their tensors. ``seconds``:
        that ranks wait for each other between buckets. ExportError: they do not agree, or weights have no memory."""
        return LogicalTensors(self._listed(dtype, rank, bucket_bytes, seconds), bucket_bytes, seconds)

    @torch.no_grad()
    def verify(self, given: object, dtype: torch.dtype | None, seconds: float) -> str:
        """Compare ``given`` (pairs (name, tensor), a mapping, or a function that gives them) with the model's tensors,
        by checksums; return a line that says how many are equal. ``seconds``: for the slowest rank. ExportError, on all
        ranks: a tensor differs, has another name, shape or dtype, or no rank has given an expert."""
        tensors = self._listed(dtype, None)
        specs = {name: spec for piece in tensors.pieces for name, spec in piece.made.items()}
        theirs, problem = _given(specs, given, self.balancer.runtime.device)
        run = self.balancer.rebalancer.run
        # A rank that takes longer to walk its weights is waited for here.
        if found := run(lambda _, agreement: agreement.go_on(problem, False, seconds), seconds):
            raise ExportError(found)
        stream, states = LogicalTensors(tensors, BUCKET_BYTES, seconds), dict.fromkeys(specs, 0)
        for name, tensor in stream:  # 0: no rank has given it, 1: equal, 2: another
            if name in theirs:
                states[name] = 1 if theirs[name] == checksum([as_bytes(tensor)]) else 2
        outcome = run(lambda group, _: maxima(torch.tensor([*states.values()], dtype=torch.uint8), group)).tolist()
        states = dict(zip(specs, outcome, strict=True))
        if wrong := [name for name, state in states.items() if state == 2]:
            raise ExportError(
                f"verify_export: not equal to the model's: {_first(wrong)}; where experts have moved, numbers by rank "
                "(ep_rank * E/R + i) name other experts: use balancer.named_logical_tensors(), export inside "
                "balancer.logical_order(), or follow launch/examples/rl_weights.py"
            )
        if missing := [name for name, state in states.items() if not state and name in stream.experts]:
            raise ExportError(f"verify_export: experts that no rank has given: {_first(missing)}")
        return f"{sum(map(bool, outcome))} tensors are equal to the model's, all experts among them"

    def _listed(self, dtype: torch.dtype | None, rank: int | None, *options: object) -> TensorList:
        ranks, problem = self.balancer.runtime.job.ranks, self.balancer.tensors.memory.why_freed()
        if rank not in (None, *ranks):
            problem = f"rank is {rank!r}: give a rank of the job ({ranks[0]} to {ranks[-1]}), or None for all"
        if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
            problem = f"dtype is {dtype!r}: give one of floating point, or None"
        tensors = TensorList(self.balancer, {})
        try:  # also with a problem: some ranks meet in it
            weights = {stage: listed() for stage, listed in self.weights_of_stages.items()}
            tensors = TensorList(self.balancer, weights, rank, dtype)
        except Exception as error:
            problem = problem or one_line(error, with_type=True)
        chosen = repr((dtype, rank, options))
        if found := self.balancer.rebalancer.run(lambda group, _: tensors.agree(chosen, problem, group)):
            raise ExportError(f"weights cannot be exported: {found}")
        return tensors


def _given(specs: Mapping[str, TensorSpec], given: object, device: torch.device) -> tuple[dict[str, bytes], str]:
    """The checksums of what was given here, and what is wrong with it."""
    theirs: dict[str, bytes] = {}
    try:
        found: Any = given() if callable(given) else given
        for name, tensor in found.items() if isinstance(found, Mapping) else found:
            if (spec := specs.get(name)) is None:
                return theirs, f"verify_export was given {name}, and the model has no tensor of that name"
            if TensorSpec.of(tensor) != spec:
                was, kind = f"{tensor.dtype} {list(tensor.shape)}", f"{spec.dtype} {list(spec.shape)} (dtype= casts)"
                return theirs, f"verify_export was given {name} as {was}; the model's is {kind}"
            theirs[name] = checksum([as_bytes(tensor.to(device).contiguous())])
    except Exception as error:
        return theirs, f"the weights to verify could not be read: {one_line(error, with_type=True)}"
    return theirs, ""


def _first(names: Sequence[str], most: int = 8) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
