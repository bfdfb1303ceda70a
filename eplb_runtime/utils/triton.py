"""Triton where it is installed. Files with kernels can be imported without it; nothing there is called then.

Importing Triton takes a second, so only those with a GPU import such files.
"""

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - depends on what is installed
    triton = tl = None


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """``triton.jit``, bare or with its options; a function that is never called where there is no Triton."""
    if kernel is None:
        return lambda kernel: jit(kernel, **options)
    return kernel if triton is None else triton.jit(kernel, **options)


def power_of_2(at_least: int) -> int:
    """What Triton's blocks are sized by: 1, 2, 4, ..."""
    return 1 << max(0, at_least - 1).bit_length()
