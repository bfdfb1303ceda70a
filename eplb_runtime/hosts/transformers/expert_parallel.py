"""Transformers' own expert parallelism, chosen by ``DistributedConfig(ep_implementation="eplb")``.

The library spreads experts over its mesh ``ep``, divides those of an EP rank over ``efsdp`` with FSDP2, and carries
tokens by all-to-all. All of that stays: this implementation gives the library's exchange slots in the place of logical
experts, one row for each choice of a token, and adds up a token's choices in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.distributed.expert_parallel import AllToAllEP

from ...distributed.ranks import Ranks
from ...moe.experts.slices import local
from ...moe.layer import HostDispatchedLayer
from ..attaching.description import AttachError, HostModel, MoELayer, Spread, mark_spread
from ..attaching.expert_spans import call_begins, call_ends
from ..module import StableSort

RealTokens = Callable[[int], Tensor | None]
_OF = "_eplb_runtime_expert_parallel"
CHOOSE = 'load it with DistributedConfig(..., ep_implementation="eplb")'


class BalancedEP(AllToAllEP):  # type: ignore[misc]
    """One experts module's exchange. Until ``attach`` it is the library's; then tokens go where the placement says."""

    def __init__(self, experts: nn.Module, ep_mesh: Any, tp_mesh: Any) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.layer: HostDispatchedLayer | None = None
        self.real_tokens: RealTokens = lambda tokens: None
        experts.__dict__[_OF] = self

    def __call__(self, hidden_TD: Tensor, topk_ids_TK: Tensor, topk_weights_TK: Tensor) -> Tensor:
        """As the library's; ids are logical."""
        if self.layer is None:
            out_TD: Tensor = super().__call__(hidden_TD, topk_ids_TK, topk_weights_TK)
            return out_TD
        clock, call = self.layer.expert_clock, None
        if clock.on and self.experts.training:
            hidden_TD, call = call_begins(clock, hidden_TD)
        tokens, top_k = topk_ids_TK.shape
        slots_TK = self.layer.slots(hidden_TD, topk_ids_TK, self._counted(tokens))
        rows_MD = hidden_TD.unsqueeze(1).expand(tokens, top_k, -1).reshape(tokens * top_k, -1)
        one_M1 = hidden_TD.new_ones(tokens * top_k, 1)
        with StableSort():
            rows_MD = super().__call__(rows_MD, slots_TK.reshape(-1, 1), one_M1)
        rows_MD = call_ends(call, hidden_TD, rows_MD)
        return (rows_MD.view(tokens, top_k, -1) * topk_weights_TK.unsqueeze(-1)).sum(dim=1)

    def _counted(self, tokens: int) -> Tensor | None:
        """bool ``[T]``: the real tokens that this rank counts; ranks of a TP group have the same tokens."""
        real_T = self.real_tokens(tokens)
        if self.tp_mesh.size() == 1:
            return real_T
        mine_T = torch.zeros(tokens, dtype=torch.bool, device=self.experts_device)
        mine_T[self.tp_mesh.get_local_rank() :: self.tp_mesh.size()] = True
        return mine_T if real_T is None else mine_T & real_T.to(mine_T.device)

    @property
    def experts_device(self) -> torch.device:
        return next(self.experts.parameters()).device

    def install(self, layer: HostDispatchedLayer) -> None:
        self.layer = layer


def describe_spread(model: nn.Module, padding: Any) -> HostModel:
    """Return the MoE layers of a model whose experts the library has spread, and the ranks of its meshes."""
    layers, ranks = [], set()
    for name, experts in model.named_modules():
        if getattr(experts, "_is_expert_parallel", False):
            layer, of_layer = _describe_layer(name, experts, padding.real_tokens)
            layers.append(layer)
            ranks.add(of_layer)
    if len(ranks) > 1:
        raise AttachError(f"the library has spread the layers of the model in different ways: {CHOOSE}")
    return HostModel(
        tuple(layers),
        padding.real_tokens,
        lambda: padding.watch(model, padding.see),
        ranks=ranks.pop(),
        dispatches=True,
        saves_itself="Transformers itself (save_pretrained, its Trainer, torch.distributed.checkpoint)",
    )


def _describe_layer(name: str, experts: nn.Module, real_tokens: RealTokens) -> tuple[MoELayer, Ranks]:
    found = experts.__dict__.get(_OF)
    if not isinstance(found, BalancedEP):
        raise AttachError(f"{name} is expert-parallel by another implementation of Transformers: {CHOOSE}")
    names = tuple(key for key, _ in experts.named_parameters())
    parameters = [experts.get_parameter(key) for key in names]
    ranks = tuple(dist.get_process_group_ranks(found.ep_mesh.get_group()))
    num_experts = found.num_local_experts * len(ranks)
    for key, parameter in zip(names, parameters, strict=True):
        if not isinstance(parameter, DTensor) or parameter.shape[0] != num_experts:
            raise AttachError(f"{name}.{key} is not spread by the library's plan: it would not move with its expert")
    found.real_tokens = real_tokens
    mark_spread(experts, Spread(found.num_local_experts, "", ranks))
    layer = MoELayer(name, experts, num_experts, names, None, found.install)
    # The library divides an expert's gradient by the number of batches itself.
    shards = found.num_local_experts // local(parameters[0]).shape[0]
    return layer, Ranks(ep=ranks, gradient_divisor=1, divided_rows=shards)
