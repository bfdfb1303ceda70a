"""torchtitan's own token dispatcher of DeepEP stays, and is given slots in the place of logical experts: it takes id
``i`` to be on rank ``i // (E/R)``, as slots are. No torchtitan is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..attaching.expert_spans import call_begins, call_ends
from .settings import OWN_BACKENDS

MADE_IN = "torchtitan.models.common.token_dispatcher"

Forward = Callable[..., Tensor]


def forward_by_slots(
    routed: Any, columns: Any, own: Forward, hidden_BLD: Tensor, scores_BLK: Tensor, ids_BLK: Tensor, counts_E: Tensor
) -> Tensor:
    """Return one batch through torchtitan's own forward, with ids, and what is counted by them, renamed to slots."""
    clock, call = columns.expert_clock, None
    if clock.on and routed.training:
        hidden_BLD, call = call_begins(clock, hidden_BLD)
    slots_BLK = columns.slots(hidden_BLD, ids_BLK)
    counts_P = counts_E.index_select(0, columns.logical_of_slots)
    out: Tensor = call_ends(call, hidden_BLD, own(hidden_BLD, scores_BLK, slots_BLK, counts_P))
    return out


def why_not_renamed(name: str, routed: Any, backend: str) -> str:
    """Return why a layer cannot be given slots by `forward_by_slots`, or ""."""
    kind = type(routed.token_dispatcher)
    if kind.__name__ != OWN_BACKENDS[backend] or kind.__module__ != MADE_IN:
        return (
            f"{name} has a {kind.__module__}.{kind.__name__}, and the model's config says {backend}: leave "
            f"token_dispatcher as moe_comm_backend='{backend}' makes it"
        )
    return ""
