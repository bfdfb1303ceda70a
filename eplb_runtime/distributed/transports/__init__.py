"""Transports of expert bytes by the name that users give; one file each, all behind `base.Transport`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .automatic import automatic
from .base import Transport
from .cuda_ipc import CudaIpc
from .deepep import DeepEP
from .nixl import Nixl
from .nvshmem import Nvshmem
from .torch_p2p import TorchPointToPoint

TRANSPORTS: dict[str, Callable[[dist.ProcessGroup, str, torch.device, float], Transport]] = {
    "torch": TorchPointToPoint,
    "cuda_ipc": CudaIpc,
    "nixl": Nixl,
    "nvshmem": Nvshmem,
    "deepep": DeepEP,
    "auto": automatic,
}
"""``MigrationConfig.transport`` -> made of the EP group's migration group, the name of its backend, the model's device,
and the most seconds that anything is waited for."""
