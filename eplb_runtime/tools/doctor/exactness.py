"""What will be equal to the bit in a job here, and what to rounding only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ...hosts.attaching.sharding import STEADY_ROW_BYTES

Same = Literal["bits", "rounding", "verify"]


@dataclass(frozen=True)
class Width:
    """Rows that an expert tensor makes. ``steady``: on a CPU their place in memory changes no bit."""

    tensor: str
    row_bytes: tuple[int, ...]
    steady: bool


@dataclass(frozen=True)
class Exactness:
    """A comparison of two trainings. ``same``: ``"bits"``, ``"rounding"``, or ``"verify"``: ask `eplb-runtime verify`
    on the machine in question."""

    what: str
    same: Same
    why: str


def widths_of(parameters: Mapping[str, Tensor]) -> tuple[Width, ...]:
    """Of expert tensors ``[E, ...]``, one of each name."""
    found = []
    for name, tensor in parameters.items():
        if tensor.ndim > 2:
            row_bytes = tuple(width * tensor.element_size() for width in tensor.shape[1:])
            found.append(Width(name, row_bytes, not any(width % STEADY_ROW_BYTES for width in row_bytes)))
    return tuple(found)


def exactness(widths: Sequence[Width] | None, replica_slots: int) -> tuple[Exactness, ...]:
    """What to expect.

    Args:
        widths: of the model's experts; None: no model is known.
        replica_slots: copies that a rank can hold per layer.
    """
    copies = Exactness(
        f"with {replica_slots} replica slots or without",
        "rounding",
        "copies split an expert's tokens, so sums are added in another order",
    )
    return (
        _moved_on_cpu(widths),
        _moved_on_gpu(),
        *([copies] if replica_slots else []),
        Exactness("saved and loaded on as many ranks", "bits", "checkpoints hold every bit, in logical order"),
        Exactness("on another number of ranks", "rounding", "gradients are summed over other batches of tokens"),
        Exactness("beside the model whole in one process", "rounding", "its sums run over all tokens at once"),
    )


def _moved_on_cpu(widths: Sequence[Width] | None) -> Exactness:
    what = "experts moved or not, on CPUs"
    if widths is None:
        why = f"where experts make rows of multiples of {STEADY_ROW_BYTES} bytes: give --model-config"
        return Exactness(what, "verify", why)
    odd = [width for width in widths if not width.steady]
    if odd:
        rows = " and ".join(map(str, odd[0].row_bytes))
        why = f"{odd[0].tensor} makes rows of {rows} bytes, no multiples of {STEADY_ROW_BYTES}"
        return Exactness(what, "rounding", why)
    return Exactness(what, "bits", f"all rows are multiples of {STEADY_ROW_BYTES} bytes")


def _moved_on_gpu() -> Exactness:
    what = "experts moved or not, on GPUs"
    if not torch.cuda.is_available():
        return Exactness(what, "verify", "there is none here: run verify --device cuda where there is")
    return Exactness(what, "verify", "it depends on the kernels: run verify --device cuda on this very cluster")
