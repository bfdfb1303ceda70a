"""The balancer's own process groups: made once, at attach, and shared with nobody (design rule 9).

A timeout on gloo closes the connections of the group it happened on, and no other; `ProcessGroups.rebuild` makes those
anew that a rebalance uses, so that one slow moment does not end balancing for ever.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .ranks import GroupError, Ranks, gather_job, job_ranks

logger = logging.getLogger("eplb_runtime")

_WATCHDOG_MARGIN = timedelta(seconds=60)
_POLL_SECONDS = 0.0002


class ProcessGroups:
    """The process groups of one balancer.

    * ``control``: gloo, all ranks of the job: counts, plans, votes.
    * ``everyone``: the device's backend, all ranks of the job: norms over stages, agreement on a gradient's overflow.
    * ``data``: the device's backend, ranks that hold the same stages: gradients outside the experts.
    * ``expert_data``: the device's backend, ranks that hold the same experts; None when there is one.
    * ``dispatch``: the device's backend, one EP group: tokens.
    * ``replicas``: the device's backend, one EP group: weights to copies, gradients back.
    * ``migration``: the device's backend, one EP group: experts on their way.

    Every group of a device backend is used by all its ranks as soon as it is made: NCCL builds a communicator of the
    whole group at its first call, and ranks that have nothing to send would never come to that call.

    Args:
        ranks: what the host said of this rank.
        stage_layers: MoE layers of each stage that is here, in the order of ``ranks.stages``.
        device: where the model is.
        timeout_seconds: for control and migration, and for making connections; the others keep the host's default.

    Raises:
        GroupError: the ranks contradict each other; equal on all of them.
        RuntimeError: a rank did not come within the timeout.
    """

    def __init__(
        self,
        ranks: Ranks,
        stage_layers: Sequence[int],
        device: torch.device,
        timeout_seconds: float,
    ) -> None:
        if not dist.is_initialized():
            raise GroupError("torch.distributed is not initialised: call init_process_group (or use torchrun) first")
        self._timeout = timedelta(seconds=timeout_seconds)
        self._device = device
        self.backend = backend_for(device)
        everyone = job_ranks(ranks)
        self._made: list[dist.ProcessGroup] = []
        self._background: dist.ProcessGroup | None = None
        self._whole_world = len(everyone) == dist.get_world_size()
        try:
            self.control = self._new([everyone], "gloo", "control", self._timeout)
            self.job = gather_job(ranks, everyone, stage_layers, self.control)
            job = self.job
            self.everyone = self._new([everyone], self.backend, "everyone")
            self.data = self.everyone
            if len(job.stage_sets) > 1:
                self.data = self._new(job.data_sets, self.backend, "data")
            self.dispatch = self._new(job.ep_sets, self.backend, "dispatch")
            self.replicas = self._new(job.ep_sets, self.backend, "replicas")
            self.expert_data: dist.ProcessGroup | None = None
            if len(job.ep_sets) > len(job.stage_sets):
                group = self._new(job.edp_sets, self.backend, "expert data")
                self.expert_data = group if len(job.edp_ranks) > 1 else None
            self.migration = self._new_migration()
        except BaseException:
            self.close()
            raise

    def rebuild(self) -> None:
        """Make control and migration anew; all ranks of the job call it at the same step boundary.

        Raises:
            RuntimeError: a rank did not come within the timeout.
        """
        self._retire(self.control, self.migration)
        self.control = self._new([self.job.ranks], "gloo", "control", self._timeout)
        self.migration = self._new_migration()

    def background(self) -> dist.ProcessGroup:
        """A gloo group over all ranks, for work in a thread beside training; made at the first call, collectively."""
        if self._background is None:
            self._background = self._new([self.job.ranks], "gloo", "background")
        return self._background

    def close_balancing(self) -> None:
        """Give back what only rebalancing needs; the model goes on with the other groups."""
        self._retire(self.control, self.migration)

    def close(self) -> None:
        """Give back all of them."""
        self._retire(*self._made)

    # -- making and giving back ----------------------------------------------------------------------------------------

    def _new_migration(self) -> dist.ProcessGroup:
        # On a device backend the transport gives up by itself; the backend's own watchdog ends the process, so it must
        # not be first, nor act at all.
        timeout = self._timeout if self.backend == "gloo" else self._timeout * 4 + _WATCHDOG_MARGIN
        with _watchdog_that_ends_nothing():
            return self._new(self.job.ep_sets, self.backend, "migration", timeout)

    def _new(
        self, sets: Sequence[Sequence[int]], backend: str, purpose: str, timeout: timedelta | None = None
    ) -> dist.ProcessGroup:
        """This rank's group of several that part the job's ranks; every rank of the job asks for all of them."""
        description = f"eplb_runtime {purpose}"
        rank = dist.get_rank()
        mine: dist.ProcessGroup | None = None
        if backend == "nccl" and self._whole_world and dist.distributed_c10d._get_default_group().bound_device_id:
            # One split of the world's communicator makes them all; new_group would split it once for each.
            mine = dist.split_group(split_ranks=[list(s) for s in sets], timeout=timeout, group_desc=description)
        else:
            for ranks in sets:
                # Every rank of the world must call new_group, unless its members alone agree on a name. They can only
                # if they have made equally many groups before; so that is for jobs that leave part of the world out.
                if self._whole_world or rank in ranks:
                    group = dist.new_group(
                        list(ranks),
                        timeout=timeout,
                        backend=backend,
                        use_local_synchronization=not self._whole_world,
                        group_desc=description,
                    )
                    mine = group if rank in ranks else mine
        if mine is None:
            raise GroupError(f"rank {rank} is in no group for {purpose}")
        self._made.append(mine)
        self._meet(mine, backend)
        return mine

    def _meet(self, group: dist.ProcessGroup, backend: str) -> None:
        """The first call on a group, by all its ranks, within the timeout."""
        token = torch.zeros(1, device="cpu" if backend == "gloo" else self._device)
        work = dist.all_reduce(token, group=group, async_op=True)
        assert work is not None
        wait_on_host([work], group, self._timeout.total_seconds(), on_device=backend != "gloo")

    def _retire(self, *groups: dist.ProcessGroup) -> None:
        if not self._whole_world:
            # torch names such groups by their ranks and the number of groups that there are: with one less, the next
            # would take a name, and addresses in the store, that were used before. So they stay to the end.
            return
        for group in groups:
            self._made = [other for other in self._made if other is not group]
            try:
                if self.backend != "gloo":
                    group.abort()  # what is under way would hold the communicator, and the host, for ever
                dist.destroy_process_group(group)
            except Exception as error:
                # After a failure some are broken already; that is not worth an error any more.
                logger.debug("a process group could not be destroyed: %s", error)


def wait_on_host(works: Sequence[dist.Work], group: dist.ProcessGroup, seconds: float, *, on_device: bool) -> None:
    """Wait until all are done; the host sees the end, not only the device's stream.

    Args:
        on_device: whether the group's backend works on a device's streams (NCCL), or on the host (gloo).

    Raises:
        RuntimeError: not done in time, or failed. The group is broken then; on a device backend it was aborted.
    """
    deadline = time.monotonic() + seconds
    if not on_device:
        for work in works:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        return
    # work.wait() makes the stream wait, not the host; and a watchdog would end the process instead of telling us.
    while not all(work.is_completed() for work in works):
        if time.monotonic() > deadline:
            group.abort()
            raise RuntimeError(f"not done in {seconds:g} s")
        time.sleep(_POLL_SECONDS)
    for work in works:
        work.wait()


@contextlib.contextmanager
def _watchdog_that_ends_nothing() -> Iterator[None]:
    """Inside, NCCL groups are made whose watchdog leaves the process alone: who waits on them looks for himself."""
    name = "TORCH_NCCL_BLOCKING_WAIT"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
