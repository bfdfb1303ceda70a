"""Joint access of all ranks to a folder: a rank that fails still takes part, and every rank raises at the next check.

So no rank waits for one that gave up, and none takes a folder for complete that another could not write.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.consensus import gather_bytes, gather_rows
from .state import CheckpointError, LogicalView

Result = TypeVar("Result")


class JointAccess:
    """One rank's part in a save or load, with a group (None: alone) whose backend carries a device's tensors."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group
        self._device = device
        self.size = 1 if group is None else group.size()
        self.number = 0 if group is None else group.rank()
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)

    @classmethod
    def of(cls, view: LogicalView) -> JointAccess:
        """All ranks of the model's job; of one that is not attached, the world."""
        if view.balancer is not None:
            return cls(view.balancer._runtime.groups.everyone, view.balancer._runtime.device)
        if not dist.is_initialized():
            return cls(None, torch.device("cpu"))
        on_cpu = any(part in dist.get_backend_config() for part in ("gloo", "cpu:"))
        return cls(
            dist.group.WORLD, torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
        )

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Return the result of an action, which has succeeded on all ranks.

        Raises:
            Exception: what failed on this rank.
            CheckpointError: another rank failed; names it.
        """
        problem: Exception | None = None
        try:
            result = action()
        except Exception as error:
            problem = error
        failed = self.gather(torch.tensor([problem is not None], dtype=torch.uint8)).flatten().tolist()
        if problem is not None:
            raise problem
        if any(failed):
            rank = self.ranks[failed.index(1)]
            raise CheckpointError(f"{what}: rank {rank} failed; its own error says why")
        return result

    def on_first(self, what: str, action: Callable[[], object]) -> None:
        """Do it on the first rank alone, and wait for it. Raises as `together`."""
        self.together(what, action if self.number == 0 else lambda: None)

    def gather(self, mine: Tensor) -> Tensor:
        """Every rank's, ``[N, ...]``, on the CPU."""
        if self._group is None:
            return mine.unsqueeze(0)
        return gather_rows(mine.to(self._device), self._group).cpu()

    def gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every rank's."""
        return [mine] if self._group is None else gather_bytes(mine, self._group, self._device)

    def new_token(self) -> str:
        """Return a name that no other save has, the same on all ranks."""
        return self.gather_bytes(secrets.token_bytes(8))[0].hex()

    def folder_has(self, path: Path) -> bool:
        """Return whether a file is there, for all ranks alike; refused where only some see it."""
        seen = self.gather(torch.tensor([path.is_file()], dtype=torch.uint8)).flatten().tolist()
        if len(set(seen)) > 1:
            rank = self.ranks[seen.index(0)]
            raise CheckpointError(f"rank {rank} does not see {path}: give a folder that all ranks see")
        return bool(seen[0])
