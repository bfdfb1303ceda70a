"""The node that this rank is on, by a name that all its processes give it."""

from __future__ import annotations

import os
from pathlib import Path

from ..config import launcher_environment


def node_of_this_rank() -> str:
    """Return a name, equal on ranks that the launcher has put on the same node of the same machine, and sees as such:
    memory crosses namespaces of the network and of names, so the launcher's word counts as well as the kernel's."""
    environment = launcher_environment()
    kernel = Path("/proc/sys/kernel/random/boot_id")
    machine = kernel.read_text().strip() if kernel.exists() else ""
    node = environment.get("GROUP_RANK", environment.get("SLURM_NODEID", ""))
    return f"{os.uname().nodename}/{machine}/{node}"
