"""Triton kernels for a layer's counting, routing and moving of rows on a GPU; else plain torch.

The first batch of each variant of a kernel is computed by plain torch, too. One that fails to compile or changes a bit
is reported in one line of the log, and torch is used from then on.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..utils.text import one_line
from .dispatch import permute
from .routing import slots

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Kernels:
    """Functions that a kernel or plain torch computes. ``count_and_map``: None: the counter, then the table."""

    count: Callable[[Tensor, int], slots.Counted] = slots.count_choices
    deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = slots.assign_slots
    leaving: Callable[..., permute.Leaving] = permute.leaving
    arriving: Callable[..., permute.Arriving] = permute.arriving
    sum_choices: Callable[..., Tensor] = permute.sum_choices
    sum_local_choices: Callable[..., Tensor] = permute.sum_local_choices
    count_and_map: Callable[..., Tensor] | None = None


def kernels_for(device: torch.device) -> Kernels:
    """Return the functions for a device: on CUDA Triton kernels, each compared with plain torch on its first batch;
    else, or without Triton (one warning in the log), plain torch."""
    if device.type != "cuda":
        return Kernels()
    from ..utils.triton import triton

    if triton is None:
        logger.warning("Triton is not installed, so plain torch counts and sums: pip install triton")
        return Kernels()
    from . import kernels

    return Kernels(
        CheckedKernel("counting choices", kernels.count_by_blocks, slots.count_choices),
        CheckedKernel("dealing choices out to replicas", kernels.deal_by_kernels, slots.assign_slots),
        CheckedKernel("the order of choices by slot", kernels.leaving, permute.leaving, _of_leaving),
        CheckedKernel("the order of rows that arrive", kernels.arriving, permute.arriving),
        CheckedKernel("sums of a token's choices", kernels.sum_choices, permute.sum_choices),
        CheckedKernel("sums of the choices that are here", kernels.sum_local_choices, permute.sum_local_choices),
        CheckedKernel("counting and looking up", kernels.count_and_map, count_and_map),
    )


def count_and_map(ids_TK: Tensor, table_E: Tensor, counts_E: Tensor, real_T: Tensor | None = None) -> Tensor:
    """Add a batch's choices to ``counts_E``, in place, and return their slots, int64 ``[T, K]``, by plain torch.
    Padding (``real_T`` False) has slots and is not counted; None: there is no padding."""
    ids_N = ids_TK.reshape(-1).to(torch.int64)
    counted_TK = torch.ones_like(ids_TK, dtype=torch.int64)
    if real_T is not None:
        counted_TK = counted_TK * real_T[:, None]
    counts_E.scatter_add_(0, ids_N, counted_TK.reshape(-1))
    return table_E.index_select(0, ids_N).view(ids_TK.shape)


@dataclass
class CheckedKernel:
    """A kernel in the place of a function of plain torch with the same arguments, which both may write into. Both take
    the first batch with rows of each set of dtypes, widths and flags. ``written`` returns the initialised part."""

    name: str
    kernel: Callable[..., Any]
    plain: Callable[..., Any]
    written: Callable[[Any, Sequence[Any]], Any] = lambda result, args: result
    chosen: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict)

    def __call__(self, *args: Any, **options: Any) -> Any:
        given = (*args, *options.values())
        variant = tuple((x is True, getattr(x, "dtype", type(x)), getattr(x, "shape", ())[1:]) for x in given)
        if variant in self.chosen:
            return self.chosen[variant](*args, **options)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self.kernel(*args, **options)  # comparing would wait for the device
        copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        expected = self.plain(*copies, **options)
        try:
            found = self.kernel(*args, **options)
            ours, plain = (self.written(result, args) for result in (found, expected))
            if not _same(ours, plain) or not _same(args, copies):
                raise ValueError("results differ from torch's")
        except Exception as error:
            logger.warning("plain torch replaces the Triton kernel for %s (slower): %s", self.name, one_line(error))
            self.chosen[variant] = self.plain
            for given, copy in zip(args, copies, strict=True):
                if isinstance(given, Tensor):
                    given.copy_(copy)
            return expected
        if _has_rows((expected, [arg for arg in args if isinstance(arg, Tensor)])):
            self.chosen[variant] = self.kernel
        return found


def _same(found: Any, expected: Any) -> bool:
    """Return whether all tensors are equal that plain torch gives; a kernel may give more."""
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return not isinstance(expected, tuple | list) or all(map(_same, found, expected))


def _has_rows(result: Any) -> bool:
    return bool(result.numel()) if isinstance(result, Tensor) else all(_has_rows(one) for one in result or ())


def _of_leaving(result: permute.Leaving, args: Sequence[Any]) -> permute.Leaving:
    """What leaves, without room for what each rank sends here, nor for more tokens than are sent."""
    counts_RW, sent = result.counts_2RW[0], result.token_N.shape[0]
    if result.source_row_N1 is not None:
        sent = int(counts_RW[:, args[3]].sum())
    return result._replace(counts_2RW=counts_RW, token_N=result.token_N[:sent])
