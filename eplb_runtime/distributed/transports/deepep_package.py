"""The package `deep_ep`, where it is there: whether this process can use it, and the buffers that its users share.

A buffer cannot be taken down by one rank (its end waits for all ranks on their GPUs), so a process keeps it. Tokens and
experts go through the same one, experts between steps. Nothing is imported unless asked for.
"""

from __future__ import annotations

import importlib
import inspect
from importlib import util
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...config import ConfigError
from ...utils.errors import one_line
from .nvshmem import claim

INSTALL = "build it from github.com/deepseek-ai/DeepEP for this torch and CUDA (dispatch/README.md)"
NUM_SMS = 20
"""Multiprocessors for communication, DeepEP's own choice."""
RANKS_OF_A_NODE = 8
"""Ranks of one node in DeepEP's kernels where there are several nodes."""
SIZED_FOR_ROW_BYTES = 16 << 10
"""So that one buffer serves rows of all widths."""
INFINIBAND = Path("/sys/class/infiniband")


def why_not(device: torch.device | None = None) -> str:
    """Return why this process cannot use DeepEP, or "". Imports nothing."""
    if why := _no_gpu(device):
        return why
    return "" if util.find_spec("deep_ep") else f"the package deep_ep is not installed: {INSTALL}"


def no_infiniband() -> str:
    """Return why the low-latency kernels cannot run on this machine, or "". They send by InfiniBand's queue pairs, also
    inside a node, and without any they trap, which ends the CUDA context."""
    if INFINIBAND.is_dir() and any(INFINIBAND.iterdir()):
        return ""
    return f"low_latency_tokens needs InfiniBand, and {INFINIBAND} has no device: leave low_latency_tokens out"


def _no_gpu(device: torch.device | None) -> str:
    """Return why kernels for Hopper GPUs and newer cannot carry here, or ""."""
    if device is not None and device.type != "cuda":
        return f"it carries between GPUs, and this model is on {device.type}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() < (9, 0):
        return "it is for Hopper and newer"
    return ""


def why_not_between(num_ranks: int, ranks_per_node: int) -> str:
    """Return why DeepEP cannot carry between so many ranks, or ""."""
    if num_ranks <= RANKS_OF_A_NODE:
        if num_ranks not in (2, 4, 8):
            return f"it carries between 2, 4 or 8 ranks of a node, not {num_ranks}"
        if ranks_per_node < num_ranks:
            return (
                f"up to {RANKS_OF_A_NODE} ranks must share a node, and these {num_ranks} have {ranks_per_node} on each"
            )
    elif num_ranks % RANKS_OF_A_NODE or ranks_per_node % RANKS_OF_A_NODE:
        return f"across nodes it wants {RANKS_OF_A_NODE} ranks of each, not {ranks_per_node} of {num_ranks}"
    return ""


def imported(asked: str = "dispatch='deepep'") -> Any:
    """Return the package `deep_ep`, or raise ConfigError with the setting that wants it."""
    try:
        package = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        raise ConfigError(f"{asked} needs the package deep_ep (no module {error.name}): {INSTALL}") from None
    except (ImportError, OSError, AssertionError, RuntimeError) as error:
        raise ConfigError(f"{asked}: the package deep_ep cannot be imported ({one_line(error)}): {INSTALL}") from None
    if not hasattr(package, "Buffer"):
        raise ConfigError(f"this version of the package deep_ep has no Buffer: {INSTALL}")
    return package


def settings(package: Any, num_ranks: int) -> tuple[Any, Any]:
    """Return DeepEP's own settings for so many ranks, with the multiprocessors that were set last: there, and back."""
    try:
        return package.Buffer.get_dispatch_config(num_ranks), package.Buffer.get_combine_config(num_ranks)
    except AssertionError:
        raise ConfigError(f"dispatch='deepep' has no settings for {num_ranks} ranks") from None


def takes_bound(package: Any, num_ranks: int) -> bool:
    """Return whether a call may be told a bound of what arrives, and waits for nothing: between nodes few versions are.
    Where they are not, Python goes on while a call waits."""
    between_nodes = getattr(package.Buffer, "internode_dispatch", None) if num_ranks > RANKS_OF_A_NODE else None
    return between_nodes is None or "num_worst_tokens" in inspect.signature(between_nodes).parameters


def refuse_filled_memory() -> None:
    """DeepEP's kernels write on a stream of their own, and torch would fill the same memory on the first one."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise RuntimeError(
            "DeepEP and torch.use_deterministic_algorithms(True): set "
            "torch.utils.deterministic.fill_uninitialized_memory = False, or fresh memory is filled over what arrives"
        )


def new_buffer(package: Any, group: dist.ProcessGroup, there: Any, back: Any) -> Any:
    """Return a buffer between the ranks of a group, for rows of any width that one call takes. Collective."""
    ranks = group.size()
    if ranks > RANKS_OF_A_NODE and (why := claim("DeepEP between nodes", group)):
        raise ConfigError(
            f"DeepEP carries between nodes by NVSHMEM: {why}; no buffer for two batches at once, for other "
            "sms or another EP group"
        )
    sizes = [
        (
            config.get_nvl_buffer_size_hint(SIZED_FOR_ROW_BYTES, ranks),
            config.get_rdma_buffer_size_hint(SIZED_FOR_ROW_BYTES, ranks) if ranks > RANKS_OF_A_NODE else 0,
        )
        for config in (there, back)
    ]
    nvlink, rdma = (max(column) for column in zip(*sizes, strict=True))
    return package.Buffer(group, num_nvl_bytes=nvlink, num_rdma_bytes=rdma)


def shared_buffer(package: Any, group: dist.ProcessGroup, num_sms: int, there: Any, back: Any) -> Any:
    """Return the buffer of so many multiprocessors that this process has between these ranks, whoever uses it; made by
    the first who asks. Collective then."""
    key = id(package), tuple(dist.get_process_group_ranks(group)), num_sms
    if key not in _buffers:
        _buffers[key] = new_buffer(package, group, there, back)
    return _buffers[key]


_buffers: dict[tuple[int, tuple[int, ...], int], Any] = {}
