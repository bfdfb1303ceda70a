"""What Megatron-Core 0.16 to 0.19 asks of a machine without a GPU: nothing here is needed, or done, where there is one.

Not a copy of its code: the calls that it makes of CUDA, answered so that its own code runs on a CPU with gloo.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist


class NoStream:
    """A CUDA stream or event where everything is done when it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> NoStream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, _: Any = None) -> NoStream:
        return self


def prepare() -> None:
    """Before Megatron is imported; once in a process."""
    if torch.cuda.is_available() or getattr(torch.cuda.Stream, "__name__", "") == "NoStream":
        return
    torch.cuda.current_device = lambda: "cpu"  # where layers and buffers are made
    torch.cuda.Stream = NoStream  # the dispatcher's copies to the host, communication beside computing
    for name in ("current_stream", "default_stream", "stream"):
        setattr(torch.cuda, name, lambda *_: NoStream())
    torch.cuda.synchronize = lambda *_: None
    for name in ("tensor", "zeros", "empty"):  # flags and norms of the optimizer, with device="cuda"
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)  # optimizers sort parameters by "torch.cuda.FloatTensor"
    dist.all_to_all_single = _with_sizes_as_lists(dist.all_to_all_single)  # given NumPy arrays, which NCCL takes
    import megatron.core.tensor_parallel.random as random

    random.CudaRNGStatesTracker.fork = _no_fork  # dropout has CUDA generators of its own; set dropout to 0 here
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)  # which recompute keeps and sets again
    random._set_cuda_rng_state = lambda *_, **__: None
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # asked for without TransformerEngine, and not defined then


def _on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        # Megatron's calls alone: others shall fail as ever.
        if str(kwargs.get("device", "")).startswith("cuda") and "megatron" in _caller():
            kwargs["device"] = "cpu"
        return make(*args, **kwargs)

    return made


def _caller() -> str:
    return str(sys._getframe(2).f_globals.get("__name__", ""))


def _named_as_on_cuda(own: Callable[..., Any]) -> Callable[..., Any]:
    def type_of(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or "megatron" not in _caller():
            return own(tensor, *args, **kwargs)
        return own(tensor).replace("torch.", "torch.cuda.")

    return type_of


def _with_sizes_as_lists(own: Callable[..., Any]) -> Callable[..., Any]:
    def exchange(
        output: Any, given: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kw: Any
    ) -> Any:
        sizes = [s.tolist() if hasattr(s, "tolist") else s for s in (output_split_sizes, input_split_sizes)]
        return own(output, given, *sizes, **kw)

    return exchange


@contextlib.contextmanager
def _no_fork(*_: Any) -> Iterator[None]:
    yield
