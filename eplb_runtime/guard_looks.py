"""What a guard sees on one rank, and how that goes to the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor

from .gradients.rescaled import WATCHED
from .load.aggregate import HostCopy

SAMPLES = 16
"""Tensors of each kind that one look compares."""
_PROBLEM_BYTES = 384
_HASHES_END = _PROBLEM_BYTES + 2 * SAMPLES * 8


class Stepper(Protocol):
    """What a guard asks of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Watched:
    """What a guard looks at.

    Args:
        dense: parameters outside the experts, by name; equal on ranks that hold the same stages.
        experts: home rows ``[E/R, ...]`` by name.
        optimizers: that step them; none: inference. One may be adopted later.
        average_dense: whether the balancer averages the dense gradients itself.
        counts: tokens that this rank counted in the running step.
        calls: forwards of MoE layers so far.
        uncounted: those of them whose tokens did not count, because the model was in evaluation mode.
    """

    dense: Mapping[str, Tensor]
    experts: Mapping[str, Tensor]
    optimizers: Sequence[Stepper]
    average_dense: bool
    counts: Callable[[], int]
    calls: Callable[[], int]
    uncounted: Callable[[], int]


@dataclass(frozen=True)
class Look:
    """What one rank saw: a problem of its own, or pieces of tensors to compare with others.

    Args:
        what: ``"weights"`` or ``"gradients"``.
        problem: found on this rank alone; empty: none.
        dense, experts: names of the tensors that were looked at, in the order of the pieces.
        pieces: uint8, on their way to the host.
        sizes: bytes of each piece, dense first; 0: there was nothing to look at.
        factors: as `gradients.rescaled.Arrived` gives them.
    """

    what: str
    problem: str
    dense: tuple[str, ...]
    experts: tuple[str, ...]
    pieces: HostCopy
    sizes: tuple[int, ...]
    factors: tuple[float, ...] = ()

    def encode(self) -> Tensor:
        """uint8 of equal length on every rank: the problem, an int64 hash of each piece, and the factors."""
        text = self.problem.encode()[:_PROBLEM_BYTES].ljust(_PROBLEM_BYTES, b"\0")
        pieces = self.pieces.wait().split(list(self.sizes)) if self.sizes else ()
        values = [_hash(piece) for piece in pieces]
        for number, piece in enumerate(pieces[len(self.dense) :], len(self.dense)):
            # Other experts all the same have the same where everything overflows.
            values[number] = 0 if _is_one_value(piece) else values[number]
        hashes = torch.zeros(2 * SAMPLES, dtype=torch.int64)
        hashes[: len(self.dense)] = torch.tensor(values[: len(self.dense)], dtype=torch.int64)
        hashes[SAMPLES : SAMPLES + len(self.experts)] = torch.tensor(values[len(self.dense) :], dtype=torch.int64)
        factors = torch.full((WATCHED,), torch.nan, dtype=torch.float64)
        factors[: len(self.factors)] = torch.tensor(self.factors, dtype=torch.float64)
        text_bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return torch.cat([text_bytes, hashes.view(torch.uint8), factors.view(torch.uint8)])


@dataclass(frozen=True)
class Seen:
    """What `Look.encode` made of one rank's look.

    Args:
        problem: found on that rank alone; empty: none.
        hashes: ``2 * SAMPLES``, dense first; 0 says nothing.
        factors: as `gradients.rescaled.Arrived` gives them, NaN where they say nothing.
    """

    problem: str
    hashes: Sequence[int]
    factors: Sequence[float]

    @staticmethod
    def decode(row: Tensor) -> Seen:
        """The inverse."""
        return Seen(
            bytes(row[:_PROBLEM_BYTES].tolist()).rstrip(b"\0").decode(errors="replace"),
            row[_PROBLEM_BYTES:_HASHES_END].clone().view(torch.int64).tolist(),
            row[_HASHES_END:].clone().view(torch.float64).tolist(),
        )


def _hash(piece: Tensor) -> int:
    """0 for what says nothing: no piece, or all zeros (biases at the start, experts without tokens)."""
    return (xxhash.xxh3_64_intdigest(piece.numpy().data) >> 1) or 1 if piece.any() else 0


def _is_one_value(piece: Tensor) -> bool:
    """Whether all elements are the same, whatever their dtype."""
    words = piece[: piece.numel() // 8 * 8].clone().view(torch.int64)  # a piece may begin anywhere
    return bool((words == words[:1]).all())
