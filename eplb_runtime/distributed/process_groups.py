"""The balancer's own process groups, never shared with the host (design rule 7), and made by their ranks alone.

`torch.distributed.new_group` counts the groups of a process to name the next one. A rank that fails in it alone would
give the host's later groups other names than the other ranks do. torch's functions and profilers know the groups made
here; the names that torch counts do not. A timeout on gloo closes the connections of the group it happened on alone.
"""

import contextlib
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..utils.text import one_line
from .consensus import arrive, close_connections, gather_rows, missing_at, timeout_of
from .ranks import GroupError, Ranks, gather_job, job_ranks
from .store import SETUP_SECONDS, JobStore, StoreError, name_of_job

logger = logging.getLogger("eplb_runtime")

ACCOUNT_SECONDS = 10.0
"""A rank that has lost the others at attach waits so long for the one that says why."""
_ECHOES = "gloo/", "gloo: ", "did not come", "not through in time", "does not answer", "given no answer", "timed out"
_AT_ATTACH = ("data", "dispatch", "counts", "expert_data", "shards", "edp_replicas", "migration")
"""Made at once: a rank that fails alone ends the waits of others in a group that is there, not in making one."""
_OF_BALANCING = ("control", "migration", "background")
"""Purposes of groups that a closed model does not compute with."""
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
Pair = tuple[dist.ProcessGroup, dist.ProcessGroup]
_in_use: list["ProcessGroups"] = []


def _of(sets: str, purpose: str, backend: str = "", *, like: str = "", several: bool = False) -> Any:
    """Return a group of those of a job's sets with this rank, made where it is first asked for: the one under the name
    ``like`` if that has the same ranks; None if it is to have ``several`` and this rank is alone."""

    def made(groups: "ProcessGroups") -> dist.ProcessGroup | None:
        all_sets = getattr(groups.job, sets)
        if several and (groups.job.rank,) in all_sets:
            return None
        other: dist.ProcessGroup | None = getattr(groups, like) if like else None
        if other is not None and tuple(dist.get_process_group_ranks(other)) in all_sets:
            return other
        return groups._new(all_sets, purpose, backend)

    return cached_property(made)


class ProcessGroups:
    """The process groups of one balancer. A group's ranks ask for it at the same place, and use it at once: NCCL builds
    its communicator at the first call, to which ranks that have nothing to send would never come.

    Args:
        ranks: what the host said of this rank.
        stage_layers: MoE layers of each stage that is here, in the order of ``ranks.stages``.
        device: where the model is.
        timeout_seconds: for control and migration, from `finalize` on; the others keep the host's default.

    Attributes:
        control: gloo, all ranks of the job: counts, plans, votes. Made again after a failure.
        store: the launcher's, under a name that no other balancer has.
        setup_seconds: for each step until `finalize`, making these groups among them.

    Raises GroupError on all ranks: they contradict each other, or one cannot go on.
    """

    def __init__(self, ranks: Ranks, stage_layers: Sequence[int], device: torch.device, timeout_seconds: float) -> None:
        if not dist.is_initialized():
            raise GroupError("torch.distributed is not initialised: call init_process_group (or use torchrun) first")
        self.timeout_seconds, self.setup_seconds = timeout_seconds, max(timeout_seconds, SETUP_SECONDS)
        self._device, self._members = device, job_ranks(ranks)
        self._made: list[dist.ProcessGroup] = []
        self._times_made: Counter[str] = Counter()
        world = dist.distributed_c10d._get_default_group().get_group_store()
        # Ranks meet in it when they connect, perhaps on a thread of ours: no other rank may have to wait for that.
        self._launcher_store = world.clone()  # type: ignore[attr-defined]
        # Nothing fails on a rank before it has counted: the others would wait for it, and have other names ever after.
        self._name = name_of_job(self._launcher_store, self._members, dist.get_rank())
        self.store = JobStore(world, self._name, timeout_seconds)
        self._launcher_store.set_timeout(timedelta(seconds=self.setup_seconds))
        try:
            _allow_open_files()
            self.control = self._new([self._members], "control", "gloo", self.setup_seconds)
            self.backend = backend_for(device)
            self.job = gather_job(ranks, self._members, stage_layers, self.control)
        except BaseException as error:
            cause = self.report_failure(error)
            self.close()
            if cause:
                raise GroupError(cause) from error
            raise

    def make(self) -> None:
        """Make most groups now (data, dispatch, counts, migration, ...), not where they are first used. Collective."""
        for purpose in _AT_ATTACH:
            getattr(self, purpose)

    def report_failure(self, error: BaseException) -> str:
        """Tell the other ranks that setting up has failed here, and close this rank's gloo connections. Returns "" if
        ``error`` is this rank's own; else, after up to 10 s, a line on the rank that caused it ("": unknown)."""
        store, rank, own = self.store, dist.get_rank(), not _is_echo(error)
        said = f"rank {rank} failed at attach: {one_line(error, with_type=True)}" if own else ""
        try:
            arrive(store, "failed", self._members, rank, said)
            for group in self._made:  # others wait for this rank
                if group.name() == "gloo":
                    close_connections(group)
            if own or store.wait("failed/problem", ACCOUNT_SECONDS):
                return "" if own else store.word_of("failed/problem")
            lost = missing_at(store, "failed", self._members)
        except StoreError:
            return ""
        return f"rank {lost} was lost at attach: it has died, or does not answer" if lost else ""

    def finalize(self) -> None:
        """Set the timeout of calls on the control and migration groups to ``timeout_seconds``, if they are gloo's."""
        for group in (self.control, self.migration):
            if group.name() == "gloo":  # others have no such wait
                group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=self.timeout_seconds))

    def make_again(self, attempt: int, seconds: float) -> Pair:
        """Make and return another control and migration group; ``seconds`` for each, and each gloo call. Collective."""
        control = self._new([self.job.ranks], f"control {attempt}", "gloo", seconds)
        return control, self._new(self.job.migration_sets, f"migration {attempt}", self.backend, seconds)

    def take_over(self, made: Pair) -> None:
        """Replace ``control`` and ``migration`` by these groups. `release_unused` ends the old ones."""
        self.control, self.migration = made
        self.finalize()

    def release_unused(self) -> None:
        """End each control and migration group but those in ``control`` and ``migration``."""
        again = [one for one in self._made if one.group_desc.split()[-1] in ("control", "migration")]
        self.release(*(one for one in again if one is not self.control and one is not self.migration))

    def close_connections(self) -> None:
        """Close the connections of ``control`` and ``migration``, so that ranks that wait for this one fail."""
        close_connections(self.control)
        close_connections(self.migration)

    data: dist.ProcessGroup = _of("dp_groups", "data")
    """Ranks that hold the same stages: gradients outside the experts."""
    everyone: dist.ProcessGroup = _of("job_sets", "everyone", like="data")
    """All ranks of the job: norms over stages, agreement on a gradient's overflow."""
    background: dist.ProcessGroup = _of("job_sets", "background", "gloo")
    """The same over gloo, for work in a thread during training."""
    dispatch: dist.ProcessGroup = _of("ep_sets", "dispatch")
    """One EP group: tokens."""
    rows: dist.ProcessGroup = _of("row_sets", "rows", like="dispatch")
    """Ranks that have each row of an expert tensor once."""
    replicas: dist.ProcessGroup = _of("row_sets", "replicas")
    """The ranks of ``rows``: weights to replicas, gradients back."""
    expert_data: dist.ProcessGroup | None = _of("edp_sets", "expert data", several=True)
    """Ranks that hold the same experts; None: there is one."""
    shards: dist.ProcessGroup | None = _of("shard_sets", "shards", like="expert_data", several=True)
    """Ranks that have the homes of this EP rank together; None: it is this one."""
    edp_replicas: dist.ProcessGroup | None = _of("edp_replica_sets", "edp_replicas", several=True)
    """Ranks that have the same part of the homes of an EP rank; None: it is this one."""

    @cached_property
    def migration(self) -> dist.ProcessGroup:
        """The group in which experts move: `Job.migration_ranks`, in row order. Collective at the first access."""
        return self._new(self.job.migration_sets, "migration", self.backend, self.setup_seconds)

    @cached_property
    def counts(self) -> dist.ProcessGroup:
        """The EP group that exchanges counts ahead of tokens. Collective at the first access. On gloo it is apart from
        ``dispatch``: messages of a forward and a backward that meet would differ in size, which ends the process."""
        return self._new(self.job.ep_sets, "counts") if self.backend == "gloo" else self.dispatch

    @cached_property
    def second_channel(self) -> Pair:
        """Another ``dispatch`` and ``counts``, for two batches at once. Collective at the first access."""
        dispatch = self._new(self.job.ep_sets, "dispatch 2")
        return dispatch, self._new(self.job.ep_sets, "counts 2") if self.backend == "gloo" else dispatch

    def of_nodes(self, ranks_per_node: int) -> dist.ProcessGroup:
        """Make and return a gloo group of the ranks of ``replicas`` on this rank's node. Collective."""
        each = ranks_per_node * self.job.dp_shard_degree
        sets = [ranks[first : first + each] for ranks in self.job.row_sets for first in range(0, len(ranks), each)]
        return self._new(sets, "node", "gloo")

    def go_with(self, models: Sequence[nn.Module]) -> None:
        """Let `release_dropped` close these groups once all of these models are garbage-collected (kept as weak
        references): a closed model still computes with some groups."""
        self._models = [weakref.ref(model) for model in models]
        _in_use.append(self)

    def close_balancing(self) -> None:
        """End the control, migration and background groups, and close the store. The model goes on with the others."""
        self.release(*(group for group in self._made if group.group_desc.split()[-1] in _OF_BALANCING))
        self.store.close()

    def close(self) -> None:
        """End all groups, and close the store."""
        self.release(*self._made)
        self.close_balancing()

    def _new(
        self, sets: Sequence[Sequence[int]], purpose: str, backend: str = "", seconds: float | None = None
    ) -> dist.ProcessGroup:
        """Return a group of those of ``sets`` with this rank, made by its ranks. ``seconds`` are for making it and,
        over gloo, for each call; None: who waits for its calls waits as long as for the host's own."""
        rank, backend = dist.get_rank(), backend or self.backend
        # The store keeps the addresses of a group that is gone: one made again needs another name.
        self._times_made[purpose] += 1
        ranks = next(together for together in sets if rank in together)
        name = f"{self._name}/{purpose}/{self._times_made[purpose]} of {ranks[0]}"
        description = f"eplb_runtime {purpose.rstrip('0123456789 ')}"
        making = timedelta(seconds=self.setup_seconds if seconds is None else seconds)
        calls = host_timeout(backend) if seconds is None else None
        group = make_group(self._launcher_store, name, ranks, rank, backend, making, description, calls)
        self._made.append(group)
        try:
            token = torch.zeros(1, device="cpu" if backend == "gloo" else self._device)
            gather_rows(token, group, time.monotonic() + making.total_seconds())
        except BaseException:
            self.release(group)
            raise
        return group

    def release(self, *groups: dist.ProcessGroup) -> None:
        """End groups: abort NCCL's communicators, delete torch's entries and our attributes. Errors are only logged."""
        for name in [name for name, held in vars(self).items() if any(held is group for group in groups)]:
            delattr(self, name)
        for group in groups:
            self._made = [other for other in self._made if other is not group]
            try:
                if group.name() != "gloo":
                    group.abort()  # what is under way would hold the communicator, and the host, for ever
                forget_group(group)
            except Exception as error:
                # After a failure some are broken already; that is not worth an error any more.
                logger.debug("a process group could not be ended: %s", error)


def release_dropped() -> None:
    """Close the groups whose models are gone (`go_with`), with a warning in the log if ``close()`` was not called.
    Where all ranks have come and no device uses the groups: ending a communicator that another rank uses would fail."""
    for groups in [one for one in _in_use if all(model() is None for model in one._models)]:
        _in_use.remove(groups)
        if hasattr(groups, "control"):
            logger.warning(
                "a balanced model was let go of without balancer.close(): its groups, threads and communicators stayed "
                "until now; call close() on all ranks before you drop a model"
            )
        groups.close()


class _Names(dict[dist.ProcessGroup, Any]):
    """torch's table of names, which it counts to make the next: ours are found in it, and not counted."""

    def __missing__(self, group: dist.ProcessGroup) -> str:
        if group not in dist.distributed_c10d._world.pg_map:
            raise KeyError(group)
        return group.group_name


def make_group(
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    making: timedelta,
    description: str,
    calls: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a gloo or NCCL group of these ranks, enter it in torch's tables, and return it. Each rank calls this with
    the same new name, in any order with other calls. ``making``: most time for that. ``calls``: most time for a call,
    after which NCCL's watchdog ends the process. None: gloo's calls have ``making``; NCCL's watchdog does nothing."""
    place = list(ranks).index(rank)
    prefixed = dist.PrefixStore(name, store)
    group = dist.ProcessGroup(prefixed, place, len(ranks))
    kinds = dist.ProcessGroup.BackendType
    inner: Any
    if backend == "gloo":
        kind, device = kinds.GLOO, torch.device("cpu")
        inner = dist.ProcessGroupGloo(prefixed, place, len(ranks), timeout=making)
        inner._set_default_timeout(calls or making)
    else:
        kind, device = kinds.NCCL, torch.device("cuda")
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream = False
        options._timeout = calls or making * 4 + timedelta(seconds=60)
        options.global_ranks_in_group = list(ranks)
        options.group_name = name  # type: ignore[assignment]
        with contextlib.nullcontext() if calls else _harmless_watchdog():
            inner = dist.ProcessGroupNCCL(prefixed, place, len(ranks), options)
    inner._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(device, kind, inner)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(description)
    # What torch's functions look up in a group.
    torch._C._distributed_c10d._register_process_group(group.group_name, group)
    known = dist.distributed_c10d._world
    names = getattr(known, "pg_names", None)  # torch's own business: without it, lists of groups lack names
    if names is not None and not isinstance(names, _Names):
        dist.distributed_c10d._pg_names = _Names(names)
    known.pg_backend_config[group] = f"{device.type}:{backend}"
    known.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    known.pg_map[group] = (backend, prefixed)  # last: a profiler on another thread asks for the rest of what is here
    return group


@contextlib.contextmanager
def _harmless_watchdog() -> Any:
    """NCCL's watchdog must not end the process, which it reads in the environment alone."""
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1"
    try:
        yield
    finally:
        del os.environ[_BLOCKING]
        if before is not None:
            os.environ[_BLOCKING] = before


def forget_group(group: dist.ProcessGroup) -> None:
    """Remove a group from torch's tables. Its threads and connections end with the last reference to it."""
    known = dist.distributed_c10d._world
    if known.pg_map.pop(group, None) is not None:
        torch._C._distributed_c10d._unregister_process_group(group.group_name)
    known.pg_backend_config.pop(group, None)
    known.pg_group_ranks.pop(group, None)


def host_timeout(backend: str) -> timedelta:
    """Return the host's timeout (``init_process_group(timeout=...)``) for this backend, or torch's if there is none."""
    timeout: timedelta = dist.distributed_c10d.default_pg_timeout
    with contextlib.suppress(RuntimeError, AttributeError):  # the host has none, or one without options
        group = dist.distributed_c10d._get_default_group()
        timeout = timeout_of(group, torch.device("cpu" if backend == "gloo" else "cuda"))
    return timeout


def backend_for(device: torch.device) -> str:
    """Return the backend that the world uses for this kind of device: ``gloo`` or ``nccl``. GroupError: neither."""
    config = dist.get_backend_config()
    backend = dict(part.split(":") for part in config.split(",") if ":" in part).get(device.type)
    if backend in ("gloo", "nccl"):
        return backend
    has = "has no backend" if backend is None else f"has {backend}, and not gloo or nccl,"
    other = f"initialise it with one, such as backend='{dist.get_default_backend_for_device(device.type)}'"
    raise GroupError(f"the process group {has} for {device.type} tensors ({config}): {other}")


def _is_echo(error: BaseException | None) -> bool:
    """Return whether an error only says that another rank did not come, or has gone."""
    if error is None:
        return False
    echoes = isinstance(error, dist.DistNetworkError | dist.DistStoreError) or any(s in str(error) for s in _ECHOES)
    return echoes or _is_echo(error.__cause__)


def _allow_open_files() -> None:
    """Raise this process's soft limit of open files to its hard one: gloo ends a process that has none left."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
