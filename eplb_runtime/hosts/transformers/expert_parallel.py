"""Transformers' own expert parallelism, chosen by ``DistributedConfig(ep_implementation="eplb")``.

The library spreads experts over its mesh ``ep``, divides those of an EP rank over ``efsdp`` with FSDP2, and carries
tokens by all-to-all. All of that stays: this implementation gives the library's exchange slots in the place of logical
experts, one row for each choice of a token, and adds up a token's choices in their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP

from ...balancer.gradients.reduction import part_of_sum
from ...distributed.ranks import Ranks
from ...moe.experts.slices import local
from ...moe.layer import HostDispatchedLayer
from ..attaching.description import AttachError, HostModel, MoELayer, ShardingMark, mark_spread, sums_of_gradients
from ..attaching.expert_spans import call_begins, call_ends
from ..attaching.state_hooks import keep_logical_order
from ..module import StableSort
from .settings import refusals, replicas_of

RealTokens = Callable[[int], Tensor | None]
_OF = "_eplb_runtime_expert_parallel"


class BalancedEP(AllToAllEP):  # type: ignore[misc]
    """One experts module's exchange. Until ``attach`` it is the library's; then tokens go to their experts' ranks."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.layer: HostDispatchedLayer | None = None
        experts.__dict__[_OF] = self

    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        if self.layer is None:
            out_TD: Tensor = super().__call__(hidden_TD, topk_ids_TK, topk_weights_TK)
            return out_TD
        clock, call = self.layer.expert_clock, None
        if clock.on and self.experts.training:
            hidden_TD, call = call_begins(clock, hidden_TD)
        tokens, top_k = topk_ids_TK.shape
        slots_TK = self.layer.slots(hidden_TD, topk_ids_TK, self._counted(topk_ids_TK))
        rows_MD = hidden_TD.unsqueeze(1).expand(tokens, top_k, -1).reshape(tokens * top_k, -1)
        one_M1 = hidden_TD.new_ones(tokens * top_k, 1)
        with StableSort():
            rows_MD = super().__call__(rows_MD, slots_TK.reshape(-1, 1), one_M1)
        rows_MD = self.layer.checked(call_ends(call, hidden_TD, rows_MD))
        return (rows_MD.view(tokens, top_k, -1) * topk_weights_TK.unsqueeze(-1)).sum(dim=1)

    def _counted(self, topk_ids_TK: Tensor) -> Tensor | None:
        """bool ``[T]``: the real tokens that this rank counts; ranks of a TP group have the same tokens."""
        real_T = self.real_tokens(len(topk_ids_TK))
        if self.tp_mesh.size() == 1:
            return real_T
        places_T = torch.arange(len(topk_ids_TK), device=topk_ids_TK.device) % self.tp_mesh.size()
        mine_T = places_T == self.tp_mesh.get_local_rank()
        return mine_T if real_T is None else mine_T & real_T.to(mine_T.device)

    def install(self, real_tokens: RealTokens, layer: HostDispatchedLayer) -> None:
        self.layer, self.real_tokens = layer, real_tokens
        if isinstance(self.experts, FSDPModule):
            self.experts.set_custom_reduce_scatter(InRankOrder())  # type: ignore[arg-type]


class InRankOrder:
    """FSDP's sum of gradients of experts over the ranks that divide them, added up in the order of ranks whatever a
    row's place: a ring begins at another rank for each. As many bytes travel; all rows are here at once."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        if op != dist.ReduceOp.SUM:  # with a divisor the library asks for sums
            raise RuntimeError(f"gradients of experts are reduced by {op}, not by a sum: leave FSDP's divisors alone")
        output_tensor.copy_(part_of_sum(input_tensor, group))


with suppress(ImportError, AttributeError):  # without Accelerate there is no Trainer
    from transformers import Trainer

    def _norm(self: Any, model: Any, max_norm: float, own: Any = Trainer._mixed_mesh_grad_norm) -> Any:
        """By logical expert where the model is balanced; the library's goes by rows, which follow the placement."""
        balancer = getattr(model, "_eplb_runtime_balancer", None)
        return own(self, model, max_norm) if balancer is None else balancer.clip_grad_norm_(max_norm)

    Trainer._mixed_mesh_grad_norm = _norm  # type: ignore[method-assign]


def describe_spread(model: nn.Module, padding: Any) -> HostModel:
    """Return a `HostModel` of a model whose experts the library has spread, with its ranks. Mark the experts as spread.
    AttachError: a setting, an adapter or a kind of experts cannot be balanced."""
    named = dict(model.named_modules())
    configs = (getattr(getattr(module, "config", None), "distributed_config", None) for module in named.values())
    given = vars(next(filter(None, configs)))
    if refused := [str(one) for one in refusals(given)]:
        raise AttachError("; also, ".join(refused))
    spread = {name: module for name, module in named.items() if getattr(module, "_is_expert_parallel", False)}
    if outer := next((name.removesuffix(".base_layer") for name in spread if name.endswith(".base_layer")), ""):
        raise AttachError(
            f"{outer} adapts experts that the library has spread, which PEFT cannot compute with: target other "
            "modules, or load the model without ep_size"
        )
    described = [_describe_layer(name, module, padding.real_tokens) for name, module in spread.items()]
    layers, ranks = [layer for layer, _ in described], {of_layer for _, of_layer in described}
    if len(ranks) > 1:
        raise AttachError("the library has spread the layers of the model in different ways: leave ep_plan out")
    return HostModel(
        tuple(layers),
        padding.real_tokens,
        padding.watch,
        save_together=partial(keep_logical_order, model, layers),
        saves_itself="Transformers (save_pretrained, its Trainer, torch.distributed.checkpoint)",
        ranks=ranks.pop(),
        dispatches=True,
        notes=sums_of_gradients(replicas_of(given)),
    )


def _describe_layer(name: str, experts: nn.Module, real_tokens: RealTokens) -> tuple[MoELayer, Ranks]:
    found: Any = experts.__dict__[_OF]
    parameters = dict(experts.named_parameters())
    ranks = tuple(dist.get_process_group_ranks(found.ep_mesh.get_group()))
    of_rank: int = found.num_local_experts
    for key, parameter in parameters.items():
        if not isinstance(parameter, DTensor) or parameter.shape[0] != of_rank * len(ranks):
            raise AttachError(f"{name}.{key} is not spread by the library's plan: it would not move with its expert")
    odd = [key for key, one in parameters.items() if not one.is_floating_point() or one.element_size() < 2]
    if odd := [*odd, *(key for key, _ in experts.named_buffers())]:
        raise AttachError(
            f"{name}.{odd[0]}: quantised experts are not supported; load the model in bfloat16, float16 or float32"
        )
    mark_spread(experts, ShardingMark(of_rank, "", ranks))
    install, num_experts = partial(found.install, real_tokens), of_rank * len(ranks)
    layer = MoELayer(name, experts, num_experts, tuple(parameters), install=install, patched=(found,))
    shards = of_rank // local(next(iter(parameters.values()))).shape[0]
    # The library divides an expert's gradient by the number of batches itself.
    return layer, Ranks(ep=ranks, gradient_divisor=1, divided_rows=shards)
