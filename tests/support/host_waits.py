"""Where the host would wait for a device, seen on a CPU: code that is for CPUs and GPUs alike runs inside `no_waits`,
which refuses whatever reads a tensor's values on the host and whatever makes a tensor whose size depends on them.

`Tensor.to("cpu")` is not seen: what is uploaded looks the same where both are the host. Nor is what numpy reads of
memory that it was given before.
"""

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ON_CPUS_ALONE = ("require_known", "_raise_if_it_differed", "raise_if_found", "_taken")
"""Functions of ours that look at values of tensors on a CPU, where it costs no wait, and never on a device."""

_aten = torch.ops.aten
_READS = (Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__, Tensor.__contains__)
"""Those that pass no operator by."""
_OPERATORS = {
    _aten._local_scalar_dense.default: "item, bool, int or float",
    _aten.is_nonzero.default: "bool",
    _aten.equal.default: "equal",
    _aten.allclose.default: "allclose",
    _aten.nonzero.default: "nonzero",
    _aten.masked_select.default: "masked_select",
    _aten._unique2.default: "unique",
    _aten.unique_dim.default: "unique",
    _aten.unique_consecutive.default: "unique_consecutive",
    _aten.bincount.default: "bincount",
}
_INDEXING = (_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default)
_MASKS = (torch.bool, torch.uint8)


class HostWaitsError(AssertionError):
    """The host would have waited for the device here."""


@contextmanager
def no_waits(but_in: Collection[str] = ON_CPUS_ALONE) -> Iterator[None]:
    """Inside, on this thread, a wait raises `HostWaitsError`.

    Args:
        but_in: functions and modules by name, and what they call, that may wait.
    """

    def notice(what: str) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name in but_in or frame.f_globals.get("__name__") in but_in:
                return
            frame = frame.f_back
        raise HostWaitsError(f"the host would wait for a device: {what}")

    with _Calls(notice), _Operators(notice):
        yield


class _Calls(TorchFunctionMode):
    def __init__(self, notice: Callable[[str], None]) -> None:
        self._notice = notice

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _READS:
            self._notice(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    supports_higher_order_operators = True  # those that graphs of torch.compile call ours by

    def __init__(self, notice: Callable[[str], None]) -> None:
        super().__init__()
        self._notice = notice

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _OPERATORS:
            self._notice(_OPERATORS[func])
        elif func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._notice("repeat_interleave without output_size")
        elif func in _INDEXING and any(index is not None and index.dtype in _MASKS for index in args[1]):
            self._notice("an index of booleans")
        return func(*args, **kwargs)
