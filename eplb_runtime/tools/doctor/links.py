"""Which transports carry experts here, tried on the ranks that torchrun started, and how fast their links are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from ...config import launcher_environment
from ...distributed.bandwidth import measure
from ...distributed.consensus import first_problem
from ...distributed.process_groups import backend_for
from ...distributed.transports import TRANSPORTS
from ...distributed.transports.base import Transport, TransportError
from ...topology import Topology
from ...utils.errors import one_line

TIMEOUT_SECONDS = 30.0

T = TypeVar("T")


@dataclass(frozen=True)
class TransportTrial:
    """A transport as it was found. Bandwidths of a rank that sends and receives at once, the slowest one's; None: no
    such link was there to measure."""

    name: str
    device: str
    usable: bool
    why: str
    intra_node_gb_per_second: float | None
    inter_node_gb_per_second: float | None


def try_transports(
    device: torch.device, names: Sequence[str] | None = None, on_progress: Callable[[str], None] = lambda said: None
) -> tuple[TransportTrial, ...]:
    """Warm every transport up on the ranks of the process group and measure its links. Collective; never raises for a
    transport that cannot be used here.

    Args:
        device: of this rank.
        names: of transports; None: all.
        on_progress: told what is tried next.
    """
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_SECONDS))
    found = []
    try:
        for name in TRANSPORTS if names is None else names:
            on_progress(f"trying transport {name}")
            found.append(_tried(name, device, control))
    finally:
        dist.destroy_process_group(control)
    return tuple(found)


def _tried(name: str, device: torch.device, control: dist.ProcessGroup) -> TransportTrial:
    backend = backend_for(device)
    group = dist.new_group(backend=backend, timeout=timedelta(seconds=TIMEOUT_SECONDS))
    transport: Transport | None = None
    try:
        made, problem = _attempt(lambda: TRANSPORTS[name](group, backend, device, TIMEOUT_SECONDS))
        transport = made
        failed = first_problem(problem, control)
        if failed or transport is None:
            return TransportTrial(name, device.type, False, str(failed), None, None)
        made = transport
        _, problem = _attempt(lambda: made.warm_up(time.monotonic() + TIMEOUT_SECONDS))
        failed = first_problem(problem, control)
        if failed:
            return TransportTrial(name, device.type, False, str(failed), None, None)
        topology = Topology.from_launcher(launcher_environment(), dist.get_world_size())
        measured, problem = _attempt(lambda: measure(topology, made, dist.get_rank(), control, TIMEOUT_SECONDS))
        failed = first_problem(problem, control)
        if failed or measured is None:
            return TransportTrial(name, device.type, False, str(failed), None, None)
        return _trial(name, device, measured)
    finally:
        if transport is not None:
            _attempt(transport.close)
        dist.destroy_process_group(group)


def _trial(name: str, device: torch.device, measured: Topology) -> TransportTrial:
    alone = measured.num_ranks == 1
    inside = None if measured.ranks_per_node == 1 else measured.intra_node_bandwidth / 1e9
    between = None if measured.num_nodes == 1 else measured.inter_node_bandwidth / 1e9
    why = "made ready; start it with torchrun to measure links" if alone else f"tried on {measured.num_ranks} ranks"
    return TransportTrial(name, device.type, True, why, inside, between)


def _attempt(work: Callable[[], T]) -> tuple[T | None, str]:
    """What it gives, or why it gives nothing."""
    try:
        return work(), ""
    except (TransportError, RuntimeError, ImportError, OSError, ValueError) as error:
        return None, one_line(error)
