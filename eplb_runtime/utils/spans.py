"""Spans in a profiler's trace, named ``eplb_runtime dispatch(F) layer=3 epoch=7``; `observe/traces` reads them back."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

PREFIX = "eplb_runtime "
_NOTHING: AbstractContextManager[Any] = nullcontext()


def phase(
    name: str, direction: str = "", layer: int | None = None, epoch: int | None = None
) -> AbstractContextManager[Any]:
    """Return a context manager that records a span in the trace of a running profiler; without one it does nothing. The
    span's name holds all arguments; ``direction`` is ``"F"``, ``"B"`` or empty."""
    # The first is of profilers of all threads, the second of those that C++ has started for this one.
    if not profiler._is_profiler_enabled and not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NOTHING
    of_layer = "" if layer is None else f" layer={layer}"
    of_epoch = "" if epoch is None else f" epoch={epoch}"
    kind = f"({direction})" if direction else ""
    return torch.profiler.record_function(f"{PREFIX}{name}{kind}{of_layer}{of_epoch}")
