"""The package `nccl.ep`, where it is there: whether this process can use it. Nothing is imported unless asked for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib import util
from pathlib import Path
from typing import Any

import torch

from ..config import launcher_environment
from ..migration.transports import packages

INSTALL = "pip install 'eplb-runtime[nccl-ep-cu13]' (or -cu12), for a torch that takes NCCL 2.30.7 (dispatch/README.md)"
RANKS_OF_A_NODE, NODES = 8, 8
"""The most that its release notes speak of."""


def missing(device: torch.device | None = None) -> str:
    """Why this process cannot use it, in a line; empty: it can. Imports nothing of it.

    Args:
        device: the model's; None: the one that torch sees.
    """
    if why := packages.no_gpu(device):
        return why
    if not there():
        return f"the package nccl.ep is not installed: {INSTALL}"
    if not has_compiler(launcher_environment()):
        return "it compiles its kernels when they are first used and finds no nvcc: set CUDA_HOME to a CUDA toolkit"
    return ""


def there() -> bool:
    """Whether the package is installed; nothing of it is run."""
    try:
        return util.find_spec("nccl.ep") is not None
    except ModuleNotFoundError:  # nothing at all of the name `nccl`
        return False


def has_compiler(environment: Mapping[str, str]) -> bool:
    """Whether there is a CUDA compiler where the package looks for one."""
    named = environment.get("NCCL_EP_JIT_NVCC") or environment.get("NVCC")
    if named:
        return shutil.which(named) is not None
    toolkit = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    in_toolkit = bool(toolkit) and (Path(str(toolkit)) / "bin" / "nvcc").exists()
    return in_toolkit or shutil.which("nvcc", path=environment.get("PATH")) is not None


def unfit(num_ranks: int, ranks_per_node: int) -> str:
    """Why it cannot carry between so many ranks, in a line; empty: it can.

    Args:
        num_ranks: R of the EP group.
        ranks_per_node: of them that share a node.
    """
    most = RANKS_OF_A_NODE * NODES
    if min(num_ranks, ranks_per_node) > RANKS_OF_A_NODE or num_ranks > most:
        return (
            f"it carries between {RANKS_OF_A_NODE} ranks of a node and {most} in all, not {num_ranks} with "
            f"{ranks_per_node} on each node"
        )
    return ""


def imported() -> Any:
    """The package `nccl.ep`, with what makes a communicator of it from a group of torch's.

    Raises:
        ConfigError: it cannot be imported.
    """
    packages.imported("nccl.ep.interop.torch", "dispatch='nccl_ep'", INSTALL)
    return packages.imported("nccl.ep", "dispatch='nccl_ep'", INSTALL)
