"""Process groups under names of our own, on any thread: `torch.distributed.new_group` counts the groups of a process to
name the next one, so it must be called by all ranks in one order, and what was destroyed changes the names that follow.

torch.distributed's functions know these groups, and profilers that list all groups; the names that it counts do not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .setting_up import OthersGaveUp, WatchedStore

KNOWN = ("gloo", "nccl")
"""Backends that groups can be made of here."""
_LISTENS_EVERY_SECONDS, _HEARS_WITHIN_SECONDS = 0.25, 2.0
_CLOSING = timedelta(milliseconds=1)
_NOBODYS_TAG = 0x7FFFFF
"""Of a message that is never sent: one that met a real message of another size would end the process."""


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
    timeout: timedelta,
    description: str,
    nccl: Any = None,
) -> dist.ProcessGroup:
    """A group of these ranks; each of them calls it with the same name, in any order with other calls.

    Args:
        name: new, and equal on the ranks of the group only.
        ranks: global ones, in the order of the group.
        rank: this one's global number.
        backend: one of ``KNOWN``.
        nccl: that backend, if it is NCCL, of `nccl_groups`.

    Raises:
        RuntimeError: a rank did not come within the timeout (some backends notice at the first call only).
    """
    place = list(ranks).index(rank)
    # A group is asked for its store, which others clone: only gloo, which waits in it, gets one that ends waits.
    prefixed = dist.PrefixStore(name, getattr(store, "plain", store))
    group = dist.ProcessGroup(prefixed, place, len(ranks))
    kinds = dist.ProcessGroup.BackendType
    inner: Any
    if backend == "gloo":
        kind, device = kinds.GLOO, torch.device("cpu")
        inner = _gloo(store, name, place, len(ranks), timeout)
    else:
        kind, device = kinds.NCCL, torch.device("cuda")
        inner = nccl
    inner._set_sequence_number_for_group()
    group._set_default_backend(kind)
    group._register_backend(device, kind, inner)
    group._set_group_name(name)  # type: ignore[arg-type]
    group._set_group_desc(description)
    # What torch's functions look up in a group.
    known = dist.distributed_c10d._world
    names = getattr(known, "pg_names", None)  # torch's own business: without it, lists of groups lack names
    if names is not None and not isinstance(names, _Names):
        dist.distributed_c10d._pg_names = _Names(names)
    known.pg_backend_config[group] = f"{device.type}:{backend}"
    known.pg_group_ranks[group] = {global_rank: index for index, global_rank in enumerate(ranks)}
    known.pg_map[group] = (backend, prefixed)  # last: a profiler on another thread asks for the rest of what is here
    return group


def _gloo(store: dist.Store, name: str, place: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    """A backend whose ranks are connected.

    A rank whose address this one has may give up, and live on: then gloo connects until its timeout, where it reads no
    store. So it connects on a thread of its own, and this one listens for the word that a rank has failed.
    """
    prefixed = dist.PrefixStore(name, store)
    if not isinstance(store, WatchedStore):
        return dist.ProcessGroupGloo(prefixed, place, size, timeout=timeout)
    made: Future[dist.ProcessGroupGloo] = Future()

    def connect() -> None:
        try:
            made.set_result(dist.ProcessGroupGloo(prefixed, place, size, timeout=timeout))
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=connect, name="eplb_runtime connect", daemon=True).start()
    while not wait([made], _LISTENS_EVERY_SECONDS).done:
        # Who waits in the store hears the word there, and then sooner.
        if (word := store.given_up()) and not wait([made], _HEARS_WITHIN_SECONDS).done:
            raise OthersGaveUp(word)
    return made.result()


def forget(group: dist.ProcessGroup) -> None:
    """torch's functions do not know it any more; with the last reference its threads and connections go."""
    known = dist.distributed_c10d._world
    known.pg_map.pop(group, None)
    known.pg_backend_config.pop(group, None)
    known.pg_group_ranks.pop(group, None)


def is_private(group: dist.ProcessGroup) -> bool:
    """Whether it was made here and is in use."""
    known = dist.distributed_c10d._world
    return group in known.pg_map and group not in getattr(known, "pg_names", ())


def hang_up(group: dist.ProcessGroup, backend: str) -> None:
    """Close its connections, so that ranks which wait for this one learn it at once."""
    with contextlib.suppress(RuntimeError):
        if backend != "gloo":
            group.abort()
        elif group.size() > 1:
            # gloo closes all connections of a group when a wait on it expires.
            group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _NOBODYS_TAG).wait(_CLOSING)
