"""Samples that a guard takes on one rank, and their encoding for the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from ..load.aggregate import HostCopy

SAMPLES = 16
"""Tensors of each kind in one sample."""
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
    """

    dense: Mapping[str, Tensor]
    experts: Mapping[str, Tensor]
    optimizers: Sequence[Stepper]
    average_dense: bool
    calls: Callable[[], int]
    uncounted: Callable[[], int]
    freed: Callable[[], str]


@dataclass(frozen=True)
class Sample:
    """A sample of one rank: a problem of its own, or pieces of tensors to compare with other ranks'.

    Args:
        what: ``"weights"`` or ``"gradients"``.
        problem: found on this rank alone; empty: none.
        dense, experts: names of the sampled tensors, in the order of the pieces.
        pieces: uint8, in transfer to the host.
        sizes: bytes of each piece, dense first; 0: there was nothing to sample.
        sums: int64, of all bits of each tensor named in ``summed``, in transfer to the host; None: not asked for.
        summed: names of tensors outside the experts, and of experts that other ranks have too.
        stays: reason for which experts must stay where they are; empty: they may move.
        lone: returns such a reason from steps of single experts; waits until these are on the host.
        options: the learning rates of the optimizers' groups, and all their other numbers.
    """

    what: str
    problem: str
    dense: tuple[str, ...]
    experts: tuple[str, ...]
    pieces: HostCopy
    sizes: tuple[int, ...]
    sums: HostCopy | None = None
    summed: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    stays: str = ""
    lone: Callable[[], str] | None = None
    options: tuple[str, str] = ("", "")

    def encode(self) -> Tensor:
        """uint8 of equal length on every rank: texts, an int64 hash of each piece and of the sums."""
        stays = self.lone() if self.lone is not None else ""
        text = _padded(self.problem, _PROBLEM_BYTES) + _padded(self.stays or stays, _STAYS_BYTES)
        pieces = self.pieces.wait().split(list(self.sizes)) if self.sizes else ()
        values = [_hash(piece) for piece in pieces]
        for number, piece in enumerate(pieces[len(self.dense) :], len(self.dense)):
            # Other experts all the same have the same where everything overflows.
            values[number] = 0 if _is_one_value(piece) else values[number]
        hashes = torch.zeros(2 * SAMPLES + 4, dtype=torch.int64)
        hashes[: len(self.dense)] = torch.tensor(values[: len(self.dense)], dtype=torch.int64)
        hashes[SAMPLES : SAMPLES + len(self.experts)] = torch.tensor(values[len(self.dense) :], dtype=torch.int64)
        dense, experts = self.sums_of_kinds()
        options = [xxhash.xxh3_64_intdigest(text.encode()) >> 1 for text in self.options]
        hashes[-4:] = torch.tensor([*options, _hash(dense), _hash(experts)])
        return torch.cat([torch.frombuffer(bytearray(text), dtype=torch.uint8), hashes.view(torch.uint8)])

    def sums_of_kinds(self) -> tuple[Tensor, Tensor]:
        """int64 sums of tensors outside the experts and of experts; waits for them."""
        dense, experts = map(len, self.summed)
        sums = self.sums.wait() if self.sums is not None else torch.empty(0, dtype=torch.int64)
        return sums[:dense], sums[dense : dense + experts]


@dataclass(frozen=True)
class SampleDigest:
    """A rank's sample after `Sample.encode`.

    Args:
        problem: found on that rank alone; empty: none.
        stays: reason for which experts must stay where they are; empty: they may move.
        hashes: ``2 * SAMPLES``, dense first; 0: nothing to compare.
        sums: hashes of all bits, of tensors outside the experts and of experts; 0: nothing to compare.
        options: hashes of learning rates and of the optimizers' other numbers.
    """

    problem: str
    stays: str
    hashes: Sequence[int]
    sums: Sequence[int]
    options: Sequence[int]

    @staticmethod
    def decode(row: Tensor) -> SampleDigest:
        """The inverse of `Sample.encode`."""
        texts = bytes(row[:_TEXT_BYTES].tolist())
        *hashes, rates, others, dense, experts = row[_TEXT_BYTES:].clone().view(torch.int64).tolist()
        problem, stays = texts[:_PROBLEM_BYTES], texts[_PROBLEM_BYTES:]
        return SampleDigest(_text(problem), _text(stays), hashes, (dense, experts), (rates, others))


def options_of(optimizers: Sequence[Stepper]) -> tuple[str, str]:
    """Learning rates of the groups of torch's optimizers, and their other numbers. Left out are numbers on a device,
    and optimizers of a framework's own, which may have different groups on each rank."""
    rates, others = [], []
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else ():
            rates.append(_numbers(group.get("lr")))
            others.append([(key, _numbers(group[key])) for key in sorted(group) if key not in ("lr", "params")])
    return repr(rates), repr(others)


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


def _hash(piece: Tensor) -> int:
    """Hash of a piece; 0 if it is empty or all zeros (biases at the start, experts without tokens)."""
    return (xxhash.xxh3_64_intdigest(piece.numpy().data) >> 1) or 1 if piece.any() else 0


def bit_sums(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """int64: the sum of all bits of each tensor as whole numbers, which a change of any element changes. Computed on
    their device without a sync; each tensor is read once."""
    sums = [torch.sum(_words(tensor.detach()), dtype=torch.int64) for tensor in tensors]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64, device=device)


def _words(tensor: Tensor) -> Tensor:
    """View a tensor as the longest words possible, so that there are fewer to add."""
    if tensor.is_contiguous() and tensor.nbytes % 8 == 0 and tensor.storage_offset() * tensor.element_size() % 8 == 0:
        return tensor.reshape(-1).view(torch.int64)
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_one_value(piece: Tensor) -> bool:
    """Return whether all elements are equal, whatever their dtype."""
    words = piece[: piece.numel() // 8 * 8].clone().view(torch.int64)  # a piece may begin anywhere
    return bool((words == words[:1]).all())
