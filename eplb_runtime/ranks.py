"""Who shares what with whom: the ranks of a job, its expert-parallel groups and stages, and the balancer's own groups.

Nothing here assumes that the world is one copy of one model: a job may be a part of the world, its ranks may hold
different pipeline stages, and several EP groups may hold the same experts. The process groups are made once, at attach,
and shared with nobody (design rule 9); `rebuild` makes those anew that a rebalance uses, after a timeout broke them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger("eplb_runtime")

MAX_STAGES = 16
"""Pipeline stages that one rank can hold."""
_WATCHDOG_MARGIN = timedelta(seconds=60)
_POLL_SECONDS = 0.0002


class GroupError(ValueError):
    """The ranks given cannot be used."""


@dataclass(frozen=True)
class Ranks:
    """What a host says of its ranks. All are global ranks; every rank of a job gives its own.

    Args:
        ep: among which this rank's experts are spread; None: all ranks that hold the same stages.
        job: ranks of the model that is balanced, all stages and copies of it; None: the world.
        stages: which pipeline stages this rank holds, counted over the whole model, one for each module that is
            attached, in their order.
        gradient_divisor: what gradients of experts are divided by, so that they fit those of the dense parameters;
            None: the number of ranks that hold the same stages, as averaging over data-parallel ranks has it. 1 where
            the loss is divided by all ranks' tokens already.
    """

    ep: tuple[int, ...] | None = None
    job: tuple[int, ...] | None = None
    stages: tuple[int, ...] = (0,)
    gradient_divisor: int | None = None

    @classmethod
    def of_group(cls, ep_group: dist.ProcessGroup | None) -> Ranks:
        """One whole model on every EP group of the world."""
        return cls(None if ep_group is None else tuple(dist.get_process_group_ranks(ep_group)))


@dataclass(frozen=True)
class Job:
    """All that follows from what the ranks of a job said; equal on all of them but for the fields of one rank.

    Args:
        ranks: of the job, ascending; the first one plans.
        rank: this one.
        ep_sets: the EP groups of the job, ordered by first rank, all of one size.
        stages_of_set: the pipeline stages that the ranks of each EP group hold.
        layers_of_stage: MoE layers of each stage; layers are numbered over the whole model, stage by stage.
        gradient_divisor: of expert gradients.
    """

    ranks: tuple[int, ...]
    rank: int
    ep_sets: tuple[tuple[int, ...], ...]
    stages_of_set: tuple[tuple[int, ...], ...]
    layers_of_stage: tuple[int, ...]
    gradient_divisor: int

    @property
    def is_planner(self) -> bool:
        return self.rank == self.ranks[0]

    @cached_property
    def ep_ranks(self) -> tuple[int, ...]:
        """The EP group of this rank."""
        return next(ranks for ranks in self.ep_sets if self.rank in ranks)

    @cached_property
    def ep_rank(self) -> int:
        """This rank's place in its EP group."""
        return self.ep_ranks.index(self.rank)

    @property
    def ep_size(self) -> int:
        return len(self.ep_ranks)

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of this rank."""
        return self.stages_of_set[self.ep_sets.index(self.ep_ranks)]

    @cached_property
    def stage_sets(self) -> tuple[tuple[int, ...], ...]:
        """Which stages ranks hold together, each tuple once, ascending."""
        return tuple(sorted(set(self.stages_of_set)))

    def ep_sets_of(self, stages: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The EP groups that hold these stages, in order."""
        return [ep_set for ep_set, held in zip(self.ep_sets, self.stages_of_set, strict=True) if held == stages]

    @cached_property
    def edp_sets(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same experts, for all of the job."""
        return [ranks for stages in self.stage_sets for ranks in zip(*self.ep_sets_of(stages), strict=True)]

    @cached_property
    def edp_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same experts as this one, in the order of the EP groups."""
        return next(ranks for ranks in self.edp_sets if self.rank in ranks)

    @cached_property
    def data_sets(self) -> list[tuple[int, ...]]:
        """Ranks that hold the same stages, ascending, for all of the job."""
        return [tuple(sorted(sum(self.ep_sets_of(stages), ()))) for stages in self.stage_sets]

    @cached_property
    def data_ranks(self) -> tuple[int, ...]:
        """Ranks that hold the same stages as this one, ascending."""
        return next(ranks for ranks in self.data_sets if self.rank in ranks)

    @property
    def num_layers(self) -> int:
        """L, MoE layers of the whole model."""
        return sum(self.layers_of_stage)

    def first_layer(self, stage: int) -> int:
        """The number of a stage's first MoE layer."""
        return sum(self.layers_of_stage[:stage])


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
        everyone = _job_ranks(ranks)
        self._made: list[dist.ProcessGroup] = []
        self._background: dist.ProcessGroup | None = None
        self._whole_world = len(everyone) == dist.get_world_size()
        try:
            self.control = self._new([everyone], "gloo", "control", self._timeout)
            self.job = _gather_job(ranks, everyone, stage_layers, self.control)
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
            RuntimeError: a rank did not come within the timeout, or the job is a part of the world, whose groups'
                names cannot be made anew.
        """
        if not self._whole_world:
            raise RuntimeError("connections of a job that is a part of the world are not made anew")
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


def gather_rows(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """One contiguous tensor of each rank, of equal shapes, stacked: ``[R, ...]``, in one call and one buffer."""
    rows = mine.new_empty(group.size() * mine.numel())
    # torch 2.13 has a new name for it and warns of the old one, which 2.11 alone knows.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(rows, mine.reshape(-1), group=group)
    return rows.view(group.size(), *mine.shape)


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


# -- from what each rank says to the job -------------------------------------------------------------------------------


def _job_ranks(ranks: Ranks) -> tuple[int, ...]:
    world, rank = dist.get_world_size(), dist.get_rank()
    job = tuple(range(world)) if ranks.job is None else tuple(sorted(set(ranks.job)))
    if rank not in job:
        raise GroupError(f"rank {rank} is not among the ranks of the job, {list(job)}: attach on those only")
    if job[0] < 0 or job[-1] >= world:
        raise GroupError(f"the job's ranks {list(job)} are not all in the world of {world}")
    return job


@dataclass(frozen=True)
class _Said:
    """One rank's word. ``ep_first`` and ``ep_name`` tell EP groups apart without listing them."""

    rank: int
    ep_first: int
    ep_size: int
    ep_name: int
    divisor: int
    stages: tuple[int, ...]
    layers: tuple[int, ...]


def _gather_job(
    ranks: Ranks, everyone: tuple[int, ...], stage_layers: Sequence[int], control: dist.ProcessGroup
) -> Job:
    """One small all-gather, and the same conclusions on all ranks."""
    said = _exchange(ranks, everyone, stage_layers, control)
    for one in said:
        if one.stages == (-1,):
            raise GroupError(
                f"rank {one.rank} does not name one stage for each model that it attaches: give Ranks(stages=...), "
                f"ascending, at most {MAX_STAGES}"
            )
    layers: dict[int, int] = {}
    for one in said:
        for stage, count in zip(one.stages, one.layers, strict=True):
            if layers.setdefault(stage, count) != count:
                raise GroupError(f"stage {stage} has {layers[stage]} MoE layers on one rank and {count} on another")
    together = {stage: {one.stages for one in said if stage in one.stages} for stage in layers}
    for stage, held in together.items():
        if len(held) > 1:
            raise GroupError(f"stage {stage} is held together with other stages on some ranks: {sorted(held)}")
    if sorted(layers) != list(range(len(layers))):
        raise GroupError(f"the ranks hold the pipeline stages {sorted(layers)}: every stage from 0 on must be there")
    sets = _ep_sets(said, everyone)
    stages_of = {one.rank: one.stages for one in said}
    rank = dist.get_rank()
    divisors = {one.divisor for one in said}
    if len(divisors) > 1:
        raise GroupError(f"the ranks give different gradient divisors, {sorted(divisors)}")
    job = Job(
        ranks=everyone,
        rank=rank,
        ep_sets=sets,
        stages_of_set=tuple(stages_of[ep_set[0]] for ep_set in sets),
        layers_of_stage=tuple(layers[stage] for stage in range(len(layers))),
        gradient_divisor=divisors.pop(),
    )
    return job if job.gradient_divisor else replace(job, gradient_divisor=len(job.data_ranks))


def _exchange(
    ranks: Ranks, everyone: tuple[int, ...], stage_layers: Sequence[int], control: dist.ProcessGroup
) -> list[_Said]:
    stages = ranks.stages
    if len(stages) != len(stage_layers) or len(stages) > MAX_STAGES or sorted(set(stages)) != list(stages):
        stages = (-1,)
    # Without an EP group: all ranks with the same stages, which are not known yet; they are told apart by their stages.
    ep = tuple(sorted(ranks.ep)) if ranks.ep is not None else ()
    name = hashlib.blake2b(repr((ep, () if ep else stages)).encode(), digest_size=7).digest()
    mine = torch.full((6 + 2 * MAX_STAGES,), -1, dtype=torch.int64)
    mine[:6] = torch.tensor(
        [
            dist.get_rank(),
            ep[0] if ep else -1,
            len(ep),
            int.from_bytes(name, "little"),
            ranks.gradient_divisor or 0,
            len(stages),
        ]
    )
    layers = (*stage_layers, *[0] * MAX_STAGES)[: len(stages)]
    mine[6 : 6 + len(stages)] = torch.tensor(stages)
    mine[6 + MAX_STAGES : 6 + MAX_STAGES + len(stages)] = torch.tensor(layers)
    said = []
    for row in gather_rows(mine, control).tolist():
        rank, ep_first, ep_size, ep_name, divisor, count = row[:6]
        held, counts = row[6 : 6 + count], row[6 + MAX_STAGES : 6 + MAX_STAGES + count]
        said.append(_Said(rank, ep_first, ep_size, ep_name, divisor, tuple(held), tuple(counts)))
    return said


def _ep_sets(said: Sequence[_Said], everyone: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The EP groups of the job, ordered by first rank."""
    members: dict[int, list[_Said]] = {}
    for one in said:
        members.setdefault(one.ep_name, []).append(one)
    sets = []
    for together in members.values():
        ranks = tuple(sorted(one.rank for one in together))
        first, size = together[0].ep_first, together[0].ep_size
        if first >= 0 and (ranks[0] != first or len(ranks) != size):
            raise GroupError(
                f"the EP groups do not partition the ranks {list(everyone)} of the job: ranks {list(ranks)} name a "
                f"group of {size} whose first rank is {first}"
            )
        if len({one.stages for one in together}) > 1:
            raise GroupError(f"the EP group of ranks {list(ranks)} holds different pipeline stages")
        sets.append(ranks)
    sets.sort()
    if len({len(ranks) for ranks in sets}) > 1:
        raise GroupError(
            f"the EP groups {[list(ranks) for ranks in sets]} differ in size: every EP group must hold all experts once"
        )
    return tuple(sets)


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
