"""Who shares what with whom: the ranks of a job, its expert-parallel groups and its pipeline stages. Values only.

Nothing here assumes that the world is one copy of one model: a job may be a part of the world, its ranks may hold
different pipeline stages, and several EP groups may hold the same experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from .consensus import gather_json

Sets = list[tuple[int, ...]]
"""Ranks in sets, each rank in one of them."""


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
        divided_rows: D, number of EDP ranks over which the host divides the E/R homes of an EP rank (FSDP along
            dimension 0): each has E/(R D) whole experts, in order. The host gathers them to compute, and reduces their
            gradients itself. Several such sets of D ranks, one after the other, may hold the same experts (HSDP). 0:
            each EDP rank has all homes.
        divided_state: the host divides the optimizer's state of experts over the EDP ranks, cutting experts where need
            be (Megatron's distributed optimizer); weights are whole on each. Not together with ``divided_rows``.
    """

    ep: tuple[int, ...] | None = None
    job: tuple[int, ...] | None = None
    stages: tuple[int, ...] = (0,)
    gradient_divisor: int | None = None
    divided_rows: int = 0
    divided_state: bool = False

    @classmethod
    def of_group(cls, ep_group: dist.ProcessGroup | None) -> "Ranks":
        """Return the ranks of one whole model on every EP group of the world; None: the world is one EP group."""
        return cls(None if ep_group is None else tuple(dist.get_process_group_ranks(ep_group)))


def _sets(lay_out: Callable[[NDArray[np.int64]], NDArray[np.int64]]) -> cached_property[Sets]:
    """Return the rows of each grid of a job as ``lay_out`` has them, ``[sets, ranks]``."""
    return cached_property(lambda job: [tuple(row) for grid_HDR in job._grids for row in lay_out(grid_HDR).tolist()])


def _with_this(sets: str) -> cached_property[tuple[int, ...]]:
    """Return the one of a job's sets that has this rank."""
    return cached_property(lambda job: next(ranks for ranks in getattr(job, sets) if job.rank in ranks))


def _place_in(ranks: str) -> cached_property[int]:
    return cached_property(lambda job: getattr(job, ranks).index(job.rank))


@dataclass(frozen=True)
class Job:
    """All that follows from what the ranks of a job said; equal on all of them but for ``rank``. The first of ``ranks``
    plans; EP groups are ordered by first rank, and layers are numbered over the whole model, stage by stage.

    Ranks that hold the same stages are a grid ``[H, D, R]``: R ranks of an EP group, D ranks that divide its homes
    (``divided_rows``; all that hold the same experts where rows are not divided), and H of those.
    """

    ranks: tuple[int, ...]
    rank: int
    ep_sets: tuple[tuple[int, ...], ...]
    stages_of_set: tuple[tuple[int, ...], ...]
    layers_of_stage: tuple[int, ...]
    gradient_divisor: int
    divided_rows: int = 0
    divided_state: bool = False

    @property
    def is_planner(self) -> bool:
        return self.rank == self.ranks[0]

    @property
    def num_layers(self) -> int:
        """Number of MoE layers of the whole model, L."""
        return sum(self.layers_of_stage)

    def first_layer(self, stage: int) -> int:
        """Return the number, in the whole model, of a stage's first MoE layer."""
        return sum(self.layers_of_stage[:stage])

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of this rank."""
        return self.stages_of_set[self.ep_sets.index(self.ep_ranks)]

    @cached_property
    def stage_sets(self) -> tuple[tuple[int, ...], ...]:
        """The combinations of stages that ranks hold, each once, ascending."""
        return tuple(sorted(set(self.stages_of_set)))

    @property
    def state_holders(self) -> int:
        """Number of ranks over which the optimizer's state of an expert is divided; 1: it is whole."""
        return len(self.edp_ranks) if self.divided_state else 1

    @property
    def dp_shard_degree(self) -> int:
        """Number of ranks over which the homes of an EP rank are divided, D; 1: they are whole."""
        return self.divided_rows or 1

    def ep_sets_of(self, stages: tuple[int, ...]) -> Sets:
        """Return the EP groups whose ranks hold exactly these stages, ordered by first rank."""
        return [ep_set for ep_set, held in zip(self.ep_sets, self.stages_of_set, strict=True) if held == stages]

    @cached_property
    def _grids(self) -> list[NDArray[np.int64]]:
        """int64 ``[H, D, R]``, one for each of ``stage_sets``."""
        grids = [np.array(self.ep_sets_of(stages)) for stages in self.stage_sets]
        return [grid_GR.reshape(-1, self.divided_rows or len(grid_GR), self.ep_size) for grid_GR in grids]

    job_sets = cached_property[Sets](lambda job: [job.ranks])
    edp_sets = _sets(lambda grid_HDR: grid_HDR.transpose(2, 0, 1).reshape(grid_HDR.shape[2], -1))
    """Ranks that hold the same experts."""
    shard_sets = _sets(lambda grid_HDR: grid_HDR.transpose(2, 0, 1).reshape(-1, grid_HDR.shape[1]))
    """Ranks that have the homes of one EP rank together: all of an EDP set, or as many as rows are divided over."""
    edp_replica_sets = _sets(lambda grid_HDR: grid_HDR.transpose(2, 1, 0).reshape(-1, len(grid_HDR)))
    """Ranks of an EDP set that have the same part of its homes: several where there are replicas of the model."""
    dp_groups = _sets(lambda grid_HDR: np.sort(grid_HDR.reshape(1, -1)))
    """Ranks that hold the same stages, ascending."""
    _whole_rows = _sets(lambda grid_HDR: grid_HDR.transpose(0, 2, 1).reshape(len(grid_HDR), -1))
    _whole_stages = _sets(lambda grid_HDR: grid_HDR.transpose(2, 0, 1).reshape(1, -1))

    @property
    def row_sets(self) -> Sets:
        """Sets of ranks that have each row of an expert tensor once, in row order: the EP groups; with divided rows,
        sets of R D ranks that hold the same stages."""
        return self._whole_rows if self.divided_rows else list(self.ep_sets)

    @property
    def migration_sets(self) -> Sets:
        """Sets of ranks among which experts move: ``row_sets``; with divided state, all ranks that hold the same
        stages, the EDP ranks of the first EP rank first."""
        return self._whole_stages if self.divided_state else self.row_sets

    ep_ranks, ep_rank = _with_this("ep_sets"), _place_in("ep_ranks")
    """The EP group of this rank."""
    ep_size = cached_property[int](lambda job: len(job.ep_ranks))
    edp_ranks = _with_this("edp_sets")
    """Ranks that hold the same experts as this one, in the order of the EP groups."""
    data_ranks = _with_this("dp_groups")
    """Ranks that hold the same stages as this one, ascending."""
    row_ranks, row_rank = _with_this("row_sets"), _place_in("row_ranks")
    migration_ranks, migration_rank = _with_this("migration_sets"), _place_in("migration_ranks")


def job_ranks(ranks: Ranks) -> tuple[int, ...]:
    """Return the ranks of the job, ascending. GroupError: some are not in the world, or this rank is not among them."""
    world, rank = dist.get_world_size(), dist.get_rank()
    job = tuple(range(world)) if ranks.job is None else tuple(sorted(set(ranks.job)))
    if rank not in job:
        raise GroupError(f"rank {rank} is not among the ranks of the job, {list(job)}: attach on those only")
    if job[0] < 0 or job[-1] >= world:
        raise GroupError(f"the job's ranks {list(job)} are not all in the world of {world}")
    return job


def gather_job(ranks: Ranks, everyone: tuple[int, ...], stage_layers: Sequence[int], control: dist.ProcessGroup) -> Job:
    """Return the `Job` that all ranks' ``ranks`` and ``stage_layers`` make, equal on all but for ``Job.rank``.
    Collective on ``control``, whose ranks are ``everyone``. GroupError, on all ranks: they contradict each other."""
    divisor, divided = ranks.gradient_divisor or 0, (ranks.divided_rows, ranks.divided_state)
    # A rank that names no EP group is in one with all that have its stages.
    mine = replace(ranks, ep=tuple(sorted(ranks.ep or ())), job=None, gradient_divisor=divisor)
    words = gather_json([asdict(mine), list(stage_layers)], control)
    said = {rank: Ranks(**word) for rank, (word, _) in zip(everyone, words, strict=True)}
    layers = _layers_of_stage(said, [layers for _, layers in words])
    for name in ("gradient_divisor", "divided_rows", "divided_state"):
        if len(values := {getattr(one, name) for one in said.values()}) > 1:
            raise GroupError(f"ranks give different {name} in their Ranks: {sorted(values)}")
    if all(divided):
        raise GroupError("EDP ranks divide rows of experts or the optimizer's state, not both")
    sets = _ep_sets(said)
    stages_of_set = tuple(tuple(said[ep_set[0]].stages) for ep_set in sets)
    job = Job(everyone, dist.get_rank(), sets, stages_of_set, layers, divisor, *divided)
    if (holders := len(job.ep_sets_of(job.stages))) % job.dp_shard_degree:
        over = f"rows of experts are divided over {job.dp_shard_degree} ranks, and {holders} hold the same ones"
        raise GroupError(f"{over}: give a number that divides those")
    return job if divisor else replace(job, gradient_divisor=len(job.data_ranks))


def _layers_of_stage(said: dict[int, Ranks], layers_of_ranks: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the MoE layers of each stage of the model."""
    layers: dict[int, int] = {}
    for (rank, one), counts in zip(said.items(), layers_of_ranks, strict=True):
        if len(one.stages) != len(counts):
            raise GroupError(f"rank {rank} does not name one stage for each model that it attaches: Ranks(stages=...)")
        for stage, count in zip(one.stages, counts, strict=True):
            if layers.setdefault(stage, count) != count:
                raise GroupError(f"stage {stage} has {layers[stage]} MoE layers on one rank and {count} on another")
    together = sorted({tuple(one.stages) for one in said.values()})
    held = sorted(stage for stages in together for stage in stages)
    if held != list(range(len(layers))) or any(list(stages) != sorted(stages) for stages in together):
        raise GroupError(f"Ranks(stages=) give stages {together}: number them from 0, ascending, each in one list only")
    return tuple(layers[stage] for stage in range(len(layers)))


def _ep_sets(said: dict[int, Ranks]) -> tuple[tuple[int, ...], ...]:
    """Return the EP groups of the job, ordered by first rank."""
    members: dict[tuple[Sequence[int], ...], list[int]] = {}
    for rank, one in said.items():
        members.setdefault((tuple(one.ep or ()), tuple(one.stages)), []).append(rank)
    for (ep, stages), together in members.items():
        if ep and together != list(ep):
            raise GroupError(
                f"the ranks of EP group {list(ep)} must all name this group and the same pipeline stages, and no other "
                f"rank may: ranks {together} name it, with stages {list(stages)}"
            )
    sets = sorted(map(tuple, members.values()))
    if len({len(ranks) for ranks in sets}) > 1:
        groups = [list(ranks) for ranks in sets]
        raise GroupError(f"the EP groups {groups} differ in size: every EP group must hold all experts once")
    return tuple(sets)
