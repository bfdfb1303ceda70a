"""The balancer's own process groups: made once, at attach, and shared with nobody (design rule 9).

A timeout on gloo closes the connections of the group it happened on, and no other. `reconnect.py` makes control and
migration again at a step boundary, so that one slow moment does not end balancing for ever.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from . import private_groups
from .consensus import wait_on_host
from .ranks import GroupError, Ranks, gather_job, job_ranks
from .setting_up import SETUP_SECONDS, allow_open_files, why_attach_failed
from .store import JobStore, name_of_job

logger = logging.getLogger("eplb_runtime")

_WATCHDOG_MARGIN = timedelta(seconds=60)
_OF_BALANCING = ("control", "migration", "background")
"""Purposes of groups that a closed model does not compute with."""


class ProcessGroups:
    """The process groups of one balancer.

    * ``control``: gloo, all ranks of the job: counts, plans, votes. Made again after a failure.
    * ``migration``: the device's backend, `Job.migration_ranks`: those that have each row of an expert tensor once (one
      EP group, unless rows or the optimizer's state are divided), in the order of the rows: experts on their way. Made
      again with ``control``.
    * ``data``: the device's backend, ranks that hold the same stages: gradients outside the experts.
    * ``expert_data``: the device's backend, ranks that hold the same experts; None when there is one.
    * ``parts``: the device's backend, ranks that have the homes of this EP rank together; None when it is this one.
    * ``twins``: the device's backend, ranks that have the same part of them; None when it is this one.
    * ``dispatch``: the device's backend, one EP group: tokens.
    * ``counts``: the device's backend, one EP group: what goes where, ahead of tokens. Apart from ``dispatch`` on gloo,
      which ends the process where messages that meet differ in size, as those of a forward and a backward would.

    Every group of a device backend is used by all its ranks as soon as it is made: NCCL builds a communicator of the
    whole group at its first call, and ranks that have nothing to send would never come to that call.

    Args:
        ranks: what the host said of this rank.
        stage_layers: MoE layers of each stage that is here, in the order of ``ranks.stages``.
        device: where the model is.
        timeout_seconds: for control and migration, from `settle` on; the others keep the host's default.
        only_control: make ``control`` alone, for ranks that compare what they have and exchange nothing.

    Attributes:
        store: the launcher's, under a name that no other balancer has.
        timeout_seconds: as given.
        setup_seconds: for each step until `settle`, making these groups among them.

    Raises:
        GroupError: the ranks contradict each other, or one cannot go on; on all of them.
        RuntimeError: as `explain` gives it.
    """

    def __init__(
        self,
        ranks: Ranks,
        stage_layers: Sequence[int],
        device: torch.device,
        timeout_seconds: float,
        *,
        only_control: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise GroupError("torch.distributed is not initialised: call init_process_group (or use torchrun) first")
        self.timeout_seconds = timeout_seconds
        self.setup_seconds = max(timeout_seconds, SETUP_SECONDS)
        self._setup = timedelta(seconds=self.setup_seconds)
        self._device = device
        self.backend = backend_for(device)
        self._members = job_ranks(ranks)
        self._made: list[dist.ProcessGroup] = []
        self._times_made: Counter[str] = Counter()
        self._is_balancing = True
        self._whole_world = len(self._members) == dist.get_world_size()
        world = dist.distributed_c10d._get_default_group().get_group_store()
        # Ranks meet in it when they connect, perhaps on a thread of ours: nobody else may have to wait for that.
        self._launcher_store = world.clone()  # type: ignore[attr-defined]
        self._name = name_of_job(self._launcher_store, self._members, dist.get_rank())
        self.store = JobStore(world, self._name, timeout_seconds)
        self._launcher_store.set_timeout(self._setup)
        try:
            allow_open_files()
            self.control = self._new([self._members], "gloo", "control", self._setup)
            self.job = job = gather_job(ranks, self._members, stage_layers, self.control)
            if only_control:
                return
            self.data = self._new(job.data_sets, self.backend, "data")
            self.dispatch = self._new(job.ep_sets, self.backend, "dispatch")
            self.counts = self._new(job.ep_sets, "gloo", "counts") if self.backend == "gloo" else self.dispatch
            self.expert_data: dist.ProcessGroup | None = None
            self.twins: dist.ProcessGroup | None = None
            if len(job.ep_sets) > len(job.stage_sets):
                group = self._new(job.edp_sets, self.backend, "expert data")
                self.expert_data = group if len(job.edp_ranks) > 1 else None
            self.parts = self.expert_data
            if any(len(ranks) > 1 for ranks in job.twin_sets):
                self.parts = self._new(job.part_sets, self.backend, "parts") if job.row_division > 1 else None
                self.twins = self._new(job.twin_sets, self.backend, "twins")
            self.migration = self._new_migration("migration", self._setup)
        except BaseException as error:
            cause = self.explain(error)
            self.close()
            if cause:
                raise GroupError(cause) from error
            raise

    def explain(self, error: BaseException) -> str:
        """Tell the others that setting up has failed here; returns why it did on all, or "": by this error."""
        return why_attach_failed(self.store, self._members, dist.get_rank(), error, self._hang_up_on_all)

    def settle(self) -> None:
        """All is set up: from here on, control and migration have the balancer's timeout."""
        seconds = timedelta(seconds=self.timeout_seconds)
        _give_time(self.control, "gloo", seconds)
        _give_time(self.migration, self.backend, self._of_migration(seconds))

    def new_control(self, attempt: int, seconds: float) -> dist.ProcessGroup:
        """Make another control group, which is not used until `take_over`. Collective."""
        control = self._new([self.job.ranks], "gloo", f"control {attempt}", timedelta(seconds=seconds))
        _give_time(control, "gloo", timedelta(seconds=self.timeout_seconds))
        return control

    def new_migration(self, attempt: int, seconds: float) -> dist.ProcessGroup:
        """Make another migration group, as `new_control` does."""
        migration = self._new_migration(f"migration {attempt}", timedelta(seconds=seconds))
        _give_time(migration, self.backend, self._of_migration(timedelta(seconds=self.timeout_seconds)))
        return migration

    def take_over(self, control: dist.ProcessGroup, migration: dist.ProcessGroup) -> list[dist.ProcessGroup]:
        """Use these groups from now on. Returns those before them, for `give_back`."""
        before = [self.control, self.migration]
        self.control, self.migration = control, migration
        return before

    def hang_up(self) -> None:
        """Close the connections of control and migration, so that a rank which waits for this one learns it at once."""
        private_groups.hang_up(self.control)
        private_groups.hang_up(self.migration)

    def give_back(self, *groups: dist.ProcessGroup) -> None:
        """End these groups."""
        self._retire(*groups)

    # -- made where they are first asked for, which all ranks of the job do at the same place --------------------------

    @cached_property
    def everyone(self) -> dist.ProcessGroup:
        """The device's backend, all ranks of the job: norms over stages, agreement on a gradient's overflow."""
        if len(self.job.stage_sets) == 1:
            return self.data
        return self._new([self.job.ranks], self.backend, "everyone")

    @cached_property
    def rows(self) -> dist.ProcessGroup:
        """The device's backend, ranks that have each row of an expert tensor once: `dispatch`, unless divided."""
        return self._new(self.job.row_sets, self.backend, "rows") if self.job.divided_rows else self.dispatch

    @cached_property
    def replicas(self) -> dist.ProcessGroup:
        """The device's backend, the ranks of ``rows``: weights to copies, gradients back."""
        return self._new(self.job.row_sets, self.backend, "replicas")

    @cached_property
    def background(self) -> dist.ProcessGroup:
        """A gloo group over all ranks, for work in a thread beside training."""
        return self._new([self.job.ranks], "gloo", "background")

    @cached_property
    def second_channel(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """``dispatch`` and ``counts`` once more, for a second batch at once."""
        dispatch = self._new(self.job.ep_sets, self.backend, "dispatch 2")
        return dispatch, self._new(self.job.ep_sets, "gloo", "counts 2") if self.backend == "gloo" else dispatch

    def of_nodes(self, ranks_per_node: int) -> dist.ProcessGroup:
        """Return a gloo group of the ranks of ``replicas`` that share this rank's node, to meet in. Collective."""
        each = ranks_per_node * self.job.row_division
        sets = [ranks[first : first + each] for ranks in self.job.row_sets for first in range(0, len(ranks), each)]
        return self._new(sets, "gloo", "node")

    def go_with(self, models: Sequence[nn.Module]) -> None:
        """Note when the last of these models is gone, for `give_back_dropped`: a closed model still computes with some
        groups. Nothing ends where the collector runs, which is on any thread and in the middle of anything.
        """
        here = [True for _ in models]

        def gone() -> None:
            here.pop()
            if not here:
                _dropped.append(self)

        for model in models:
            weakref.finalize(model, gone).atexit = False

    def close_balancing(self) -> None:
        """Give back what only rebalancing needs; the model goes on with the other groups. Threads and connections of
        gloo go with the last who holds a group: the others have let go of theirs."""
        self._retire(*(group for group in self._made if group.group_desc.split()[-1] in _OF_BALANCING))
        self.__dict__.pop("background", None)
        del self.control, self.migration
        self.store.close()
        self._is_balancing = False

    def close(self) -> None:
        """Give back all of them."""
        self._retire(*self._made)
        self.store.close()
        self._is_balancing = False

    def _end_dropped(self) -> None:
        if self._is_balancing:
            logger.warning(
                "a balanced model was let go of without balancer.close(): its groups, threads and communicators stayed "
                "until now; call close() on all ranks before you drop a model"
            )
        self.close()

    # -- making and giving back ----------------------------------------------------------------------------------------

    def _new_migration(self, purpose: str, timeout: timedelta) -> dist.ProcessGroup:
        return self._new(self.job.migration_sets, self.backend, purpose, self._of_migration(timeout), private=True)

    def _of_migration(self, timeout: timedelta) -> timedelta:
        """On a device backend the transport gives up by itself; the backend's own watchdog ends the process, so it must
        not be first, nor act at all."""
        return timeout if self.backend == "gloo" else timeout * 4 + _WATCHDOG_MARGIN

    def _hang_up_on_all(self) -> None:
        for group in self._made:
            if group.name() == "gloo":
                private_groups.hang_up(group)

    def _new(
        self,
        sets: Sequence[Sequence[int]],
        backend: str,
        purpose: str,
        timeout: timedelta | None = None,
        private: bool = False,
    ) -> dist.ProcessGroup:
        """Return this rank's group of several that part the job's ranks; every rank of the job asks for all of them.
        ``timeout`` is also that of making it; ``private``: also over NCCL under a name of our own, as over gloo
        always."""
        rank = dist.get_rank()
        # The store keeps the addresses of a group that is gone: one made again needs another name.
        self._times_made[purpose] += 1
        ranks = next((tuple(together) for together in sets if rank in together), None)
        if ranks is None:
            raise GroupError(f"rank {rank} is in no group for {purpose}")
        description, making = f"eplb_runtime {purpose.rstrip('0123456789 ')}", timeout or self._setup
        if backend == "gloo" or (private and backend == "nccl"):
            name = f"{self._name}/{purpose}/{self._times_made[purpose]} of {ranks[0]}"
            group = private_groups.make(self._launcher_store, name, ranks, rank, backend, making, description)
            if timeout is None:
                _give_time(group, backend, host_timeout(backend))
        else:
            # They share the world's communicator where they can.
            group = self._new_of_torch(sets, backend, description, timeout)
        self._made.append(group)
        try:
            self._first_call(group, backend, making)
        except BaseException:
            self._retire(group)
            raise
        return group

    def _new_of_torch(
        self, sets: Sequence[Sequence[int]], backend: str, description: str, timeout: timedelta | None
    ) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        timeout = timeout if timeout is not None else host_timeout(backend)
        if backend == "nccl" and self._whole_world and dist.distributed_c10d._get_default_group().bound_device_id:
            # One split of the world's communicator makes them all; new_group would split it once for each.
            mine = dist.split_group(split_ranks=[list(s) for s in sets], timeout=timeout, group_desc=description)
            sets = ()
        for ranks in sets:
            # Every rank of the world must call new_group, unless its members alone agree on a name. They can only
            # if they have made equally many groups before; so that is for jobs that leave part of the world out.
            if self._whole_world or dist.get_rank() in ranks:
                group = dist.new_group(
                    list(ranks),
                    timeout=timeout,
                    backend=backend,
                    use_local_synchronization=not self._whole_world,
                    group_desc=description,
                )
                mine = group if dist.get_rank() in ranks else mine
        assert mine is not None
        return mine

    def _first_call(self, group: dist.ProcessGroup, backend: str, timeout: timedelta) -> None:
        """The first call on a group, by all its ranks, within the timeout."""
        token = torch.zeros(1, device="cpu" if backend == "gloo" else self._device)
        work = dist.all_reduce(token, group=group, async_op=True)
        assert work is not None
        wait_on_host([work], group, timeout.total_seconds(), on_device=backend != "gloo")

    def _retire(self, *groups: dist.ProcessGroup) -> None:
        for group in groups:
            private = private_groups.is_private(group)
            if not private and not self._whole_world:
                # torch names such groups by their ranks and the number of groups that there are: with one less, the
                # next would take a name, and addresses in the store, that were used before. So they stay to the end.
                continue
            self._made = [other for other in self._made if other is not group]
            try:
                if group.name() != "gloo":
                    group.abort()  # what is under way would hold the communicator, and the host, for ever
                if private:
                    private_groups.forget(group)
                else:
                    dist.destroy_process_group(group)
            except Exception as error:
                # After a failure some are broken already; that is not worth an error any more.
                logger.debug("a process group could not be destroyed: %s", error)


_dropped: list[ProcessGroups] = []
"""Those whose models are gone."""


def give_back_dropped() -> None:
    """Give back the groups of models that are gone. Where all ranks have come, and no device works on what these have
    launched: to end a communicator is each rank's own act, and one that is in use elsewhere would fail there."""
    while _dropped:
        _dropped.pop(0)._end_dropped()


def _give_time(group: dist.ProcessGroup, backend: str, timeout: timedelta) -> None:
    """Set how long collectives of a gloo group wait from here on. Other backends have no such wait."""
    if backend == "gloo":
        group._get_backend(torch.device("cpu"))._set_default_timeout(timeout)


def host_timeout(backend: str) -> timedelta:
    """How long the host lets its own process group of this backend wait (``init_process_group(timeout=...)``)."""
    group: Any = dist.distributed_c10d._get_default_group()
    for part in dist.get_backend_config().split(","):
        device, _, name = part.partition(":")
        if name == backend:
            options = getattr(group._get_backend(torch.device(device)), "options", None)
            timeout: timedelta = getattr(options, "_timeout", dist.distributed_c10d.default_pg_timeout)
            return timeout
    return dist.distributed_c10d.default_pg_timeout


def backend_for(device: torch.device) -> str:
    """Return the backend that the world uses for this kind of device (``gloo``, ``nccl``, ...)."""
    per_device = dict(part.split(":") for part in dist.get_backend_config().split(",") if ":" in part)
    backend = per_device.get(device.type)
    if backend is None:
        raise GroupError(
            f"the process group has no backend for {device.type} tensors ({dist.get_backend_config()}): initialise it "
            f"with one, such as backend='{dist.get_default_backend_for_device(device.type)}'"
        )
    return backend
