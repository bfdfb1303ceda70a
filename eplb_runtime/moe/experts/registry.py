"""The explicit list of tensors that have an expert dimension, per MoE layer; and how one expert looks on the wire and
in staging: its shards, one after another, each aligned. Hosts register tensors; nothing is guessed from names.
Optimizer state is found through the optimizer (`optimizer_state.py`) when it is needed: optimizers make it lazily."""

import hashlib
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from .optimizer_state import (
    PARAMETER,
    OptimizerStateError,
    Ranges,
    StateOwner,
    copies_of_each,
    expert_state,
    state_of_each,
)
from .slices import WeightMemory, has_memory, is_sliced, local

Kind = Literal["parameter", "optimizer_state", "buffer"]
Part = Literal["row", "range", "number"]
MARK = "eplb_runtime_experts"
"""What state dicts call where their experts stood."""
ALIGNMENT = 64
"""Bytes; shards start at multiples, so that staging can be viewed in any dtype."""
_WRAPPERS = ("module.", "_orig_mod.")
"""What wrappers of a model put before the names of its parameters."""


class RegistryError(ValueError):
    """A tensor that cannot be registered, or one with an expert dimension that was not."""


def why_not_written(tensor: Tensor) -> str:
    """Return in one line why an expert that arrives could not be written into this tensor, or "" if it can."""
    if tensor.is_inference():
        return "it was made inside torch.inference_mode() and cannot be written outside: clone() it"
    if not has_memory(tensor):
        return "its memory is freed, as jobs do between phases: load it before a decision"
    if any(size > 1 and stride == 0 for size, stride in zip(local(tensor).shape, local(tensor).stride(), strict=True)):
        return "its elements share memory, as expand() leaves them: clone() it"
    return ""


def _place(tensor: Tensor) -> object:
    """Equal for two tensors of the same rows in the same memory."""
    rows = (tensor.nbytes,) if tensor.is_contiguous() else (tensor.shape, tensor.stride(), tensor.itemsize)
    return tensor.data_ptr(), *rows


@dataclass(frozen=True)
class ExpertTensor:
    """One tensor whose rows along dimension 0 are this rank's home slots ``[E/R, ...]``, or this rank's slices of them.

    Args:
        name: unique within its layer; qualifies the parameter it belongs to, such as ``"down_proj/exp_avg"``.
        tensor: the live tensor, or one for each home slot where they are tensors of their own; written in place and
            never replaced.
        kind: what it is to the training step.
        copies: for each home slot, other memory with the same numbers, which is written along; empty: there is none.
        ranges: for each home slot, which elements of its flat row each of the ranks steps that hold the same experts;
            empty: each steps all of them.
        part: where there are ranges, what ``tensor`` has of each slot: the whole row, this rank's range of it alone, or
            one number for all of it (nothing, where this rank's range is empty).
    """

    name: str
    tensor: Tensor | tuple[Tensor, ...]
    kind: Kind
    copies: tuple[tuple[Tensor, ...], ...] = ()
    ranges: tuple[Ranges, ...] = ()
    part: Part = "row"

    def copies_of_row(self, local_slot: int) -> tuple[Tensor, ...]:
        """Return the other memory that holds what is in a slot; empty if there is none."""
        return self.copies[local_slot] if self.copies else ()

    def row(self, local_slot: int) -> Tensor:
        """Return what is in a slot: live memory."""
        return self.tensor[local_slot]

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """Return the tensors that the rows lie in: one for all, or one for each home slot."""
        return self.tensor if isinstance(self.tensor, tuple) else (self.tensor,)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory[0].dtype

    @property
    def row_shape(self) -> torch.Size:
        """Return the shape of a slot's whole row; flat if this rank has a range of it, ``[]`` for a number."""
        if self.part == "range":
            return torch.Size([max(end for _, end in self.ranges[0])])
        if self.part == "number":
            return torch.Size([])
        return self.tensor[0].shape if isinstance(self.tensor, tuple) else self.tensor.shape[1:]

    @property
    def row_bytes(self) -> int:
        return self.row_shape.numel() * self.dtype.itemsize


def _names_of_state(tensors: Sequence[ExpertTensor]) -> frozenset[str]:
    return frozenset(tensor.name for tensor in tensors if tensor.kind == "optimizer_state")


class ExpertTensors:
    """The registry of one model on one rank. ``num_layers``: L, MoE layers of the whole model, wherever they are;
    ``homes_per_rank``: E/R (of divided rows ``E/(R D)``); ``optimizers``: they hold the state of parameters."""

    def __init__(
        self, num_layers: int, homes_per_rank: int, optimizers: Sequence[torch.optim.Optimizer | StateOwner] = ()
    ) -> None:
        self._layers: list[list[ExpertTensor]] = [[] for _ in range(num_layers)]
        self._memory = [WeightMemory() for _ in range(num_layers)]
        self.num_layers, self.homes_per_rank, self._optimizers = num_layers, homes_per_rank, list(optimizers)
        self._left_behind: dict[Tensor, tuple[str, weakref.ref[Tensor]]] = {}
        self._state_of_layers: dict[int, frozenset[str]] = defaultdict(frozenset)
        self._misses_state = False

    @property
    def layers(self) -> list[int]:
        """Return the indices of the layers with experts on this rank; in a pipeline, those of its stages."""
        return [layer for layer, entries in enumerate(self._layers) if entries]

    @property
    def has_slots(self) -> bool:
        """Return whether experts are tensors of their own here, not rows of one."""
        return any(isinstance(entry.tensor, tuple) for entries in self._layers for entry in entries)

    def add(self, layer: int, name: str, tensor: Tensor | tuple[Tensor, ...], kind: Kind = "parameter") -> None:
        """Register a tensor ``[E/R, ...]`` of a layer, or one for each of its home slots; remember its size for
        `why_freed`. Raises RegistryError for wrong rows, unequal tensors, or a name that the layer has already."""
        entry, experts = ExpertTensor(name, tensor, kind), f"the {self.homes_per_rank} experts of this rank"
        shapes = [list(local(part).shape) for part in entry.memory]
        if isinstance(tensor, tuple):
            if len(tensor) != self.homes_per_rank or len({(row.shape, row.dtype) for row in tensor}) > 1:
                raise RegistryError(f"layer {layer}: {name} has tensors {shapes}; give equal ones for {experts}")
        elif shapes[0][:1] != [self.homes_per_rank]:
            raise RegistryError(f"layer {layer}: {name} has shape {shapes[0]}; its first dimension must be {experts}")
        if any(other.name == name for other in self._layers[layer]):
            raise RegistryError(f"layer {layer}: {name} is registered already")
        self._layers[layer].append(entry)
        self._memory[layer].add(name, *entry.memory)

    def stepped_by(self, optimizer: torch.optim.Optimizer | StateOwner) -> None:
        """Add an optimizer that keeps state of registered parameters, unless it is known."""
        if not any(optimizer is other for other in self._optimizers):
            self._optimizers.append(optimizer)

    def no_longer_stepped_by(self, optimizer: torch.optim.Optimizer | StateOwner) -> None:
        """Remove an optimizer. All that `note_state` has noted is dropped; it notes anew after the next step."""
        self._optimizers[:] = [other for other in self._optimizers if other is not optimizer]
        self._state_of_layers.clear()
        self._misses_state = True  # until the next step has ended

    def note_state(self, step: int) -> None:
        """Note the names of all optimizer state at the end of ``step``, for `why_state_lacks`; drop earlier notes. Does
        so only if ``step`` is 0 or a power of two, or state was found missing, or an optimizer was removed."""
        if self._misses_state or not step & (step - 1):
            self._misses_state = False
            self._state_of_layers.clear()
            self.note_state_here()

    def note_state_here(self) -> None:
        """Add the names of state that exists now to what was noted, ahead of a pause in which the job may take it away.
        Nothing is added for experts that cannot move."""
        with suppress(OptimizerStateError, RegistryError):  # experts cannot move, which a check of its own says
            for layer in self.layers:
                self._state_of_layers[layer] |= _names_of_state(self.of_home(layer))

    def why_state_lacks(self, tensors: Mapping[int, Sequence[ExpertTensor]] | None = None) -> str:
        """Return in one line which optimizer state was noted and is not among what moves now (``tensors`` by layer;
        None: of all layers): put back later, it would be that of other experts. "" if there is none, or state cannot
        move at all. Where state lacks, the next `note_state` notes anew."""
        with suppress(OptimizerStateError, RegistryError):
            tensors = {layer: self.of_home(layer) for layer in self.layers} if tensors is None else tensors
            for layer, of_layer in tensors.items():
                if missing := self._state_of_layers[layer] - _names_of_state(of_layer):
                    self._misses_state = True
                    return (
                        f"{min(missing)} of MoE layer {layer} is not in the optimizer's state any more: load it first, "
                        "or balancer.adopt(new, instead_of=old)"
                    )
        return ""

    def mark_gradients_stale(self, layer: int) -> None:
        """Mark the gradients that a layer has now as stale: they are of experts that have moved away. They may be read
        and zeroed, but not used (`check_no_stale_gradients`). Call it on every rank that has the layer."""
        for entry in self._layers[layer]:
            for parameter in entry.memory if entry.kind == "parameter" else ():
                if parameter.grad is not None:
                    self._left_behind[parameter] = (entry.name, weakref.ref(parameter.grad))

    @property
    def has_left_behind(self) -> bool:
        """Return whether any gradient is marked as stale."""
        return bool(self._left_behind)

    def check_no_stale_gradients(self, parameter: Tensor | None = None) -> None:
        """Raise RuntimeError if a parameter (None: any) has a stale gradient that is not zero; else remove its mark. Of
        slices (DTensors) a zero gradient raises, too."""
        for one in list(self._left_behind) if parameter is None else [parameter]:
            name, left = self._left_behind.get(one, ("", None))
            gradient = one.grad
            # Slices are added to without a hook, after `forget_zeroed`.
            if left is not None and gradient is not None and left() is gradient and (is_sliced(one) or gradient.any()):
                raise RuntimeError(
                    f"experts have moved since the last step, but the gradient of {name} is still that of the experts "
                    "that were here before: call optimizer.zero_grad() after each step"
                )
            self._left_behind.pop(one, None)

    def forget_zeroed(self) -> None:
        """Remove the mark of stale gradients that are zero now: they may be added to."""
        for parameter in list(self._left_behind):
            if parameter.grad is not None and not local(parameter.grad).any():
                del self._left_behind[parameter]

    def parameters(self, layer: int | None = None) -> list[Tensor]:
        chosen = self._layers if layer is None else [self._layers[layer]]
        return [part for entries in chosen for one in entries if one.kind == "parameter" for part in one.memory]

    def by_expert(self, layer: int) -> list[Tensor | tuple[Tensor, ...]]:
        """Return a layer's parameters, not buffers: each ``[E/R, ...]``, or a tuple with a tensor for each slot."""
        return [entry.tensor for entry in self._layers[layer] if entry.kind == "parameter"]

    def moves_by_itself(self) -> set[int]:
        """Return the memory addresses (``data_ptr``) of registered buffers; an optimizer may hold the same memory."""
        buffers = (entry for entries in self._layers for entry in entries if entry.kind == "buffer")
        return {local(tensor).data_ptr() for entry in buffers for tensor in entry.memory}

    def largest_home_bytes(self) -> int:
        """Return the bytes that move with one expert, state included, in the layer where they are most; of divided
        state the mean over ranks. 0 without layers."""

        def nbytes(one: ExpertTensor) -> int:
            return -(-one.row_bytes // len(one.ranges[0])) if one.part == "range" else one.row_bytes

        return max((sum(map(nbytes, self.of_home(layer))) for layer in self.layers), default=0)

    def ranges_of(self, parameters: tuple[Tensor, ...]) -> tuple[Ranges, ...]:
        """Return, per parameter (one expert each), (first, end) of the elements that each rank with the expert steps,
        by the first optimizer that divides any; ``()`` for one that it does not divide; ``()`` alone: none divides."""
        owners = (one for one in self._optimizers if not isinstance(one, torch.optim.Optimizer))
        return next(filter(any, (tuple(map(owner.ranges_of, parameters)) for owner in owners)), ())

    def why_freed(self, layer: int) -> str:
        """Return in one line which tensor of a layer has no memory or another size than it had; "" if none."""
        return self._memory[layer].why_freed()

    def of_home(self, layer: int) -> list[ExpertTensor]:
        """Return all that moves with a home of this layer: parameters, buffers and optimizer state that exists, in one
        order on all ranks. Memory that has two names is there once: moved twice, experts of one rank would be back."""
        named: dict[object, ExpertTensor] = {}
        for tensor in self._named_of_home(layer):
            known = tensor.row_bytes and all(part.data_ptr() and has_memory(part) for part in tensor.memory)
            named.setdefault(tuple(map(_place, tensor.memory)) if known else tensor.name, tensor)
        return list(named.values())

    def _named_of_home(self, layer: int) -> Iterator[ExpertTensor]:
        for entry in self._layers[layer]:
            if isinstance(entry.tensor, tuple):
                yield from self._of_separate(entry, entry.tensor)
                continue
            name, parameter = entry.name, entry.tensor
            yield ExpertTensor(name, local(parameter), entry.kind)
            if entry.kind != "parameter":
                continue
            for optimizer in self._optimizers:
                for key, state in expert_state(optimizer, parameter, self.moves_by_itself()):
                    yield ExpertTensor(f"{name}/{key}", local(state), "optimizer_state")

    def _of_separate(self, entry: ExpertTensor, rows: tuple[Tensor, ...]) -> Iterator[ExpertTensor]:
        """All that moves with experts that are tensors of their own, also where ranks divide their state."""
        if entry.kind != "parameter":
            yield entry
            return
        name, ranges = entry.name, self.ranges_of(rows)
        copies = [copies_of_each(optimizer, rows) for optimizer in self._optimizers]
        yield replace(entry, copies=next((of[PARAMETER] for of in copies if PARAMETER in of), ()), ranges=ranges)
        for optimizer, of in zip(self._optimizers, copies, strict=True):
            for key, state in state_of_each(optimizer, rows, divided=bool(ranges)):
                is_number = all(one.ndim == 0 for one in state if one.numel())
                part: Part = "row" if not ranges else "number" if is_number else "range"
                if part == "range" and not all(one.ndim == 1 for one in state):
                    raise OptimizerStateError(
                        f"an optimizer keeps {key!r} of {name} in shapes {[list(one.shape) for one in state]}: flat "
                        "ranges of experts are expected"
                    )
                yield ExpertTensor(f"{name}/{key}", state, "optimizer_state", of.get(key, ()), ranges, part)


def matched(tensors: Any, parameters: Mapping[str, Tensor], experts: Sequence[str]) -> dict[str, Tensor]:
    """Return, by name, the tensors (live memory) that belong to the expert parameters named in ``experts``.
    ``parameters``: the model's, in order. ``tensors``: a module with parameters or buffers of the same names; a mapping
    by name; or a list, one for each parameter. Raises RegistryError if not all are found, or shapes differ."""
    if isinstance(tensors, nn.Module):
        tensors = {**dict(tensors.named_buffers()), **dict(tensors.named_parameters())}
    elif isinstance(tensors, list | tuple) and len(tensors) == len(parameters):
        tensors = dict(zip(parameters, tensors, strict=True))
    by_name = tensors if isinstance(tensors, Mapping) else {}
    plain = {_plain(name): value for name, value in by_name.items() if isinstance(name, str)}
    found: dict[str, Tensor] = {}
    for name in experts:
        tensor = plain.get(_plain(name))
        if not isinstance(tensor, Tensor):
            raise RegistryError(
                f"nothing in it belongs to {name}: give a module or a dict of tensors with the names of the model's "
                f"parameters, or a list in the order of model.parameters()"
            )
        if tensor.shape != parameters[name].shape:
            raise RegistryError(
                f"what belongs to {name} has shape {tuple(tensor.shape)}, and this rank's experts have "
                f"{tuple(parameters[name].shape)}: make it from the attached model's parameters"
            )
        found[name] = tensor.detach() if tensor.requires_grad else tensor
    return found


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "") if name.startswith(wrapper) else name.replace(f".{wrapper}", ".")
    return name


# -- The record of one expert -----------------------------------------------------------------------------------------


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Shard:
    """Live memory of one expert on one rank that travels by itself: its row of a tensor, or a range of that; with the
    ``copies`` of it that are written along, and its ``offset`` in the record."""

    tensor: ExpertTensor
    memory: Tensor
    copies: tuple[Tensor, ...]
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.memory.nbytes

    def within(self, staged: Tensor, first: int = 0) -> Tensor:
        """Return the view of this shard, in its dtype and shape, in ``staged``: a record's bytes from ``first`` on."""
        return staged[self.offset - first : self.end - first].view(self.memory.dtype).view(self.memory.shape)

    def write(self, values: Tensor) -> None:
        """Copy values into the live memory and into all copies of it, in place."""
        self.memory.copy_(values)
        for copied in self.copies:
            copied.copy_(values.reshape(copied.shape))


_Part = tuple[ExpertTensor, Tensor, tuple[Tensor, ...]]
"""Tensor, memory and copies that become a shard."""


@dataclass(frozen=True, eq=False)
class Record:
    """Shards of one expert that travel together; ``nbytes`` includes the padding between them."""

    shards: tuple[Shard, ...]
    nbytes: int

    @classmethod
    def of(cls, parts: Iterable[_Part]) -> Self:
        """Return a record in which parts lie one after another, each at a multiple of `ALIGNMENT`."""
        shards, offset = [], 0
        for tensor, memory, copies in parts:
            shards.append(Shard(tensor, memory.detach(), tuple(copy.detach() for copy in copies), offset))
            offset += _aligned(memory.nbytes)
        return cls(tuple(shards), offset)

    def pack(self, staged: Tensor) -> None:
        """Copy the live memory of all shards into ``staged``, uint8 of ``nbytes``."""
        for shard in self.shards:
            shard.within(staged).copy_(shard.memory)

    def unpack(self, staged: Tensor) -> None:
        """Copy ``staged``, uint8 of ``nbytes``, into the live memory of all shards and its copies, in place."""
        for shard in self.shards:
            shard.write(shard.within(staged))


class End(NamedTuple):
    """Where a piece of a record leaves or arrives: the home's row on its EP rank, and which rank of those with it."""

    row: int
    part: int


@dataclass(frozen=True)
class RecordFormat:
    """What moves with an expert of one layer, in registry order."""

    tensors: tuple[ExpertTensor, ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of an expert's record at most: with ranges its pieces need more padding."""
        # Each rank that has a range of a row sends that by itself, in up to three parts.
        return sum(
            _aligned(one.row_bytes) + (3 * len(one.ranges[0]) * ALIGNMENT if one.ranges else 0) for one in self.tensors
        )

    @property
    def is_divided(self) -> bool:
        """Return whether ranks with the same experts each keep a range of their state: records go in pieces."""
        return any(one.ranges for one in self.tensors)

    def digest(self) -> bytes:
        """Return a hash of what moves: names, kinds, dtypes, shapes and ranges. Ranks where it is equal can exchange
        records. Divided state is left out: a rank whose ranges are empty does not know what others keep."""
        rows = [one for one in self.tensors if one.part == "row"]
        return _digest([f"{one.name} {one.kind} {one.dtype} {tuple(one.row_shape)} {one.ranges or ''}" for one in rows])

    def state_digest(self) -> bytes:
        """Return a hash of the divided state's keys and dtypes; ranks where it is equal can exchange that state. Empty:
        this rank keeps none. Raises OptimizerStateError if a layer's tensors have different state."""
        kept: dict[str, list[str]] = {}
        for one in self.tensors:
            if one.part != "row":
                name, _, key = one.name.rpartition("/")
                kept.setdefault(name, []).append(f"{key} {one.dtype} {one.part}")
        if len(set(map(tuple, kept.values()))) > 1:
            raise OptimizerStateError(
                f"an optimizer that divides experts over ranks keeps other state for some of their tensors: {kept}"
            )
        return _digest(next(iter(kept.values()))) if kept else b""

    def row(self, local_slot: int) -> Record:
        """Return the record of all that moves with the expert in a slot."""
        return Record.of((one, one.row(local_slot), one.copies_of_row(local_slot)) for one in self.tensors)

    def piece(self, source: End, destination: End, *, here: End) -> Record:
        """Return the part of a record that ``source`` sends to ``destination``, one of them ``here``; it may be empty.
        A tensor without ranges goes only to the rank at the same place among those that hold the expert. With ranges,
        weights go from the rank that steps them to each rank that will hold the expert, and state from the rank that
        keeps it to the one that will. Raises OptimizerStateError if elements of that range are not here."""
        parts: list[_Part] = []
        for one in self.tensors:
            memory, copied = one.row(here.row).detach(), one.copies_of_row(here.row)
            if not one.ranges:
                if source.part == destination.part:
                    parts.append((one, memory, copied))
                continue
            kept, will_keep, own = (one.ranges[end.row][end.part] for end in (source, destination, here))
            begin = own[0] if one.part == "range" else 0
            for first, end in _spans(kept, will_keep, whole=one.part == "row"):
                part = memory if one.part == "number" else memory.view(-1)[first - begin : end - begin]
                if one.part != "number" and part.numel() != end - first:
                    where = f"elements {first} to {end} of an expert"
                    raise OptimizerStateError(f"{one.name}: {where} are not all here")
                stepped = own[0] <= first and end <= own[1]  # other memory has what is stepped here alone
                copies = [copy.view(-1)[first - own[0] : end - own[0]] for copy in copied if stepped]
                parts.append((one, part, tuple(copies)))
        return Record.of(parts)


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b("\n".join(words).encode(), digest_size=16).digest()


def _spans(kept: tuple[int, int], will_keep: tuple[int, int], *, whole: bool) -> list[tuple[int, int]]:
    """What of ``kept`` is in ``will_keep``; or all of it, parted at the ends of that."""
    first, end = (min(max(place, kept[0]), kept[1]) for place in will_keep)
    spans = [(kept[0], first), (first, end), (end, kept[1])] if whole else [(first, end)]
    return [(begin, stop) for begin, stop in spans if begin < stop]
