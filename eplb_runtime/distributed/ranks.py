"""Who shares what with whom: the ranks of a job, its expert-parallel groups and its pipeline stages. Values only.

Nothing here assumes that the world is one copy of one model: a job may be a part of the world, its ranks may hold
different pipeline stages, and several EP groups may hold the same experts. The balancer's own process groups are made
from these, in `process_groups.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch.distributed as dist

from .consensus import gather_bytes


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
        divided_rows: D, over how many of the ranks that hold the same experts the host divides these, each expert whole
            on one of them (FSDP along dimension 0): of the E/R homes of an EP rank, each of D EDP ranks has E/(R D), in
            their order. The host then brings them together to compute, and reduces their gradients itself. There may be
            several such sets of D, one after the other, that hold the same (HSDP). 0: each EDP rank has all of them.
        divided_state: the host divides the optimizer's state of experts over the ranks that hold the same, cutting
            experts where it comes to that (Megatron's distributed optimizer); weights are whole on each. Not together
            with ``divided_rows``.
    """

    ep: tuple[int, ...] | None = None
    job: tuple[int, ...] | None = None
    stages: tuple[int, ...] = (0,)
    gradient_divisor: int | None = None
    divided_rows: int = 0
    divided_state: bool = False

    @classmethod
    def of_group(cls, ep_group: dist.ProcessGroup | None) -> Ranks:
        """One whole model on every EP group of the world."""
        return cls(None if ep_group is None else tuple(dist.get_process_group_ranks(ep_group)))


@dataclass(frozen=True)
class Job:
    """All that follows from what the ranks of a job said; equal on all of them but for ``rank``. The first of ``ranks``
    plans; EP groups are ordered by first rank, and layers are numbered over the whole model, stage by stage."""

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
    def row_sets(self) -> list[tuple[int, ...]]:
        """Ranks that have each row of an expert tensor once, in the order of the rows: the EP groups, or, with divided
        rows, as many of those that hold the same stages as rows are divided over."""
        if not self.divided_rows:
            return list(self.ep_sets)
        sets = [self.ep_sets_of(stages) for stages in self.stage_sets]
        return [
            tuple(rank for same in zip(*ep_sets[first : first + self.divided_rows], strict=True) for rank in same)
            for ep_sets in sets
            for first in range(0, len(ep_sets), self.divided_rows)
        ]

    @cached_property
    def migration_sets(self) -> list[tuple[int, ...]]:
        """Ranks among which experts travel: those that have each row once, or, with divided state, all that hold the
        same stages, the EDP ranks of the first EP rank first."""
        if not self.divided_state:
            return self.row_sets
        return [
            tuple(rank for same in zip(*self.ep_sets_of(stages), strict=True) for rank in same)
            for stages in self.stage_sets
        ]

    @cached_property
    def migration_ranks(self) -> tuple[int, ...]:
        """Those with this one."""
        return next(ranks for ranks in self.migration_sets if self.rank in ranks)

    @cached_property
    def migration_rank(self) -> int:
        """This rank's place among ``migration_ranks``."""
        return self.migration_ranks.index(self.rank)

    @property
    def state_holders(self) -> int:
        """Over how many ranks the optimizer's state of an expert is divided; 1 where it is not."""
        return len(self.edp_ranks) if self.divided_state else 1

    @property
    def row_division(self) -> int:
        """D, over how many ranks the homes of an EP rank are divided; 1 where they are not."""
        return self.divided_rows or 1

    @cached_property
    def part_sets(self) -> list[tuple[int, ...]]:
        """Ranks that have the homes of one EP rank together: all of an EDP set, or as many as rows are divided over."""
        size = self.divided_rows or len(self.ranks)
        return [ranks[first : first + size] for ranks in self.edp_sets for first in range(0, len(ranks), size)]

    @cached_property
    def twin_sets(self) -> list[tuple[int, ...]]:
        """Ranks of an EDP set that have the same part of its homes: several where there are replicas of the model."""
        size = self.divided_rows or len(self.ranks)
        return [ranks[part::size] for ranks in self.edp_sets for part in range(min(size, len(ranks)))]

    @cached_property
    def row_ranks(self) -> tuple[int, ...]:
        """Those that have each row once, with this one."""
        return next(ranks for ranks in self.row_sets if self.rank in ranks)

    @cached_property
    def row_rank(self) -> int:
        """This rank's place among ``row_ranks``."""
        return self.row_ranks.index(self.rank)

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


# -- from what each rank says to the job -------------------------------------------------------------------------------


def job_ranks(ranks: Ranks) -> tuple[int, ...]:
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
    ep_name: str
    divisor: int
    divided_rows: int
    divided_state: bool
    stages: tuple[int, ...]
    layers: tuple[int, ...]


def gather_job(ranks: Ranks, everyone: tuple[int, ...], stage_layers: Sequence[int], control: dist.ProcessGroup) -> Job:
    """One small all-gather, and the same conclusions on all ranks."""
    said = _exchange(ranks, stage_layers, control)
    for one in said:
        if one.stages == (-1,):
            raise GroupError(
                f"rank {one.rank} does not name one stage for each model that it attaches: give Ranks(stages=...), "
                "ascending"
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
    if len({one.divided_rows for one in said}) > 1:
        raise GroupError("some ranks say that rows of experts are divided over EDP ranks, and others that they are not")
    if len({one.divided_state for one in said}) > 1:
        raise GroupError("some ranks say that EDP ranks divide the optimizer's state, and others that they do not")
    if ranks.divided_rows and ranks.divided_state:
        raise GroupError("EDP ranks divide rows of experts or the optimizer's state, not both")
    job = Job(
        ranks=everyone,
        rank=rank,
        ep_sets=sets,
        stages_of_set=tuple(stages_of[ep_set[0]] for ep_set in sets),
        layers_of_stage=tuple(layers[stage] for stage in range(len(layers))),
        gradient_divisor=divisors.pop(),
        divided_rows=ranks.divided_rows,
        divided_state=ranks.divided_state,
    )
    if len(job.edp_ranks) % job.row_division:
        raise GroupError(
            f"rows of experts are divided over {job.row_division} ranks, and {len(job.edp_ranks)} hold the same "
            "ones: give a number that divides those"
        )
    return job if job.gradient_divisor else replace(job, gradient_divisor=len(job.data_ranks))


def _exchange(ranks: Ranks, stage_layers: Sequence[int], control: dist.ProcessGroup) -> list[_Said]:
    stages, layers = ranks.stages, tuple(stage_layers)
    if len(stages) != len(layers) or sorted(set(stages)) != list(stages):
        stages, layers = (-1,), (0,)
    # Without an EP group: all ranks with the same stages, which are not known yet; they are told apart by their stages.
    ep = tuple(sorted(ranks.ep)) if ranks.ep is not None else ()
    name = hashlib.blake2b(repr((ep, () if ep else stages)).encode(), digest_size=8).hexdigest()
    mine = _Said(
        rank=dist.get_rank(),
        ep_first=ep[0] if ep else -1,
        ep_size=len(ep),
        ep_name=name,
        divisor=ranks.gradient_divisor or 0,
        divided_rows=ranks.divided_rows,
        divided_state=ranks.divided_state,
        stages=stages,
        layers=layers,
    )
    said = [json.loads(text) for text in gather_bytes(json.dumps(asdict(mine)).encode(), control)]
    return [_Said(**{**one, "stages": tuple(one["stages"]), "layers": tuple(one["layers"])}) for one in said]


def _ep_sets(said: Sequence[_Said], everyone: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The EP groups of the job, ordered by first rank."""
    members: dict[str, list[_Said]] = {}
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
