"""Triton where it is installed. Files with kernels can be imported without it, and give what plain torch gives then.

Importing Triton takes a second, so only those with a GPU import such files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - depends on what is installed
    triton = tl = None


def jit(kernel: Callable[..., Any]) -> Any:
    """``triton.jit``; a function that is never called where there is no Triton."""
    return kernel if triton is None else triton.jit(kernel)


def fits(tensor: Tensor) -> bool:
    """Whether kernels are for this tensor: it is on a CUDA device, and Triton is there."""
    return triton is not None and tensor.device.type == "cuda"


def power_of_2(at_least: int) -> int:
    """What Triton's blocks are sized by: 1, 2, 4, ..."""
    return 1 << max(0, at_least - 1).bit_length()
