"""Parts of this machine that can be used: versions, back ends, compiled code."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from ...distributed import node_memory
from ...distributed.transports import deepep_package
from ...utils.jit import cache_folder, compiles, is_compiled

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "numba", "prometheus_client")


@dataclass(frozen=True)
class Backend:
    """Something that this package can use, and whether it can here."""

    name: str
    usable: bool
    why: str


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("eplb-runtime", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def backends() -> tuple[Backend, ...]:
    """Return what carries tokens and experts, and whether decisions are compiled already."""
    gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl = "torch sees no CUDA device" if has_nccl else "torch was built without it"
    if has_nccl and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        nccl = f"version {version}, {torch.cuda.device_count()} devices"
    deep_ep, symmetric = deepep_package.why_not(), node_memory.why_not(torch.device("cuda"))
    purpose = "tokens (dispatch='auto' takes it where ranks fit), experts, copies"
    of_copies = "copies of experts inside a node, if asked for (copies_by='copy_engine')"
    found = [
        Backend("gloo", gloo, "experts and tokens between CPUs" if gloo else "torch was built without it"),
        Backend("nccl", has_nccl and torch.cuda.is_available(), nccl),
        Backend("deep_ep", not deep_ep, deep_ep or purpose),
        Backend("symmetric memory", not symmetric, f"{symmetric or of_copies}: it has not been run on GPUs yet"),
        Backend("hierarchical", True, "tokens cross to a node once, without deep_ep: dispatch='hierarchical'"),
    ]
    return (*found, compiled())


def compiled() -> Backend:
    """Return whether what decisions need is compiled already, and where it is kept."""
    folder, name = cache_folder(), "numba cache"
    shown = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
    if not compiles():
        return Backend(name, False, "numba compiles nothing here (NUMBA_DISABLE_JIT): plans take minutes")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Backend(name, False, f"{shown} cannot be written: each job compiles for itself")
    if is_compiled():
        return Backend(name, True, f"compiled, in {shown}")
    return Backend(
        name, True, f"not compiled: eplb-runtime warmup does it, or the first job while it trains, in {shown}"
    )
