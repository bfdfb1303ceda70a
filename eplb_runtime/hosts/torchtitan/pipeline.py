"""torchtitan's pipelines: the schedule that a rank's model parts belong to, and what torch runs through them to learn
shapes.

torchtitan makes stages without examples of what they get. So torch runs a forward and a backward of its own through
them, on unwritten memory, ahead of the first step and whenever training and validation take turns. That
is no batch: it counts nowhere, and no token travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torchtitan.models.common.moe import MoE

from ...balancer.balancer import Balancer
from .. import pipelining
from ..attaching.description import AttachError
from .experts import BalancedRoutedExperts

_SCHEDULE = "_eplb_runtime_schedule"
_SHAPE_METHODS = ("_forward_metadata_inference", "_backward_metadata_inference")
"""What torch's stages learn shapes by."""

Built = tuple[pipelining.Schedule, list[nn.Module], bool, bool]


def build_pipeline(own: Callable[..., Built], model: nn.Module, **options: Any) -> Built:
    """As the model's own ``pipelining_fn``; its parts remember the schedule, which the Trainer keeps to itself."""
    built = own(model, **options)
    for part in built[1]:
        part.__dict__[_SCHEDULE] = built[0]
    return built


def numbers_of(model_parts: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the pipeline stage of each part of a model."""
    number_of = {
        id(stage.submod): stage.stage_index
        for schedule in [_schedule_of(model_parts)]
        for stage in pipelining.stages_of(schedule)
        if all(hasattr(stage, method) for method in _SHAPE_METHODS)
    }
    if not all(id(part) in number_of for part in model_parts):
        raise AttachError(
            f"the stages of torch {torch.__version__} learn shapes in a way that eplb_runtime does not know, and would "
            "count tokens that are none: use torch 2.13 or 2.14"
        )
    return tuple(number_of[id(part)] for part in model_parts)


def accompany(model_parts: Sequence[nn.Module], balancer: Balancer) -> None:
    """What the schedule of these parts asks of the balancer that they are attached to."""
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
    @wraps(own)
    def without_tokens(*args: Any, **options: Any) -> Any:
        with _only_shapes(model):
            return own(*args, **options)

    return without_tokens


@contextmanager
def _only_shapes(model: nn.Module) -> Iterator[None]:
    """Inside, routed experts give back what they get, and torchtitan's counters of tokens end as they were."""
    experts = [module for module in model.modules() if isinstance(module, BalancedRoutedExperts)]
    counters = [module.tokens_per_expert_E for module in model.modules() if isinstance(module, MoE)]
    before = [counter.clone() for counter in counters]
    for routed in experts:
        routed.only_shapes = True
    try:
        yield
    finally:
        for routed in experts:
            routed.only_shapes = False
        for counter, was in zip(counters, before, strict=True):
            counter.copy_(was)
