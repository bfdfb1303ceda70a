"""Why attach failed, as all ranks say it; and room for the files that groups of gloo open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch.distributed as dist

from ..utils.errors import one_line
from .store import JobStore, StoreError

SETUP_SECONDS = 120.0
"""For each step of setting up, or the balancer's own timeout where that is longer: a busy machine may be slow."""
ACCOUNT_SECONDS = 10.0
"""A rank that has lost the others waits so long for the one that says why."""
_ECHOES = "gloo/", "gloo: ", "did not come", "not through in time", "does not answer", "timed out"


def allow_open_files() -> None:
    """Raise this process's soft limit of open files to its hard one: gloo ends a process that has none left."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def why_attach_failed(
    store: JobStore, ranks: Sequence[int], rank: int, error: BaseException, hang_up: Callable[[], None]
) -> str:
    """Return why it failed on all ranks, in a line; empty: by this rank's own error. ``hang_up`` ends the waits of
    others for this rank."""
    own = not is_echo(error)
    try:
        store.compare_set(f"failed/{rank}", "failed")
        if own:
            store.compare_set("failed", f"rank {rank} failed at attach: {one_line(error, with_type=True)}")
        hang_up()
        if own or store.wait("failed", ACCOUNT_SECONDS):
            return "" if own else store.word_of("failed")
        missing = [str(other) for other in ranks if not store.word_of(f"failed/{other}")]
    except StoreError:
        return ""
    return f"rank {', '.join(missing[:8])} was lost at attach: it has died, or does not answer" if missing else ""


def is_echo(error: BaseException) -> bool:
    """Return whether an error only says that another rank did not come, or has gone."""
    chain: BaseException | None = error
    while chain is not None:
        text = str(chain)
        if isinstance(chain, dist.DistNetworkError | dist.DistStoreError):
            return True
        if any(sign in text for sign in _ECHOES):
            return True
        chain = chain.__cause__
    return False
