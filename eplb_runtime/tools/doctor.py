"""Parts of this machine that a job can use: versions, back ends, compiled code, and transports with their speed."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import launcher_environment
from ..distributed.consensus import first_problem
from ..distributed.process_groups import backend_for
from ..distributed.transports import TRANSPORTS, deepep, measure, symmetric
from ..distributed.transports.base import Transport, TransportError
from ..topology import Topology
from ..utils.jit import cache_folder, compiles, is_compiled
from ..utils.text import one_line

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "numpy", "numba", "prometheus_client")
TIMEOUT_SECONDS = 30.0


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
    """Return what can carry tokens and experts here, each with the reason why or why not; last comes `compiled`."""
    gloo = dist.is_available() and dist.is_gloo_available()
    has_nccl = dist.is_available() and dist.is_nccl_available()
    nccl = "torch sees no CUDA device" if has_nccl else "torch was built without it"
    if has_nccl and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        nccl = f"version {version}, {torch.cuda.device_count()} devices"
    deep_ep, node_memory = deepep.why_not(), symmetric.why_not(torch.device("cuda"))
    purpose = "tokens and experts, if asked for (dispatch='deepep', transport='deepep')"
    of_copies = "copies of experts inside a node, if asked for (replica_transport='copy_engine')"
    found = [
        Backend("gloo", gloo, "experts and tokens between CPUs" if gloo else "torch was built without it"),
        Backend("nccl", has_nccl and torch.cuda.is_available(), nccl),
        Backend("deep_ep", not deep_ep, deep_ep or purpose),
        Backend("symmetric memory", not node_memory, f"{node_memory or of_copies}: it has not been run on GPUs yet"),
        Backend("hierarchical", True, "tokens cross to a node once, without deep_ep: dispatch='hierarchical'"),
    ]
    return (*found, compiled())


def compiled() -> Backend:
    """Return whether numba can compile here and write its cache; ``why`` says whether plans are compiled already."""
    folder, name = cache_folder(), "numba cache"
    shown = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
    if not compiles():
        return Backend(name, False, "numba compiles nothing here (NUMBA_DISABLE_JIT): plans take minutes")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Backend(name, False, f"{shown} cannot be written: each job compiles for itself")
    if is_compiled():
        return Backend(name, True, f"compiled, in {shown}")
    mend = "eplb-runtime warmup does it, or the first job while it trains"
    return Backend(name, True, f"not compiled: {mend}, in {shown}")


@dataclass(frozen=True)
class TransportTrial:
    """A transport as it was found. Bandwidths are those of the slowest rank while each sends and receives at once;
    None: there was no such link to measure."""

    name: str
    device: str
    usable: bool
    why: str
    intra_node_gb_per_second: float | None
    inter_node_gb_per_second: float | None


def try_transports(device: torch.device) -> tuple[TransportTrial, ...]:
    """Return a trial of each transport on the ranks of the process group: warmed up, its links measured, and closed.
    Collective. A transport that fails here is returned as not ``usable``, with the reason."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    try:
        return tuple(_tried(name, device, control) for name in TRANSPORTS)
    finally:
        dist.destroy_process_group(control)


def _tried(name: str, device: torch.device, control: dist.ProcessGroup) -> TransportTrial:
    backend, made = backend_for(device), list[Transport]()
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    topology = Topology.from_launcher(launcher_environment(), dist.get_world_size())
    steps: tuple[Callable[[], Any], ...] = (
        lambda: made.append(TRANSPORTS[name](group, backend, device, TIMEOUT_SECONDS)),
        lambda: made[0].warm_up(time.monotonic() + TIMEOUT_SECONDS),
        lambda: measure(topology, made[0], dist.get_rank(), control, TIMEOUT_SECONDS),
    )
    found: Any = None
    try:
        for step in steps:
            found, problem = _attempt(step)
            if failed := first_problem(problem, control):
                return TransportTrial(name, device.type, False, str(failed), None, None)
    finally:
        if made:
            _attempt(made[0].close)
        dist.destroy_process_group(group)
    inside = None if found.ranks_per_node == 1 else found.intra_node_bandwidth / 1e9
    between = None if found.num_nodes == 1 else found.inter_node_bandwidth / 1e9
    ranks = found.num_ranks
    why = f"tried on {ranks} ranks" if ranks > 1 else "made ready; start it with torchrun to measure links"
    return TransportTrial(name, device.type, True, why, inside, between)


def _attempt(work: Callable[[], Any]) -> tuple[Any, str]:
    """Return what it gives, or why it gives nothing."""
    try:
        return work(), ""
    except (TransportError, RuntimeError, ImportError, OSError, ValueError) as error:
        return None, one_line(error)
