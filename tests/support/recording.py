"""Records who enters which collective on which process group, in which order: what NCCL would hang on shows on gloo.

NCCL builds the communicator of a whole group at its first call, so a first call that only some ranks make never ends.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from eplb_runtime.distributed import consensus

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter_tensor",
    "barrier",
)


@dataclass(frozen=True)
class Call:
    """One call of torch.distributed on a group of ours."""

    group: str
    purpose: str
    operation: str
    collective: bool


def record() -> list[Call]:
    """From here on, calls on the balancer's groups are added to the list, in this process."""
    calls: list[Call] = []

    def note(group: Any, operation: str, collective: bool) -> None:
        if isinstance(group, dist.ProcessGroup) and group.group_desc.startswith("eplb_runtime "):
            purpose = group.group_desc.removeprefix("eplb_runtime ")
            calls.append(Call(group.group_name, purpose, operation, collective))

    def watched(name: str, real: Any) -> Any:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            note(kwargs.get("group", next((a for a in args if isinstance(a, dist.ProcessGroup)), None)), name, True)
            return real(*args, **kwargs)

        return call

    for name in COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, watched(name, getattr(dist, name)))
    consensus.all_gather_into = watched("all_gather_into", consensus.all_gather_into)
    batch = dist.batch_isend_irecv

    def batched(operations: list[dist.P2POp]) -> Any:
        note(operations[0].group, "batch_isend_irecv", False)
        return batch(operations)

    dist.batch_isend_irecv = batched
    return calls


def first_calls_not_made_by_all(
    calls_of_rank: Sequence[Sequence[Call]], members: dict[str, Sequence[int]]
) -> list[tuple[str, dict[int, str]]]:
    """Groups whose first call is not one collective of all members: ``(purpose, {rank: its first call})``.

    Args:
        members: ranks of each group, by name.
    """
    wrong = []
    for group, ranks in members.items():
        first = {rank: next((c for c in calls_of_rank[rank] if c.group == group), None) for rank in ranks}
        operations = {rank: call.operation if call else "none" for rank, call in first.items()}
        if len(set(operations.values())) > 1 or not all(call and call.collective for call in first.values()):
            purpose = next((call.purpose for call in first.values() if call), "never used")
            wrong.append((purpose, operations))
    return wrong
