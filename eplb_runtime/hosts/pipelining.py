"""Schedules of ``torch.distributed.pipelining``: this rank's stages, attached together.

A schedule runs the forwards and backwards of several micro-batches between two optimizer steps. What that asks of a
balancer is here: which stages are on this rank, what of a stage would be counted or trained wrongly, no commit inside a
step, and gradients of copies where a schedule splits its backward or scales what a stage has gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from ..attaching.description import AttachError
from ..balancer import Balancer
from ..config import BalancerConfig
from ..ranks import Ranks
from . import MoE, _meet
from . import attach as attach_models

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def attach(
    schedule: Schedule,
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    layers: Sequence[Sequence[MoE]] | None = None,
    config: BalancerConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    ranks: Ranks | None = None,
) -> Balancer:
    """Spread the experts of this rank's stages, and balance all stages by one plan. Collective: every rank calls it.

    As `eplb_runtime.attach` of the stages' modules. Besides, rebalancing is refused while ``schedule.step`` runs, and
    gradients of copies are right where the schedule splits backwards (``W`` after ``I``) or divides them by the number
    of micro-batches (``scale_grads``). Inside ``balancer.no_sync()``, ``schedule.step`` brings gradients of copies home
    once for each stage instead of once a micro-batch.

    Args:
        schedule: made of `PipelineStage`\\ s with ``input_args`` and ``output_args``.
        optimizers: one, or several that step once each after ``schedule.step``; None: only ``schedule.eval``.
        layers: for modules of your own, the MoE layers of each stage, in the order of the stages' numbers.
        config: settings, the same on every rank.
        ep_group: ranks among which the experts of these stages are spread, all of which hold them; None: all ranks that
            hold them.
        ranks: what `ranks_of` gives, changed: for a job that is not the world, or another divisor of gradients; in the
            place of ``ep_group``.

    Raises:
        AttachError: as ``eplb_runtime.attach``; or a stage's shapes are not static, or gradients would not reach the
            stage before.
    """
    config = config if config is not None else BalancerConfig()
    problem = None
    try:
        if ranks is not None and ep_group is not None:
            raise AttachError("give ep_group or ranks: ranks has the EP group, too")
        for stage in _stages(schedule):
            _check_stage(stage, schedule._has_backward)
    except Exception as error:
        problem = error
    chosen = ranks if ranks is not None else ranks_of(schedule, ep_group)
    _meet(chosen, "attach to a schedule", config, problem)
    stages = _stages(schedule)
    balancer = attach_models([stage.submod for stage in stages], optimizers, layers=layers, config=config, ranks=chosen)
    schedule.step = _uninterrupted(schedule, balancer)  # type: ignore[method-assign]
    for stage in stages:
        _bring_copies_home(stage, balancer)
    return balancer


def ranks_of(schedule: Schedule, ep_group: dist.ProcessGroup | None = None) -> Ranks:
    """The stages that a schedule has on this rank, and the EP group of all of them."""
    ep = None if ep_group is None else tuple(dist.get_process_group_ranks(ep_group))
    return Ranks(ep=ep, stages=tuple(stage.stage_index for stage in _stages(schedule)))


def _stages(schedule: Schedule) -> list[PipelineStage]:
    """By their numbers."""
    stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    return sorted(stages, key=lambda stage: stage.stage_index)  # type: ignore[return-value, arg-type]


def _check_stage(stage: PipelineStage, has_backward: bool) -> None:
    """What would be counted or trained wrongly without a word."""
    number = stage.stage_index
    if not isinstance(stage, PipelineStage) or not hasattr(stage, "_user_meta"):
        raise AttachError(
            f"stage {number} is a {type(stage).__name__} of torch {torch.__version__}: make it by "
            "PipelineStage(module, ...), with torch 2.13 or newer"
        )
    example = stage._user_meta
    missing = [name for name in ("input", "output") if getattr(example, f"{name}s") is None]
    if missing:
        raise AttachError(
            f"stage {number} has no {' and no '.join(f'{name}_args' for name in missing)}: torch would find shapes by "
            "a forward of its own, whose tokens would count as load; give PipelineStage(..., input_args=, "
            "output_args=) of one micro-batch"
        )
    if not has_backward:
        return
    ends = ([] if stage.is_first else [("input", example.inputs)]) + (
        [] if stage.is_last else [("output", example.outputs)]
    )
    for name, tensors in ends:
        if not any(tensor.requires_grad for tensor in tensors or ()):
            raise AttachError(
                f"{name}_args of stage {number} need no gradients, so none would reach the stage before: give hidden "
                "states with requires_grad=True"
            )


def _uninterrupted(schedule: Schedule, balancer: Balancer) -> Callable[..., Any]:
    """``schedule.step`` (``eval`` runs through it), in which nothing moves."""
    own = schedule.step

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        with balancer._uninterrupted(f"{type(schedule).__name__}.step"):
            return own(*args, **kwargs)

    return step


def _bring_copies_home(stage: PipelineStage, balancer: Balancer) -> None:
    """Let gradients of copies join those of their homes where the stage accumulates and scales them by itself."""
    replicas = balancer._maps.replicas
    if replicas is None:
        return
    job = balancer._job
    first = job.first_layer(stage.stage_index)
    layers = range(first, first + job.layers_of_stage[stage.stage_index])
    weights, reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad

    @wraps(weights)
    def backward_weight_one_chunk(*args: Any, **kwargs: Any) -> None:
        with replicas.handed_over():
            weights(*args, **kwargs)

    @wraps(reduce)
    def perform_reduce_grad(grad_scale_factor: int) -> None:
        replicas.reduce_gradients(layers)
        reduce(grad_scale_factor)

    stage.backward_weight_one_chunk = backward_weight_one_chunk  # type: ignore[method-assign]
    stage.perform_reduce_grad = perform_reduce_grad  # type: ignore[method-assign]
