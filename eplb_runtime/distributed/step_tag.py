"""The tag of a forward: layer, step, placement, mode and top-k as one number, which travels with every batch's counts.
Where the tags of ranks differ, all raise at once and say which rank is in which forward."""

import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

_MEND = "every rank must run the same forwards and steps (evaluation too; generate: synced_gpus=True)"
_PLACEMENT = 0xFC
"""Bits of a tag that name the placement of the layer."""
_TOP_K = 52  # first of 8 bits of a tag


class OutOfStepError(RuntimeError):
    """Ranks exchanged counts in forwards that do not belong together."""


class ForwardTag(threading.local):
    """The forward that each thread of this rank is in, as one number that travels with the counts of every batch."""

    value = 0
    place: tuple[int, int] | tuple[None, None] = (None, None)
    """Layer and epoch of the forward that this thread is in."""

    def __init__(self, ranks: Sequence[int], rank: int) -> None:
        self._ranks, self._rank = list(ranks), rank

    @property
    def training(self) -> bool:
        """Return whether the forward that this thread is in is in training mode."""
        return bool(self.value >> 1 & 1)

    def enter(self, layer: int, step: int, training: bool, epoch: int = 0, top_k: int = 0) -> None:
        """Set this thread's ``value`` (layer, step, mode, top-k, gradients on or off) and ``place`` (layer, epoch)."""
        tag = (top_k % 256 << _TOP_K) | (step << 24) | (layer << 8) | (training << 1) | torch.is_grad_enabled()
        self.value, self.place = tag, (layer, epoch)

    def set_placement(self, changes: int) -> None:
        """Put the number of placement changes so far, modulo 64, into this thread's tag."""
        self.value = (self.value & ~_PLACEMENT) | (changes << 2 & _PLACEMENT)

    def check(self, tags: NDArray[np.int64], own: int | None = None) -> None:
        """Raise OutOfStepError unless the ranks' tags all equal ``own`` (None: this thread's); on every rank alike."""
        own = self.value if own is None else own
        if not (tags != own).any():
            return
        if not ((tags ^ own) & ~_PLACEMENT).any():
            others = ", ".join(str(rank) for rank, tag in zip(self._ranks, tags, strict=True) if tag != own)
            raise OutOfStepError(
                f"rank {self._rank} and rank {others} have different placements of MoE layer {own >> 8 & 0xFFFF}: a "
                "migration was committed on some ranks only; go back to a checkpoint"
            )
        places: dict[int, list[int]] = {}
        for rank, tag in zip(self._ranks, tags.tolist(), strict=True):
            places.setdefault(tag, []).append(rank)
        listed = "; ".join(
            f"rank {', '.join(map(str, ranks[:8]))} in {_forward(tag)}" for tag, ranks in sorted(places.items())
        )
        raise OutOfStepError(f"ranks run different forwards at once: {listed}; {_MEND}")


def _forward(tag: int) -> str:
    kind = "training" if tag >> 1 & 1 else "evaluation"
    gradients = "" if tag & 1 else " without gradients"
    layer, steps, top_k = tag >> 8 & 0xFFFF, (tag & (1 << _TOP_K) - 1) >> 24, tag >> _TOP_K
    chosen = f" with top-k {top_k}" if top_k else ""
    return f"the forward of MoE layer {layer} in {kind}{gradients} after {steps} steps{chosen}"
