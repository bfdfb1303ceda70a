"""Samples that a guard takes on one rank, and their encoding for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ..load.aggregate import HostCopy

STEPS = 64
"""Last steps of which a few elements of an expert, ahead of the forward, are compared with other ranks'."""
PIECE = 32
"""Those elements."""
FACTS = (
    "learning rates of the optimizer",
    "options of the optimizer",
    "trained parameters",
    "tensors given to balancer.register",
)
"""Things that are the same on all ranks which hold the same stages."""
_PROBLEM_BYTES, _STAYS_BYTES = 384, 512
_TEXT_BYTES = _PROBLEM_BYTES + _STAYS_BYTES


class Stepper(Protocol):
    """An optimizer, as far as a guard needs it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Watched:
    """Everything that a guard samples.

    Args:
        dense: parameters outside the experts, by name; equal on ranks that hold the same stages.
        experts: home rows ``[E/R, ...]`` by name.
        optimizers: step the parameters; none: inference. More may be adopted later.
        average_dense: whether the balancer averages the dense gradients itself.
        calls: number of forwards of MoE layers so far that gradients can follow.
        uncounted: number of those whose tokens did not count, because the model was in evaluation mode.
        freed: names a weight that has no memory now; empty: all have.
        immovable: says which optimizer state cannot move with experts; empty: all can.
        registered: names of tensors of the user's that move with experts.
    """

    dense: Mapping[str, Tensor]
    experts: Mapping[str, Tensor]
    optimizers: Sequence[Stepper]
    average_dense: bool
    calls: Callable[[], int]
    uncounted: Callable[[], int]
    freed: Callable[[], str]
    immovable: Callable[[], str]
    registered: Callable[[], Sequence[str]]

    def facts(self) -> tuple[str, ...]:
        """`FACTS` of this rank. Left out are numbers on a device, and optimizers of a framework's own, which may have
        different groups on each rank."""
        rates, others = [], []
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
                rates.append(_numbers(group.get("lr")))
                others.append([(key, _numbers(group[key])) for key in sorted(group) if key not in ("lr", "params")])
        trained = [parameter.requires_grad for parameter in (*self.dense.values(), *self.experts.values())]
        return repr(rates), repr(others), repr(trained), repr(list(self.registered()))


@dataclass(frozen=True)
class Sample:
    """A sample of one rank.

    Args:
        what: ``"weights"`` or ``"gradients"``.
        problem: found on this rank alone; empty: none.
        sums: int64, of all bits of each tensor that other ranks share, in transfer to the host; None: none.
        names: of tensors outside the experts, and of experts that other ranks have too.
        pieces: ``[STEPS, PIECE]``, elements of an expert; None: none.
        stays: reason for which experts must stay where they are; empty: they may move.
        facts: `FACTS`; empty: not asked for.
    """

    what: str
    problem: str
    sums: HostCopy | None = None
    names: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    pieces: HostCopy | None = None
    stays: str = ""
    facts: tuple[str, ...] = ()

    def encode(self) -> Tensor:
        """uint8 of equal length on every rank: texts, hashes of facts, of sums and of pieces."""
        text = _padded(self.problem, _PROBLEM_BYTES) + _padded(self.stays, _STAYS_BYTES)
        numbers = torch.zeros(len(FACTS) + 2 + STEPS, dtype=torch.int64)
        facts = [xxhash.xxh3_64_intdigest(fact.encode()) >> 1 for fact in self.facts]
        numbers[: len(facts)] = torch.tensor(facts, dtype=torch.int64)
        dense, experts = self.sums_of_kinds()
        numbers[len(FACTS) : len(FACTS) + 2] = torch.tensor([_hash(dense), _hash(experts)])
        if self.pieces is not None:
            # Other experts may have the same where all is one value, or overflows.
            tell = [_hash(one) if one.isfinite().all() and (one != one[:1]).any() else 0 for one in self.pieces.wait()]
            numbers[len(FACTS) + 2 :] = torch.tensor(tell)
        return torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), numbers.view(torch.uint8)])

    def sums_of_kinds(self) -> tuple[Tensor, ...]:
        """int64 sums by kind, as ``names``; waits for them."""
        sums = self.sums.wait() if self.sums is not None else torch.empty(0, dtype=torch.int64)
        return sums.split([len(names) for names in self.names]) if len(sums) else (sums, sums)


@dataclass(frozen=True)
class SampleDigest:
    """A rank's sample after `Sample.encode`.

    Args:
        problem, stays: as of `Sample`.
        facts: a hash of each.
        sums: hashes of all bits, of tensors outside the experts and of experts; 0: nothing to compare.
        pieces: a hash of each step's piece of an expert; 0: nothing to compare.
    """

    problem: str
    stays: str
    facts: Sequence[int]
    sums: Sequence[int]
    pieces: Sequence[int]

    @staticmethod
    def decode(row: Tensor) -> SampleDigest:
        """The inverse of `Sample.encode`."""
        texts = bytes(row[:_TEXT_BYTES].tolist())
        numbers = row[_TEXT_BYTES:].clone().view(torch.int64).tolist()
        sums_end = len(FACTS) + 2
        return SampleDigest(
            _text(texts[:_PROBLEM_BYTES]),
            _text(texts[_PROBLEM_BYTES:]),
            numbers[: len(FACTS)],
            numbers[len(FACTS) : sums_end],
            numbers[sums_end:],
        )


def _numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return [_numbers(one) for one in value]
    return value if isinstance(value, int | float) else None


def _padded(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")


def _hash(numbers: Tensor) -> int:
    """Hash of the bits; 0 if all are zeros."""
    bits = numbers.contiguous().view(torch.uint8).numpy()
    return (xxhash.xxh3_64_intdigest(bits.data) >> 1) or 1 if numbers.any() else 0


def bit_sums(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """int64: the sum of all bits of each tensor as whole numbers, which a change of any element changes; 0 of None.
    Computed on their device without a sync; each tensor is read once."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sums = [zero if one is None else torch.sum(_words(one.detach()), dtype=torch.int64) for one in tensors]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)


def _words(tensor: Tensor) -> Tensor:
    """View a tensor as the longest words possible, so that there are fewer to add."""
    if tensor.is_contiguous() and tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0:
        return tensor.reshape(-1).view(torch.int64)
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
