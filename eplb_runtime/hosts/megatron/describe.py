"""Where a Megatron model has its experts, and what of its settings the balancer cannot follow."""

import logging
import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_layer import MoELayer as MegatronLayer
from torch import nn

from ...config import BalancerConfig
from ...distributed.ranks import Ranks
from ..attaching.description import (
    NOT_RUN,
    AttachError,
    HostModel,
    MoELayer,
    ShardingMark,
    mark_spread,
    sums_of_gradients,
    sums_of_results,
)
from .layer import QUANTIZE_AGAIN, install, watch
from .optimizers import adapt, options_of
from .saved_state import weights
from .settings import NOT_FOR_REAL, JobSettings, refusals, settings_of, sums_in_order

logger = logging.getLogger("eplb_runtime")

_OF_A_SLOT = (re.compile(r"(local_experts\.)(\d+)(\..*)"), re.compile(r"(.*\D)(\d+)()"))
"""``local_experts.3.linear_fc1.weight`` of SequentialMLP, ``linear_fc1.weight3`` of TEGroupedMLP."""


def describe(model: nn.Module) -> HostModel:
    """Return a `HostModel` of a Megatron model or stage, as ``get_model`` gives it or bare. Marks its experts as
    spread. AttachError: its experts, or what wraps it, are of an unknown kind."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, BaseMoELayer)]
    for name, module in found:
        if not isinstance(module, MegatronLayer):
            raise AttachError(f"{name} is a {type(module).__name__}, no MoELayer: how it routes tokens is not known")
    layers = tuple(_describe_layer(name, module) for name, module in found)
    wrapped = _is_wrapped(model, layers)
    if layers and wrapped and not hasattr(model, "ddp_config"):
        raise AttachError(
            f"the experts' gradients are in buffers of Megatron's DistributedDataParallel, and the model given is a "
            f"{type(model).__name__} inside it: attach the DistributedDataParallel that get_model gives"
        )
    # With tensor parallelism ranks hold parts; with overlap_param_gather parts come late, in the next forward.
    in_parts = parallel_state.is_initialized() and parallel_state.get_tensor_model_parallel_world_size() > 1
    in_parts = in_parts or getattr(getattr(model, "ddp_config", None), "overlap_param_gather", False)
    return HostModel(
        layers,
        ranks=_ranks(model, found, wrapped),
        optimizer=partial(adapt, wrapped),
        dispatches=True,
        dense_is_equal=not (layers and in_parts),
        problems=partial(_problems, model, wrapped),
        weights=partial(weights, layers),
        notes=_notes(found),
    )


def watched(model: nn.Module) -> HostModel:
    """Return the MoE layers of ``model``, to be watched only. AttachError: a CUDA graph hides their choices."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, MegatronLayer)]
    for _, module in found:
        graphs = settings_of(vars(module.config))
        if graphs.cuda_graph_impl != "none" and "moe_preprocess" in graphs.cuda_graph_modules.split(","):
            raise AttachError("a replay of moe_preprocess shows no choices: record without it in cuda_graph_modules")
    layers = [
        MoELayer(
            f"{name}.experts",
            module.experts,
            module.config.num_moe_experts,
            watch=partial(watch, module),
            experts_here=module.num_local_experts,
        )
        for name, module in found
    ]
    return HostModel(tuple(layers), dispatches=True)


def _is_wrapped(model: nn.Module, layers: Sequence[MoELayer]) -> bool:
    """Return whether gradients go to buffers of Megatron's own, which frozen parameters have no part in."""
    experts = [layer.parameter(name) for layer in layers for name in layer.parameters]
    found = {hasattr(parameter, "main_grad") for parameter in experts if parameter.requires_grad}
    if len(found) > 1:
        raise AttachError(
            f"some experts of {type(model).__name__} have gradient buffers (main_grad) and some that are trained have "
            "none: freeze and unfreeze before Megatron's DistributedDataParallel is put around the model"
        )
    return found.pop() if found else hasattr(model, "ddp_config")


def _ranks(model: nn.Module, found: Sequence[tuple[str, Any]], wrapped: bool) -> Ranks | None:
    """None: no model of Megatron's, or a whole one without an MoE layer."""
    pipeline_size = parallel_state.get_pipeline_model_parallel_world_size() if parallel_state.is_initialized() else 1
    is_stage = pipeline_size > 1 and (bool(found) or isinstance(model, MegatronModule))
    if not found and not is_stage:
        return None
    group = found[0][1].ep_group if found else parallel_state.get_expert_model_parallel_group()
    is_divided = getattr(getattr(model, "ddp_config", None), "use_distributed_optimizer", False)
    return Ranks(
        ep=tuple(dist.get_process_group_ranks(group)),
        stages=(_stage(model, pipeline_size),) if is_stage else (0,),
        gradient_divisor=1 if wrapped else None,
        divided_state=is_divided and dist.get_world_size(parallel_state.get_expert_data_parallel_group()) > 1,
    )


def _stage(model: nn.Module, pipeline_size: int) -> int:
    """The number of a pipeline stage over the whole model: virtual stage by virtual stage, rank by rank."""
    chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    said: list[Any] = [part.vp_stage for part in model.modules() if hasattr(part, "vp_stage")]
    if chunks > 1 and (not said or said[0] is None):
        raise AttachError(
            f"the {type(model).__name__} does not say which of {chunks} virtual stages it is: make it with vp_stage=, "
            "as get_model does"
        )
    rank: int = parallel_state.get_pipeline_model_parallel_rank()
    return (said[0] * pipeline_size if chunks > 1 else 0) + rank


def settings_of_job(model: nn.Module, optimizers: Sequence[Any]) -> JobSettings | None:
    """Return the settings that a live model and its optimizers have; None: the model has no MoE layer here."""
    layers = [module for module in model.modules() if isinstance(module, MegatronLayer)]
    if not layers:
        return None
    options: dict[str, Any] = {"world_size": dist.get_world_size()}
    of_ddp = vars(model.ddp_config) if hasattr(model, "ddp_config") else {}
    of_optimizers = next(filter(None, map(options_of, optimizers)), {})
    for one in (of_ddp, of_optimizers, vars(layers[0].config)):
        options |= {name: value for name, value in one.items() if value is not None}
    return settings_of(options)


def _problems(model: nn.Module, wrapped: bool, optimizers: Sequence[Any], config: BalancerConfig) -> list[str]:
    found = [*_of_config(config, wrapped)]
    if (settings := settings_of_job(model, optimizers)) is None:
        return found
    found += [str(refusal) for refusal in refusals(settings)]
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, MegatronLayer)]
    found += [why for name, module in layers if (why := why_not_followed(name, module))][:1]
    if not found and dist.get_rank() == 0:
        for name, is_used in NOT_FOR_REAL.items():
            if is_used(settings):
                logger.warning(NOT_RUN, name, getattr(settings, name))
    return found


def why_not_followed(name: str, module: Any) -> str:
    """Return why FP8 experts of a layer would not quantize moved weights again; "": they would, or there is no FP8."""
    if getattr(module.config, "fp8", None) is None:
        return ""
    for own, part in module.experts.named_modules():
        weights = list(part.parameters(recurse=False))
        which = f"{name}.experts.{own} ({type(part).__name__})"
        if weights and not hasattr(part, QUANTIZE_AGAIN):
            return f"{which} has no {QUANTIZE_AGAIN}: when it quantizes its weights again is not known; leave fp8 out"
        if any(hasattr(weight, "_quantizer") for weight in weights):
            return f"{which} has weights that are FP8 themselves, which cannot be moved yet: set fp8_param_gather=False"
    return ""


def _of_config(config: BalancerConfig, wrapped: bool) -> Iterator[str]:
    if config.overlap:
        yield "overlap=True with Megatron is not supported yet: leave it False"
    if wrapped and config.dense_gradients == "allreduce":
        yield "Megatron's DistributedDataParallel averages gradients itself: leave dense_gradients='host'"
    if not wrapped and parallel_state.get_tensor_model_parallel_world_size() > 1:
        yield (
            "tensor parallelism needs Megatron's own reduction of gradients: wrap the model in its "
            "DistributedDataParallel, and give attach its optimizer"
        )


def _notes(layers: Sequence[tuple[str, Any]]) -> tuple[str, ...]:
    """Return lines that say which sums, of results or of gradients, depend on where experts are."""
    of_results: list[str] = []
    inexact = [(name, module.config) for name, module in layers if not sums_in_order(module.config)]
    for name, config in inexact[:1]:
        dispatcher = f"{name} and {len(inexact) - 1} other layers: {config.moe_token_dispatcher_type}"
        of_results = [sums_of_results(dispatcher, config.moe_router_topk)]
    holders = dist.get_world_size(parallel_state.get_expert_data_parallel_group()) if layers else 0
    return (*of_results, *sums_of_gradients(holders))


def _describe_layer(name: str, module: Any) -> MoELayer:
    experts, count = module.experts, module.num_local_experts
    slots = _slots(f"{name}.experts", experts, count)
    mark_spread(experts, ShardingMark(count, "", tuple(dist.get_process_group_ranks(module.ep_group))))
    return MoELayer(
        name=f"{name}.experts",
        experts=experts,
        num_experts=module.config.num_moe_experts,
        parameters=tuple(own for of_slots in slots.values() for own in of_slots),
        compute=None,
        install=partial(install, module),
        patched=(module.token_dispatcher,),
        slots=slots,
    )


def _slots(name: str, experts: nn.Module, count: int) -> dict[str, tuple[str, ...]]:
    """Names of the tensors of each slot, by what they are to an expert; every tensor must be one expert's."""
    found: dict[str, dict[int, str]] = {}
    for own, _ in experts.named_parameters():
        matches = [match for pattern in _OF_A_SLOT if (match := pattern.fullmatch(own)) is not None]
        if not matches:
            found[own] = {}
            continue
        head, slot, tail = matches[0].groups()
        found.setdefault(f"{head}*{tail}", {})[int(slot)] = own
    buffers = [own for own, buffer in experts.named_buffers() if isinstance(buffer, torch.Tensor)]
    odd = [what for what, of_slots in found.items() if sorted(of_slots) != list(range(count))] + buffers
    if odd or not found:
        raise AttachError(
            f"{name} ({type(experts).__name__}) must hold one tensor of each kind for each of its {count} experts, as "
            f"SequentialMLP and TEGroupedMLP do, and nothing else; it has {odd[0] if odd else 'none'}"
        )
    return {what: tuple(of_slots[slot] for slot in range(count)) for what, of_slots in found.items()}
