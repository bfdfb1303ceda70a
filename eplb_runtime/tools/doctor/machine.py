"""What of this machine can be used: versions, back ends, compiled code."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import torch
import torch.distributed as dist

from ...balancer.compile_ahead import compiles, functions_on_disk, is_compiled
from ...distributed import node_memory
from ...distributed.transports import deepep_package
from ...utils.jit import cache_folder
from ...utils.tables import counted

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "numba")
POLICY = "incremental"
"""What jobs plan with unless told otherwise."""


@dataclass(frozen=True)
class Backend:
    """Something that this package can use, and whether it can here."""

    name: str
    usable: bool
    why: str


def compiled() -> Backend:
    """Whether what decisions need is compiled already, and where it is kept."""
    if not compiles():
        return Backend("numba cache", False, "numba compiles nothing here (NUMBA_DISABLE_JIT): plans take minutes")
    folder = cache_folder()
    if not os.access(folder, os.W_OK | os.X_OK):
        return Backend("numba cache", False, f"{_home(folder)} cannot be written: each job compiles for itself")
    if is_compiled(POLICY):
        return Backend("numba cache", True, f"compiled, in {_home(folder)}")
    if functions := functions_on_disk():
        found = f"partly: {counted(functions, 'function')} in {_home(folder)}"
        why = f"{found}; the rest is compiled by eplb-runtime warmup, or beside the first job's training"
        return Backend("numba cache", True, why)
    return Backend("numba cache", True, f"empty: the first job compiles beside training, into {_home(folder)}")


def _home(path: Path) -> str:
    """As people write it."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("eplb-runtime", *PACKAGES):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def backends() -> tuple[Backend, ...]:
    """What carries tokens and experts, and what optional parts need."""
    gloo = dist.is_available() and dist.is_gloo_available()
    return (
        Backend("gloo", gloo, "experts and tokens between CPUs" if gloo else "torch was built without it"),
        _nccl(),
        _deepep(),
        _symmetric_memory(),
        Backend("hierarchical", True, "tokens cross to a node once, without deep_ep: dispatch='hierarchical'"),
        _extra("transformers", "Hugging Face models"),
        _extra("matplotlib", "simulate --plot"),
        _extra("yaml", "TensorRT-LLM's placement files", "pyyaml"),
        _extra("accelerate", "Transformers' Trainer"),
        _extra("shtab", "completion in a shell"),
    )


def _nccl() -> Backend:
    if not (dist.is_available() and dist.is_nccl_available()):
        return Backend("nccl", False, "torch was built without it")
    if not torch.cuda.is_available():
        return Backend("nccl", False, "torch sees no CUDA device")
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return Backend("nccl", True, f"version {version}, {torch.cuda.device_count()} devices")


def _deepep() -> Backend:
    missing = deepep_package.why_not()
    return Backend(
        "deep_ep", not missing, missing or "tokens (dispatch='auto' takes it where ranks fit), experts, copies"
    )


def _symmetric_memory() -> Backend:
    missing = node_memory.why_not(torch.device("cuda"))
    why = "it has not been run on GPUs yet"
    purpose = "copies of experts inside a node, if asked for (copies_by='copy_engine')"
    return Backend("symmetric memory", not missing, f"{missing or purpose}: {why}")


def _extra(module: str, purpose: str, package: str | None = None) -> Backend:
    if util.find_spec(module) is not None:
        return Backend(module, True, purpose)
    return Backend(module, False, f"{purpose}: pip install {package or module}")
