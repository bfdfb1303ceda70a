"""Schedules of ``torch.distributed.pipelining``: this rank's stages, attached together.

A schedule runs the forwards and backwards of several micro-batches between two optimizer steps. What that asks of a
balancer is here: what of a stage would be counted or trained wrongly, no commit inside a step, and gradients of
replicas where a schedule splits its backward or scales what a stage has gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleDualPipeV
from torch.distributed.pipelining.schedules import (
    OVERLAP_F_B,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    _Action,
    _PipelineContext,
)

from ..balancer.balancer import Balancer
from ..config import BalancerConfig
from ..distributed.ranks import Ranks
from ..moe.dispatch.channels import MicroBatchChannels
from . import MoE
from . import attach as attach_models
from .attaching.description import AttachError

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
    """Attach this rank's pipeline stages to a balancer that plans all stages together, and return it. Collective.

    As `eplb_runtime.attach` of the stages' modules. Replace ``schedule.step``: no expert may move while it runs. With
    replicas, replace methods of the stages, too: gradients of replicas are right where the schedule splits backwards
    (``W`` after ``I``) or divides gradients by the number of micro-batches (``scale_grads``). Inside
    ``balancer.no_sync()``, they are added to those of homes once for each stage instead of once a micro-batch.

    Args:
        schedule: made of `PipelineStage`\\ s with ``input_args`` and ``output_args``.
        optimizers: one, or several that step once each after ``schedule.step``; None: only ``schedule.eval``.
        layers: for modules of your own, the MoE layers of each stage, in the order of the stages' numbers.
        config, ep_group: as for `eplb_runtime.attach`; None: all ranks that hold these stages.
        ranks: in the place of ``ep_group``: what `ranks_of` gives, changed for a job that is not the world, or for
            another divisor of gradients.

    Raises:
        AttachError: as there; or a stage's shapes are not static, or no gradients would reach the stage before.
    """
    chosen, both = (ranks_of(schedule, ep_group), None) if ranks is None else (ranks, ep_group)
    models = (_checked(stage, schedule._has_backward) for stage in stages_of(schedule))
    balancer = attach_models(models, optimizers, layers=layers, config=config, ep_group=both, ranks=chosen)
    accompany(schedule, balancer)
    return balancer


def accompany(schedule: Schedule, balancer: Balancer) -> None:
    """Replace ``schedule.step``: inside it the balancer refuses to move experts. With replicas, also replace methods of
    the stages, so that gradients of replicas are added to the homes' before a stage scales them."""
    own = schedule.step

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        with balancer.loop.uninterrupted(f"{type(schedule).__name__}.step"):  # ``eval`` runs through it, too
            return own(*args, **kwargs)

    schedule.step = step  # type: ignore[method-assign]
    for stage in stages_of(schedule):
        _bring_copies_home(stage, balancer)


def overlap(schedule: ScheduleDualPipeV, balancer: Balancer) -> OverlappedForwardBackward:
    """Let DualPipeV run a forward and a backward at once where its table pairs them (``OVERLAP_F_B``), so that one
    computes while the other's tokens travel. Outputs and gradients are those of one after the other, to the bit.

    Return what runs the pairs; it is registered with the schedule, whose ``step`` and other methods are replaced. By
    default, torch runs a pair one after the other. Collective, after `attach`; for models on a CPU so far.

    Args:
        schedule: that was attached; any that has ``OVERLAP_F_B`` actions and `register_custom_function`.

    Raises:
        AttachError: a stage is wrapped by ``fully_shard``, whose gathering of weights is of one thread.
        RuntimeError: two batches at once are not possible, as in `Balancer.at_once`.
    """
    wrapped = [stage.stage_index for stage in stages_of(schedule) if isinstance(stage.submod, FSDPModule)]
    if wrapped:
        raise AttachError(
            f"stages {wrapped} are wrapped by fully_shard, which gathers weights for one thread: leave it out, or do "
            "not overlap"
        )
    together = OverlappedForwardBackward(schedule, balancer.open_second_channel())
    together.take_forwards()
    schedule.register_custom_function(OVERLAP_F_B, together)
    own = schedule.step

    @wraps(own)
    def step(*args: Any, **kwargs: Any) -> Any:
        together.save_output, together.loss_kwargs = kwargs.get("return_outputs", True), kwargs.get("loss_kwargs")
        return own(*args, **kwargs)

    schedule.step = step  # type: ignore[method-assign]
    return together


class OverlappedForwardBackward:
    """Runs a pair of a schedule's actions as the schedule would: the forward here, the backward on a thread of its own.
    Random numbers that a backward draws again (activation checkpointing of dropout) would be the forward's."""

    def __init__(self, schedule: Any, channels: MicroBatchChannels) -> None:
        self._schedule = schedule
        self._here = {stage.stage_index: stage for stage in stages_of(schedule)}
        self._channels = channels
        self.save_output = True
        self.loss_kwargs: dict[str, Any] | None = None
        self._turned: dict[tuple[int, int | None], bool] = {}
        self._accumulators: list[Any] = []

    def __call__(self, action: _Action, ctx: _PipelineContext) -> None:
        forward, backward = action.sub_actions or ()
        # A backward pass runs on the stream of its forward, so the forward at the same time takes the other one.
        turned = not self._turned.get((backward.stage_index, backward.microbatch_index), False)
        self._turned[forward.stage_index, forward.microbatch_index] = turned
        self._channels.both(lambda: self.forward(forward, ctx), lambda: self.backward(backward), turned)

    def take_forwards(self) -> None:
        """Let forwards outside of pairs, and losses, run on one of the two streams, too: their backward may be in a
        pair. Replace methods of the schedule and its stages for that. Do nothing on a CPU."""
        if not self._channels.streams.on_device:
            return
        # In a backward pass those of replicas are added to gradients that this stream has just written, see below.
        self._channels.add_gradients_here()
        schedule = self._schedule
        compute_loss = schedule._maybe_compute_loss
        schedule._maybe_compute_loss = self._on_a_stream(compute_loss, lambda *a: (a[0].stage_index, a[3]))
        # Gradients are added up on the caller's stream, and no batch waits there for another's: a parameter's
        # accumulator keeps the stream that it was made on.
        parameters = [parameter for stage in self._here.values() for parameter in stage.submod.parameters()]
        self._accumulators = [get_gradient_edge(one).node for one in parameters if one.requires_grad]
        for number, stage in self._here.items():
            stage.forward_one_chunk = self._on_a_stream(  # type: ignore[method-assign]
                stage.forward_one_chunk, lambda micro_batch, *_, number=number: (number, micro_batch)
            )

    def _on_a_stream(self, own: Callable[..., Any], which: Callable[..., tuple[int, int]]) -> Callable[..., Any]:
        """Return what runs alone on the first of the streams, or on that of the forward that it belongs to."""

        @wraps(own)
        def on_a_stream(*args: Any, **kwargs: Any) -> Any:
            if self._channels.busy:
                return own(*args, **kwargs)
            return self._channels.alone(lambda: own(*args, **kwargs), self._turned.setdefault(which(*args), False))

        return on_a_stream

    def forward(self, action: _Action, context: _PipelineContext) -> None:
        schedule, number, micro_batch = self._schedule, action.stage_index, action.microbatch_index
        assert micro_batch is not None and context.arg_mbs is not None and context.kwarg_mbs is not None
        stage, inputs = self._here[number], (context.arg_mbs[micro_batch], context.kwarg_mbs[micro_batch])
        for work in schedule.fwd_recv_ops.pop((number, micro_batch), ()):  # none of a stage that is here
            work.wait()
        out = stage.forward_one_chunk(micro_batch, *inputs, save_forward_output=self.save_output)
        schedule._maybe_compute_loss(stage, out, context.target_mbs, micro_batch, self.loss_kwargs)
        if number + 1 in self._here:
            self._here[number + 1].set_local_fwd_input(out, micro_batch)

    def backward(self, action: _Action) -> None:
        schedule, number, micro_batch = self._schedule, action.stage_index, action.microbatch_index
        assert micro_batch is not None
        stage = self._here[number]
        for work in schedule.bwd_recv_ops.pop((number, micro_batch), ()):
            work.wait()
        schedule.backward_counter[number] += 1
        last = schedule.backward_counter[number] == schedule._n_microbatches
        loss = schedule._maybe_get_loss(stage, micro_batch)
        stage.backward_one_chunk(micro_batch, loss=loss, full_backward=True, last_backward=last)
        if number - 1 in self._here:
            self._here[number - 1].set_local_bwd_input(stage.get_local_bwd_output(micro_batch), micro_batch)


def ranks_of(schedule: Schedule, ep_group: dist.ProcessGroup | None = None) -> Ranks:
    """Return `Ranks` with the schedule's stages on this rank and ``ep_group``'s ranks (None: `attach` finds them)."""
    ep = None if ep_group is None else tuple(dist.get_process_group_ranks(ep_group))
    return Ranks(ep=ep, stages=tuple(stage.stage_index for stage in stages_of(schedule)))


def stages_of(schedule: Schedule) -> list[PipelineStage]:
    """Return the schedule's stages on this rank, in ascending order of their numbers."""
    stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    return sorted(stages, key=lambda stage: stage.stage_index)  # type: ignore[return-value, arg-type]


def _checked(stage: PipelineStage, has_backward: bool) -> nn.Module:
    """Return the module of a stage; AttachError: it would be counted or trained wrongly without a word."""
    number = stage.stage_index
    if not isinstance(stage, PipelineStage) or not hasattr(stage, "_user_meta"):
        raise AttachError(
            f"stage {number} is a {type(stage).__name__} of torch {torch.__version__}: make it by "
            "PipelineStage(module, ...), with torch 2.13 or newer"
        )
    example = stage._user_meta
    if missing := [name for name in ("input", "output") if getattr(example, f"{name}s") is None]:
        raise AttachError(
            f"stage {number} has no {' and no '.join(f'{name}_args' for name in missing)}: torch would find shapes by "
            "a forward of its own, whose tokens would count as load; give PipelineStage(..., input_args=, "
            "output_args=) of one micro-batch"
        )
    for name, is_end, tensors in (
        ("input", stage.is_first, example.inputs),
        ("output", stage.is_last, example.outputs),
    ):
        if has_backward and not is_end and not any(tensor.requires_grad for tensor in tensors or ()):
            raise AttachError(
                f"{name}_args of stage {number} need no gradients, so none would reach the stage before: give hidden "
                "states with requires_grad=True"
            )
    return stage.submod


def _bring_copies_home(stage: PipelineStage, balancer: Balancer) -> None:
    replicas = balancer.runtime.maps.replicas
    if replicas is None:
        return
    job = balancer.runtime.job
    first = job.first_layer(stage.stage_index)
    layers = range(first, first + job.layers_of_stage[stage.stage_index])
    weights, reduce = stage.backward_weight_one_chunk, stage.perform_reduce_grad

    @wraps(weights)
    def backward_weight_one_chunk(*args: Any, **kwargs: Any) -> None:
        with replicas.manual_accumulation():
            weights(*args, **kwargs)

    @wraps(reduce)
    def perform_reduce_grad(grad_scale_factor: int) -> None:
        replicas.reduce_gradients(layers)
        reduce(grad_scale_factor)

    stage.backward_weight_one_chunk = backward_weight_one_chunk  # type: ignore[method-assign]
    stage.perform_reduce_grad = perform_reduce_grad  # type: ignore[method-assign]
