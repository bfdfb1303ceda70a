"""Triton where it is installed. Files with kernels can be imported without it; only ranks with a GPU import them."""

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:  # pragma: no cover - depends on what is installed
    triton = tl = None


def jit(kernel: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return ``triton.jit`` of the kernel; without ``kernel``, a decorator with these options. Without Triton installed
    the kernel is returned as it is."""
    if kernel is None:
        return lambda kernel: jit(kernel, **options)
    return kernel if triton is None else triton.jit(kernel, **options)


def power_of_2(at_least: int) -> int:
    """Return the smallest power of 2 that is at least ``at_least``; 1 for numbers below 1."""
    return 1 << max(0, at_least - 1).bit_length()
