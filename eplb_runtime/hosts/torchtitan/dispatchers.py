"""torchtitan's own token dispatchers (DeepEP, HybridEP, MinimalAsyncEP): they stay, and are given slots in the place of
logical experts. Each takes id ``i`` to be on rank ``i // (E/R)``, as slots are.

What is checked before is here, with no torchtitan imported: `why_not_renamed` looks, and `why_elsewhere` sends a batch
through the layer's own forward and dispatcher, and sees where it comes to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..attaching.expert_spans import call_begins, call_ends
from .settings import OWN_BACKENDS

GIVEN = ("x_TD", "topk_scores_TK", "topk_expert_ids_TK", "num_local_tokens_per_expert_E")
"""Arguments of ``dispatch`` in torchtitan 0.3.0."""
GIVEN_BY_MODEL = ("x_BLD", "topk_scores_BLK", "topk_expert_ids_BLK", "num_local_tokens_per_expert_E")
"""Arguments of ``RoutedExperts.forward``."""
MADE_IN = "torchtitan.models.common.token_dispatcher"
_BASE = 128
"""A token of the probe says its number in two digits, which bfloat16 holds exactly."""

Forward = Callable[..., Tensor]


def forward_by_slots(
    routed: Any,
    columns: Any,
    own: Forward,
    hidden_BLD: Tensor,
    scores_BLK: Tensor,
    ids_BLK: Tensor,
    counts_E: Tensor,
) -> Tensor:
    """Return one batch through torchtitan's own forward, with ids, and what is counted by them, renamed to slots."""
    clock, call = columns.expert_clock, None
    if clock.on and routed.training:
        hidden_BLD, call = call_begins(clock, hidden_BLD)
    slots_BLK = columns.slots(hidden_BLD, ids_BLK)
    counts_P = counts_E.index_select(0, columns.logical_of_slots)
    out: Tensor = call_ends(call, hidden_BLD, own(hidden_BLD, scores_BLK, slots_BLK, counts_P))
    return out


def why_not_renamed(name: str, routed: Any, own: Forward, backend: str) -> str:
    """Return why a layer cannot be given slots by `forward_by_slots`, or ""."""
    dispatcher = routed.token_dispatcher
    kind = type(dispatcher)
    if kind.__name__ != OWN_BACKENDS[backend] or kind.__module__ != MADE_IN:
        return (
            f"{name} has a {kind.__module__}.{kind.__name__}, and the model's config says {backend}: leave "
            f"token_dispatcher as moe_comm_backend='{backend}' makes it"
        )
    for what, function, known in ((kind.__name__, kind.dispatch, GIVEN), ("RoutedExperts", own, GIVEN_BY_MODEL)):
        given = tuple(inspect.signature(function).parameters)[1:]
        if given != known:
            return (
                f"{name}: {what} of this torchtitan takes {', '.join(given)}, and not {', '.join(known)}: where it "
                "reads ids is not known; use torchtitan 0.3.0, or moe_comm_backend='standard'"
            )
    if dispatcher.ep_mesh is None:
        return f"{name}: its dispatcher has no mesh of expert-parallel ranks: set parallelism.expert_parallel_degree"
    return ""


@dataclass(frozen=True)
class _Probe:
    """A batch whose tokens say who they are: the number of each over all ranks, and where it goes."""

    number_T: Tensor
    slots_TK: Tensor

    @classmethod
    def of(cls, rank: int, tokens: int, top_k: int, num_experts: int, device: Any) -> _Probe:
        """All ranks together use all experts as far as tokens reach."""
        number_T = torch.arange(rank * tokens, (rank + 1) * tokens, device=device)
        return cls(number_T, (number_T[:, None] * top_k + torch.arange(top_k, device=device)) % num_experts)

    def hidden(self, width: int, dtype: torch.dtype) -> Tensor:
        hidden_TD = torch.zeros(len(self.number_T), width, dtype=dtype, device=self.number_T.device)
        hidden_TD[:, 0], hidden_TD[:, 1] = self.number_T // _BASE, self.number_T % _BASE
        return hidden_TD


class _Seen:
    """Takes the place of the experts: gives back what it gets, and keeps it."""

    def __init__(self) -> None:
        self.rows_RD = self.counts_e = torch.empty(0)

    def __call__(self, rows_RD: Tensor, counts_e: Tensor) -> Tensor:
        self.rows_RD, self.counts_e = rows_RD.detach().clone(), counts_e.detach().clone()
        return rows_RD * 1

    def numbers(self) -> list[list[int]]:
        """Of the tokens that came, by local slot; rows that fill up an expert's last are among them."""
        number_R = (self.rows_RD[:, 0].float() * _BASE + self.rows_RD[:, 1].float()).round().long()
        ends = self.counts_e.cumsum(0).tolist()
        return [number_R[first:end].tolist() for first, end in zip([0, *ends[:-1]], ends, strict=True)]


def why_elsewhere(name: str, routed: Any, own: Forward, width: int, device: torch.device) -> str:
    """Return what is otherwise than renaming to slots needs it, or "", by a batch through a layer's own forward and
    dispatcher with the experts left out: every token comes to the ranks of its slots, back, and its gradient, too.
    Collective over the EP group."""
    dispatcher = routed.token_dispatcher
    group, top_k, experts = dispatcher.ep_mesh.get_group(), dispatcher.top_k, dispatcher.num_experts
    rank, ranks = group.rank(), group.size()
    here = experts // ranks
    tokens = min(experts, dispatcher.num_max_tokens_per_rank, _BASE * _BASE // ranks)
    probes = [_Probe.of(of_rank, tokens, top_k, experts, device) for of_rank in range(ranks)]
    dtype = getattr(dispatcher, "dtype", None) or torch.bfloat16
    hidden_BLD = probes[rank].hidden(width, dtype)[None].requires_grad_()
    slots_BLK = probes[rank].slots_TK[None]
    counts_P = slots_BLK.flatten().bincount(minlength=experts)
    seen = _Seen()
    with torch.enable_grad():
        view = SimpleNamespace(token_dispatcher=dispatcher, inner_experts=seen)
        out_BLD = own(view, hidden_BLD, torch.ones_like(slots_BLK, dtype=torch.float32), slots_BLK, counts_P)
        (gradient_BLD,) = torch.autograd.grad(out_BLD, hidden_BLD, torch.ones_like(hidden_BLD))
    came = seen.numbers()
    for local in range(here):
        slot = rank * here + local
        wanted = [n for probe in probes for n in probe.number_T[(probe.slots_TK == slot).any(dim=1)].tolist()]
        if len(came) != here or sorted(came[local][: len(wanted)]) != wanted:
            return (
                f"{name}: tokens sent to slot {slot} by {type(dispatcher).__name__} did not come to local expert "
                f"{local} of rank {rank} of its EP group: it does not take id i to be on rank i // {here}; use "
                "moe_comm_backend='standard'"
            )
    expected = {
        "": (out_BLD, hidden_BLD * top_k),
        "the gradient of ": (gradient_BLD, torch.full_like(hidden_BLD, top_k)),
    }
    for what, (found, known) in expected.items():
        if found.shape != known.shape or not torch.allclose(found.detach().float(), known.detach().float(), rtol=0.02):
            return (
                f"{name}: {what}a token that {type(dispatcher).__name__} has sent to {top_k} experts does not come "
                "back as their sum: use moe_comm_backend='standard'"
            )
    return ""
