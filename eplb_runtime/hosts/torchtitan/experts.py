"""torchtitan's routed experts, replaced by its override mechanism: router, shared experts and parameters stay its own.

What is replaced runs where torchtitan has made plain local tensors of its DTensors, and where FSDP has brought together
the experts of this EP rank; so a batch goes its way through our layer there, and torchtitan's own `GroupedExperts`
computes the rows that arrive. A dispatcher of `settings.OWN_BACKENDS` (DeepEP) stays, and is
given slots in the place of logical experts: it takes id ``i`` to be on rank ``i // (E/R)``, as slots are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.distributed.spmd_types import maybe_set_sparse_mesh
from torchtitan.models.common.moe import RoutedExperts

from ...moe.experts.compute import SlotCounts
from ...moe.layer import ExpertParallelLayer, HostDispatchedLayer
from ..attaching.description import AttachError, MoELayer
from ..attaching.expert_spans import call_begins, call_ends
from .settings import OWN_BACKENDS, STANDARD

MADE_IN = "torchtitan.models.common.token_dispatcher"


class BalancedRoutedExperts(RoutedExperts):
    """Routed experts whose tokens go where the placement says; ``only_shapes``: what comes is no batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        pass

    _layer: ExpertParallelLayer | HostDispatchedLayer | None = None
    only_shapes = False

    def forward(
        self, x_BLD: Tensor, topk_scores_BLK: Tensor, topk_expert_ids_BLK: Tensor, num_local_tokens_per_expert_E: Tensor
    ) -> Tensor:
        """Return the routed experts' results ``[B, L, D]`` for logical ids, and count the load. With ``only_shapes``
        return a copy of ``x_BLD``, uncounted. RuntimeError: not attached, or a CUDA graph is captured."""
        if self._layer is None:
            raise RuntimeError(
                "eplb_runtime's experts are in the model, and its balancer was never attached: call "
                "eplb_runtime.hosts.torchtitan.balance(config) on the config, and leave "
                "config.model_spec.post_optimizer_build_fn as it sets it"
            )
        if self.only_shapes:
            return x_BLD.clone()
        if x_BLD.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph would repeat one batch's exchange of tokens for ever: set training.disable_cuda_graphs"
            )
        if isinstance(self._layer, HostDispatchedLayer):
            columns, call = self._layer, None
            if columns.expert_clock.on and self.training:
                x_BLD, call = call_begins(columns.expert_clock, x_BLD)
            slots_BLK = columns.slots(x_BLD, topk_expert_ids_BLK)
            counts_P = num_local_tokens_per_expert_E.index_select(0, columns.logical_of_slots)
            out: Tensor = call_ends(call, x_BLD, super().forward(x_BLD, topk_scores_BLK, slots_BLK, counts_P))
            return columns.checked(out)
        batch, length, width = x_BLD.shape
        out_TD = self._layer(
            x_BLD.reshape(batch * length, width),
            topk_expert_ids_BLK.reshape(batch * length, -1),
            topk_scores_BLK.reshape(batch * length, -1),
        )
        return out_TD.view(batch, length, width)


@override(target=RoutedExperts.Config, description="eplb_runtime: experts that can change their ranks", exact=True)
def balanced_experts(config: RoutedExperts.Config) -> BalancedRoutedExperts.Config:
    return derive(config, BalancedRoutedExperts.Config)


def routed_experts(model: nn.Module) -> Iterator[tuple[str, RoutedExperts]]:
    """Yield name and module of each `RoutedExperts` of a model, in its order."""
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts):
            yield name, module


def describe(name: str, routed: RoutedExperts, backend: str) -> MoELayer:
    """Return the description of one layer. AttachError: our override has not replaced its module, or its dispatcher is
    another than that of the ``moe_comm_backend``."""
    if not isinstance(routed, BalancedRoutedExperts):
        raise AttachError(
            f"{name} is a {type(routed).__name__} that eplb_runtime's override did not replace: "
            "override.imports must have eplb_runtime.hosts.torchtitan.experts.balanced_experts (one given on the "
            "command line replaces the whole list), and nothing else may override RoutedExperts"
        )
    experts, kind = routed.inner_experts, type(routed.token_dispatcher)
    names = tuple(own for own, _ in experts.named_parameters())

    def compute(rows_MD: Tensor, counts_S: SlotCounts, parameters: Sequence[Tensor]) -> Tensor:
        with maybe_set_sparse_mesh():
            given = dict(zip(names, parameters, strict=True))
            out_MD: Tensor = functional_call(experts, given, (rows_MD, counts_S.counts_S))
        return out_MD

    def install(layer: ExpertParallelLayer | HostDispatchedLayer) -> None:
        routed._layer = layer

    def live_weights() -> Sequence[Tensor]:
        """Return this EP rank's experts as local tensors; as the block computes, FSDP keeps DTensors on ``ep``."""
        weights = [getattr(experts, name) for name in names]
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in weights]

    what = (f"{name}.inner_experts", experts, experts.num_experts, names)
    if backend != STANDARD:
        if kind.__name__ != OWN_BACKENDS[backend] or kind.__module__ != MADE_IN:
            raise AttachError(
                f"{name} has a {kind.__module__}.{kind.__name__}, and the model's config says {backend}: leave "
                f"token_dispatcher as moe_comm_backend='{backend}' makes it"
            )
        return MoELayer(*what, None, install)
    # Of quantised products (MXFP8): the rows of an expert are filled up to so many.
    alignment = getattr(routed.token_dispatcher, "pad_multiple", 1)
    return MoELayer(*what, compute, install, live_weights, alignment=alignment)
