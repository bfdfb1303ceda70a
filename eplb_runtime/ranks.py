"""The balancer's own process groups: made once at attach, shared with nobody (design rule 9).

A timeout on gloo closes the connections of the group it happened on, and no other; `rebuild` makes the groups that a
rebalance uses anew, so that one slow moment does not end balancing for ever.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch
import torch.distributed as dist

logger = logging.getLogger("eplb_runtime")

_WATCHDOG_MARGIN = timedelta(seconds=60)


class GroupError(ValueError):
    """The EP group given cannot be used."""


class ProcessGroups:
    """Groups of one balancer.

    * ``control``: gloo, all ranks that train this model (EP x EDP): counts, plans, votes.
    * ``migration``: the device's backend, one EP group: experts on their way.
    * ``dispatch``: the device's backend, one EP group: tokens.
    * ``replicas``: the device's backend, one EP group: weights to copies, gradients back.
    * ``data``: the device's backend, all ranks: gradients outside the experts, norms.
    * ``expert_data``: the device's backend, the EDP ranks, which hold the same experts; None when there is one.

    Args:
        ep_group: the host's EP group (its ranks are read, nothing is sent on it); None: all ranks.
        device: where the model is.
        timeout_seconds: for control and migration; dispatch and data keep the host's default.

    Raises:
        GroupError: EP groups of different sizes, or overlapping ones.
    """

    def __init__(self, ep_group: dist.ProcessGroup | None, device: torch.device, timeout_seconds: float) -> None:
        if not dist.is_initialized():
            raise GroupError("torch.distributed is not initialised: call init_process_group (or use torchrun) first")
        self._timeout = timedelta(seconds=timeout_seconds)
        self._device_backend = backend_for(device)
        self.world_size = dist.get_world_size()
        self._everyone = list(range(self.world_size))
        self.control = self._control()
        self.ep_sets: list[list[int]] = self._gather_ep_sets(ep_group)
        rank = dist.get_rank()
        self.ep_ranks: list[int] = next(ranks for ranks in self.ep_sets if rank in ranks)
        self.ep_rank = self.ep_ranks.index(rank)
        self.dispatch = self._one_per_ep_set("eplb_runtime dispatch", None)
        self.replicas = self._one_per_ep_set("eplb_runtime replicas", None)
        self.data = dist.new_group(self._everyone, backend=self._device_backend, group_desc="eplb_runtime data")
        self.expert_data = self._make_expert_data()
        self.migration = self._migration()
        self._background: dist.ProcessGroup | None = None

    @property
    def ep_size(self) -> int:
        return len(self.ep_ranks)

    @property
    def edp_ranks(self) -> list[int]:
        """Ranks that hold the same experts as this one, in the order of the EP groups."""
        return [ep_set[self.ep_rank] for ep_set in self.ep_sets]

    @property
    def backend(self) -> str:
        """Name of the device's backend."""
        return self._device_backend

    def rebuild(self) -> None:
        """Make control and migration anew; all ranks call it at the same step boundary.

        Raises:
            RuntimeError: a rank did not come within the timeout.
        """
        self.control = self._control()
        self.migration = self._migration()

    def background(self) -> dist.ProcessGroup:
        """A gloo group over all ranks, for work in a thread beside training; made at the first call, collectively."""
        if self._background is None:
            self._background = dist.new_group(self._everyone, backend="gloo", group_desc="eplb_runtime background")
        return self._background

    def close_balancing(self) -> None:
        """Give back what only rebalancing needs; the model goes on with the other groups."""
        self._destroy(self.control, self.migration)

    def close(self) -> None:
        """Give back all of them."""
        self.close_balancing()
        self._destroy(self.dispatch, self.replicas, self.data, self.expert_data, self._background)

    @staticmethod
    def _destroy(*groups: dist.ProcessGroup | None) -> None:
        for group in groups:
            if group is not None:
                try:
                    dist.destroy_process_group(group)
                except Exception as error:
                    # After a failure some are broken already; that is not worth an error any more.
                    logger.debug("a process group could not be destroyed: %s", error)

    def _control(self) -> dist.ProcessGroup:
        group: dist.ProcessGroup = dist.new_group(
            self._everyone, timeout=self._timeout, backend="gloo", group_desc="eplb_runtime control"
        )
        return group

    def _migration(self) -> dist.ProcessGroup:
        # On a device backend the transport gives up by itself; the backend's own watchdog ends the process, so it must
        # not be first.
        timeout = self._timeout if self._device_backend == "gloo" else self._timeout * 4 + _WATCHDOG_MARGIN
        return self._one_per_ep_set("eplb_runtime migration", timeout)

    def _one_per_ep_set(self, description: str, timeout: timedelta | None) -> dist.ProcessGroup:
        # new_group is collective over the world: every rank makes every group, and keeps its own.
        mine: dist.ProcessGroup | None = None
        for ranks in self.ep_sets:
            group: dist.ProcessGroup = dist.new_group(
                ranks, timeout=timeout, backend=self._device_backend, group_desc=description
            )
            if ranks == self.ep_ranks:
                mine = group
        if mine is None:
            raise GroupError("this rank is in no EP group")
        return mine

    def _make_expert_data(self) -> dist.ProcessGroup | None:
        mine: dist.ProcessGroup | None = None
        if len(self.ep_sets) > 1:
            for position in range(len(self.ep_ranks)):
                ranks = [ep_set[position] for ep_set in self.ep_sets]
                group = dist.new_group(ranks, backend=self._device_backend, group_desc="eplb_runtime expert data")
                if position == self.ep_rank:
                    mine = group
        return mine

    def _gather_ep_sets(self, ep_group: dist.ProcessGroup | None) -> list[list[int]]:
        """The EP groups of all ranks, ordered by their first rank."""
        ranks = self._everyone if ep_group is None else dist.get_process_group_ranks(ep_group)
        mine = torch.full((self.world_size,), -1, dtype=torch.int64)
        mine[: len(ranks)] = torch.tensor(ranks)
        all_ = [torch.empty_like(mine) for _ in self._everyone]
        dist.all_gather(all_, mine, group=self.control)
        sets = sorted({tuple(r for r in row.tolist() if r >= 0) for row in all_})
        if sorted(r for ranks_ in sets for r in ranks_) != self._everyone:
            raise GroupError(f"the EP groups {sets} do not partition the {self.world_size} ranks of the job")
        if len({len(ranks_) for ranks_ in sets}) > 1:
            raise GroupError(f"the EP groups {sets} differ in size: every EP group must hold all experts once")
        return [list(ranks_) for ranks_ in sets]


def backend_for(device: torch.device) -> str:
    """The backend that the world uses for this kind of device (``gloo``, ``nccl``, ...).

    Raises:
        GroupError: it has none.
    """
    per_device = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    backend = per_device.get(device.type)
    if backend is None:
        raise GroupError(
            f"the process group has no backend for {device.type} tensors ({dist.get_backend_config()}): initialise it "
            f"with one, such as backend='{dist.get_default_backend_for_device(device.type)}'"
        )
    return backend
