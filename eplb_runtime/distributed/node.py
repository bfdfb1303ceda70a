"""The node that this rank is on, and the GPU that it uses, by names that all processes of a node give them."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..config import launcher_environment


def node_of_this_rank() -> str:
    """Return a name, equal on ranks that the launcher has put on the same node of the same machine, and sees as such.

    Memory crosses namespaces of the network and of names, so the launcher's word counts as well as the kernel's.
    """
    environment = launcher_environment()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    machine = kernel.read_text().strip() if kernel.exists() else ""
    node = environment.get("GROUP_RANK", environment.get("SLURM_NODEID", ""))
    return f"{os.uname().nodename}/{machine}/{node}"


def identity_of(device: torch.device) -> str:
    """Return the name of a GPU that all processes of its node give it: numbers differ, and are all 0 where a launcher
    shows each rank one GPU. Empty: the device is no GPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
