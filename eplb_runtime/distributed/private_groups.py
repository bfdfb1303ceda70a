"""Process groups under names of our own, made by their members alone.

`torch.distributed.new_group` counts the groups of a process to name the next one. A rank that fails in it alone would
give the host's later groups other names than the other ranks do. torch's functions and profilers know the groups made
here; the names that torch counts do not.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_CLOSING = timedelta(milliseconds=1)
_WATCHDOG_MARGIN = timedelta(seconds=60)
_NOBODYS_TAG = 0x7FFFFF
"""Of a message that is never sent: one that met a real message of another size would end the process."""
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


class _Names(dict[dist.ProcessGroup, Any]):
    """torch's table of names, which it counts to make the next: ours are found in it, and not counted."""

    def __missing__(self, group: dist.ProcessGroup) -> str:
        if group not in dist.distributed_c10d._world.pg_map:
            raise KeyError(group)
        return group.group_name


def make(
    store: dist.Store,
    name: str,
    ranks: Sequence[int],
    rank: int,
    backend: str,
    making: timedelta,
    description: str,
    calls: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a group of these ranks, each of which calls it with the same new name, in any order with other calls.

    Args:
        backend: ``gloo`` or ``nccl``.
        making: most time for making it.
        calls: most time for a call, after which NCCL's watchdog ends the process. None: as for making, and who waits on
            it has a deadline of its own, before which NCCL's watchdog does nothing.
    """
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
        options = dist.ProcessGroupNCCL.Options()  # type: ignore[attr-defined]
        options.is_high_priority_stream = False
        options._timeout = calls or making * 4 + _WATCHDOG_MARGIN
        options.global_ranks_in_group = list(ranks)
        options.group_name = name  # type: ignore[assignment]
        with contextlib.nullcontext() if calls else _harmless_watchdog():
            inner = dist.ProcessGroupNCCL(prefixed, place, len(ranks), options)  # type: ignore[attr-defined]
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


def forget(group: dist.ProcessGroup) -> None:
    """Let torch's functions not know it any more; with the last reference its threads and connections go."""
    known = dist.distributed_c10d._world
    if known.pg_map.pop(group, None) is not None:
        torch._C._distributed_c10d._unregister_process_group(group.group_name)
    known.pg_backend_config.pop(group, None)
    known.pg_group_ranks.pop(group, None)


def hang_up(group: dist.ProcessGroup) -> None:
    """Close its connections, so that ranks which wait for this one learn it at once."""
    with contextlib.suppress(RuntimeError):
        if group.name() != "gloo":
            group.abort()
        elif group.size() > 1:
            # gloo closes all connections of a group when a wait on it expires.
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NOBODYS_TAG).wait(_CLOSING)
