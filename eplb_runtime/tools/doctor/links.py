"""Which transports carry experts here, tried on the ranks that torchrun started, and how fast their links are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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


def try_transports(device: torch.device) -> tuple[TransportTrial, ...]:
    """Warm every transport up on the ranks of the process group and measure its links. Collective; never raises for a
    transport that cannot be used here."""
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
                return TransportTrial(name, device.type, False, failed, None, None)
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
