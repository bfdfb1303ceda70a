"""From a torchtitan config to a balanced training: changes of the config, and what follows once optimizers are built.

torchtitan makes pipeline stages without examples of what they get. So torch runs a forward and a backward of its own
through them, on unwritten memory, ahead of the first step and whenever training and validation take turns. That is no
batch: it counts nowhere, and no token travels.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as titan
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

from ...balancer.balancer import Balancer
from ...config import BalancerConfig
from ...distributed.ranks import Ranks
from .. import pipelining
from ..attaching.attach import attach_stages
from ..attaching.checks import describe_together, device_of
from ..attaching.description import NOT_RUN, AttachError, Described, HostModel, ShardingMark, mark_spread, stages_of
from ..attaching.state_hooks import keep_logical_order
from .experts import BalancedRoutedExperts, balanced_experts, describe, routed_experts
from .settings import BACKENDS, STANDARD, TitanSettings, backend_of, notes, refusals

logger = logging.getLogger("eplb_runtime")

if not hasattr(titan, "_clip_grad_norm_with_ep"):
    raise ImportError("balancing torchtitan needs its version 0.3.0: pip install 'eplb-runtime[torchtitan]'")

BuildFunction = Callable[[Any, list[nn.Module], ParallelDims], None]


def balance(config: Any, balancer_config: BalancerConfig | None = None) -> None:
    """Change a torchtitan config so that the training made of it balances its routed experts.

    Add an override to ``config.override.imports``, one more call after the model's own ``post_optimizer_build_fn``, and
    one after its ``pipelining_fn``. The balancer is ``trainer.model_parts[0]._eplb_runtime_balancer`` afterwards.

    Args:
        config: a ``Trainer.Config`` of torchtitan 0.3.0, before it is built; changed in place.
        balancer_config: settings, the same on every rank; None: the defaults.

    Raises:
        AttachError: the config has no model, is balanced already, or has an ``spmd_backend`` with which
            torchtitan itself would fail. Other settings are refused, on every rank, when the Trainer is built.
    """
    if config.model_spec is None:
        raise AttachError("the config has no model_spec: balance() comes after it is chosen")
    path = f"{balanced_experts.__module__}.{balanced_experts.__name__}"
    if path in config.override.imports:
        raise AttachError("this config is balanced already: call balance() once")
    backend = config.parallelism.spmd_backend
    if backend not in BACKENDS or torch.__version__ < BACKENDS[backend]:
        known = " or ".join(f"'{name}' (torch {needed} or newer)" for name, needed in BACKENDS.items())
        raise AttachError(
            f"spmd_backend='{backend}' with torch {torch.__version__}: set parallelism.spmd_backend={known}"
        )
    config.override.imports = [*config.override.imports, path]
    spec = config.model_spec
    spec.post_optimizer_build_fn = partial(
        _build, spec.post_optimizer_build_fn, balancer_config or BalancerConfig(), trainer_config=config
    )
    if spec.pipelining_fn is not None:
        spec.pipelining_fn = partial(build_pipeline, spec.pipelining_fn)


def _build(
    own: BuildFunction | None,
    config: BalancerConfig,
    optimizers: Any,
    model_parts: list[nn.Module],
    parallel_dims: ParallelDims,
    *,
    trainer_config: Any,
) -> None:
    """Attach after the model's own function; raises `AttachError` on every rank, or on none."""
    if own is not None:
        own(optimizers, model_parts, parallel_dims)

    def job(balancer_config: BalancerConfig) -> Described:
        slots = balancer_config.replica_slots
        settings = _live_settings(optimizers, model_parts, parallel_dims, trainer_config, slots)
        refused = [str(one) for one in refusals(settings)]
        if balancer_config.initial_placement is not None:
            refused.append("initial_placement: torchtitan makes and loads experts in logical order; leave it out")
        if refused:
            raise AttachError("; also, ".join(refused))
        if settings.moe_comm_backend != STANDARD and dist.get_rank() == 0:
            logger.warning(NOT_RUN, "moe_comm_backend", settings.moe_comm_backend)
        ep_ranks = tuple(dist.get_process_group_ranks(parallel_dims.get_mesh("ep").get_group()))
        numbers = numbers_of(model_parts) if parallel_dims.pp_enabled else (0,)
        # The loss is divided by the tokens of all ranks, and FSDP adds up without dividing.
        shards = parallel_dims.get_mesh("efsdp").size()
        ranks = Ranks(ep=ep_ranks, stages=numbers, gradient_divisor=1, divided_rows=shards)
        stages = stages_of(numbers, model_parts, [_host(part, ep_ranks, settings) for part in model_parts])
        return Described(stages, optimizers.optimizers, balancer_config, ranks, device_of(stages, None), optimizers)

    balancer = attach_stages(describe_together("attach", job, config))
    if parallel_dims.pp_enabled:
        _accompany(model_parts, balancer)
    _clip_experts(model_parts, balancer)


def _host(part: nn.Module, ep_ranks: tuple[int, ...], settings: TitanSettings) -> HostModel:
    """A model, or a stage of it: which may have no routed experts. The experts are where torchtitan has put them."""
    backend = str(settings.moe_comm_backend)
    layers = [describe(name, routed, backend) for name, routed in routed_experts(part)]
    for layer in layers:
        mark_spread(layer.experts, ShardingMark(layer.num_experts // len(ep_ranks), "", ep_ranks))
    # Batches are packed: every token is real.
    return HostModel(
        tuple(layers),
        save_together=partial(keep_logical_order, part, layers, same_tensors=True),
        saves_itself="torchtitan's own checkpointer (config.checkpoint)",
        dispatches=backend != STANDARD,
        notes=tuple(notes(settings)),
    )


def _live_settings(
    optimizers: Any, model_parts: Sequence[nn.Module], dims: ParallelDims, trainer_config: Any, replica_slots: int
) -> TitanSettings:
    blocks = [block for part in model_parts for block in part.modules()]
    # Of the whole model, also where this rank's stages have none.
    traversed = trainer_config.model_spec.model.traverse(LocalTokenDispatcher.Config)
    dispatchers = [one for _, one, _, _ in traversed]
    return TitanSettings(
        top_k=dispatchers[0].top_k if dispatchers else 0,
        expert_parallel_degree=dims.ep,
        tensor_parallel_degree=dims.tp,
        pipeline_parallel_degree=dims.pp,
        data_parallel_replicate_degree=dims.dp_replicate,
        expert_data_parallel_size=max(dims.world_size // (dims.pp * dims.ep), 1),
        moe_comm_backend=backend_of(dispatchers),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        compiled=any(one._compiled_call_impl is not None and any(True for _ in routed_experts(one)) for one in blocks),
        optimizers=tuple(sorted({type(optimizer).__name__ for optimizer in optimizers.optimizers})),
        replica_slots=replica_slots,
    )


# -- clipping ----------------------------------------------------------------------------------------------------------

_BALANCER = "_eplb_runtime_balancer"


def _clip_experts(model_parts: Sequence[nn.Module], balancer: Balancer) -> None:
    """torchtitan takes the norm over what each rank holds, in the order of the rows: its last bits follow the
    placement. For a balanced model each logical expert counts once, in logical order."""
    everything = [parameter for part in model_parts for parameter in part.parameters()]
    setattr(everything[0], _BALANCER, (balancer, len(everything)))
    own = titan._clip_grad_norm_with_ep
    if hasattr(own, _BALANCER):
        return

    @wraps(own)
    def clip(
        parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool, *rest: Any
    ) -> Tensor:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        found = next((getattr(parameter, _BALANCER) for parameter in given if hasattr(parameter, _BALANCER)), None)
        if found is None:
            return own(given, max_norm, norm_type, error_if_nonfinite, *rest)
        of_model, count = found
        if len(given) != count or norm_type != 2.0:
            raise RuntimeError(
                "a balanced model is clipped by the 2-norm over all of its parameters, and nothing else: "
                f"norm_type={norm_type}, {len(given)} parameters for {count}"
            )
        norm = of_model.clip_grad_norm_(max_norm)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise RuntimeError(f"the norm of the gradients is {float(norm)}")
        return norm

    setattr(clip, _BALANCER, True)
    titan._clip_grad_norm_with_ep = clip


_SCHEDULE = "_eplb_runtime_schedule"
_SHAPE_METHODS = ("_forward_metadata_inference", "_backward_metadata_inference")
"""Methods by which torch's stages learn shapes."""

Built = tuple[pipelining.Schedule, list[nn.Module], bool, bool]


def build_pipeline(own: Callable[..., Built], model: nn.Module, **options: Any) -> Built:
    """Call ``own``, the model's ``pipelining_fn``; return its result. Its parts get the schedule as an attribute."""
    built = own(model, **options)
    for part in built[1]:
        part.__dict__[_SCHEDULE] = built[0]
    return built


def numbers_of(model_parts: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the pipeline stage of each part of a model. AttachError: its schedule, or torch's stages, are unknown."""
    stages = pipelining.stages_of(_schedule_of(model_parts))
    known = (stage for stage in stages if all(hasattr(stage, method) for method in _SHAPE_METHODS))
    number_of = {id(stage.submod): stage.stage_index for stage in known}
    if not all(id(part) in number_of for part in model_parts):
        raise AttachError(
            f"the stages of torch {torch.__version__} learn shapes in a way that eplb_runtime does not know, and would "
            "count tokens that are none: use torch 2.13 or 2.14"
        )
    return tuple(number_of[id(part)] for part in model_parts)


def _accompany(model_parts: Sequence[nn.Module], balancer: Balancer) -> None:
    schedule = _schedule_of(model_parts)
    pipelining.accompany(schedule, balancer)
    for stage in pipelining.stages_of(schedule):
        for method in _SHAPE_METHODS:
            setattr(stage, method, _without_tokens(getattr(stage, method), stage.submod))
    for part in model_parts:
        del part.__dict__[_SCHEDULE]


def _schedule_of(model_parts: Sequence[nn.Module]) -> pipelining.Schedule:
    schedule: pipelining.Schedule | None = model_parts[0].__dict__.get(_SCHEDULE)
    if schedule is None:
        raise AttachError(
            "the pipeline was made by another function than the one that balance() set: leave "
            "config.model_spec.pipelining_fn as it sets it"
        )
    return schedule


def _without_tokens(own: Callable[..., Any], model: nn.Module) -> Callable[..., Any]:
    """In it, routed experts give back what they get, and torchtitan's counters of tokens end as they were."""
    experts = [module for module in model.modules() if isinstance(module, BalancedRoutedExperts)]
    counters = [module.tokens_per_expert_E for module in model.modules() if isinstance(module, MoE)]

    @wraps(own)
    def without_tokens(*args: Any, **options: Any) -> Any:
        before = [counter.clone() for counter in counters]
        for routed in experts:
            routed.only_shapes = True
        try:
            return own(*args, **options)
        finally:
            for routed in experts:
                routed.only_shapes = False
            for counter, was in zip(counters, before, strict=True):
                counter.copy_(was)

    return without_tokens
