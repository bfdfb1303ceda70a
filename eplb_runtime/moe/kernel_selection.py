"""Triton kernels for a layer's counting, routing and moving of rows on a GPU; else plain torch.

The first batch of each variant of a kernel is computed by plain torch, too. One that fails to compile or changes a bit
is reported in one line of the log, and torch is used from then on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..utils.errors import one_line
from .dispatch import permute
from .dispatch.permute import Leaving, Moves
from .routing.splitter import Counted, count_choices, deal_out

logger = logging.getLogger("eplb_runtime")


@dataclass(frozen=True)
class Kernels:
    """Functions that a kernel or plain torch computes: `count_choices`, `deal_out`, the order of rows and sums of
    choices, and `count_and_map` (None: the counter, then the table)."""

    count: Callable[[Tensor, int], Counted] = count_choices
    deal: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] = deal_out
    moves: Moves = permute.PLAIN
    count_and_map: Callable[..., Tensor] | None = None


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for a device, each compared with plain torch, which is used without a GPU or Triton."""
    if device.type != "cuda":
        return Kernels()
    from ..utils.triton import triton

    if triton is None:
        logger.warning("Triton is not installed, so plain torch counts and sums: pip install triton")
        return Kernels()
    from .dispatch import kernels as moves
    from .routing import kernels as routing

    return Kernels(
        CheckedKernel("counting choices", routing.count_by_blocks, count_choices),
        CheckedKernel("dealing choices out to replicas", routing.deal_by_kernels, deal_out),
        Moves(
            CheckedKernel("the order of choices by slot", moves.leaving, permute.leaving, _of_leaving),
            CheckedKernel("the order of rows that arrive", moves.arriving, permute.arriving),
            CheckedKernel("sums of a token's choices", moves.sum_choices, permute.sum_choices),
            CheckedKernel("sums of the choices that are here", moves.sum_here, permute.sum_here),
        ),
        CheckedKernel("counting and looking up", routing.count_and_map, routing.torch_count_and_map),
    )


class CheckedKernel:
    """A kernel in the place of a function of plain torch with the same arguments, which both may write into. The first
    batch that has rows is computed by both, for each set of dtypes, widths and flags: a kernel is compiled for each.
    ``written`` returns the part of a result that is not left uninitialised."""

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        plain: Callable[..., Any],
        written: Callable[[Any, Sequence[Any]], Any] = lambda result, args: result,
    ) -> None:
        self._name, self._kernel, self._plain, self._written = name, kernel, plain, written
        self._chosen: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *args: Any, **options: Any) -> Any:
        variant = tuple(map(_kind, (*args, *options.values())))
        if variant in self._chosen:
            return self._chosen[variant](*args, **options)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return self._kernel(*args, **options)  # comparing would wait for the device
        return self._compare(variant, args, options)

    def _compare(self, variant: tuple[Any, ...], args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        copies = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
        expected = self._plain(*copies, **options)
        has_rows = _has_rows((expected, [arg for arg in args if isinstance(arg, Tensor)]))
        try:
            found = self._kernel(*args, **options)
            ours, plain = (self._written(result, args) for result in (found, expected))
            if not _same(ours, plain) or not _same(args, copies):
                raise ValueError("it gives something else")
        except Exception as error:
            logger.warning("kernel for %s: %s; plain torch is used", self._name, one_line(error))
            self._chosen[variant] = self._plain
            for given, copy in zip(args, copies, strict=True):
                if isinstance(given, Tensor):
                    given.copy_(copy)
            return expected
        if has_rows:
            self._chosen[variant] = self._kernel
        return found


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.shape[1:]
    return argument if isinstance(argument, bool) else type(argument)


def _same(found: Any, expected: Any) -> bool:
    """Return whether all tensors are equal that plain torch gives; a kernel may give more."""
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    return not isinstance(expected, tuple | list) or all(map(_same, found, expected))


def _has_rows(result: Any) -> bool:
    return bool(result.numel()) if isinstance(result, Tensor) else all(_has_rows(one) for one in result or ())


def _of_leaving(result: Leaving, args: Sequence[Any]) -> Leaving:
    """What leaves, without room for what each rank sends here, nor for more tokens than are sent."""
    counts_RW, sent = result.counts_2RW[0], result.token_N.shape[0]
    if result.source_row_N1 is not None:
        sent = int(counts_RW[:, args[3]].sum())
    return result._replace(counts_2RW=counts_RW, token_N=result.token_N[:sent])
