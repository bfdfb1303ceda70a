"""What a checkpoint holds beside tensors: options of param groups, and the placement."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..placement import PlacementError
from .state import CheckpointError, LogicalView

logger = logging.getLogger("eplb_runtime")


def options_of(view: LogicalView, saved: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Learning rates and the like for each live param group, by parameter name: groups may be cut otherwise than when
    they were saved, so long as a group has one set of options."""
    if view.optimizer is None:
        return []
    group_of = {name: number for number, group in saved.items() for name in group["params"]}
    found = []
    for live in view.optimizer.param_groups:
        numbers = sorted({group_of[name] for name in view.names_of(live) if name in group_of})
        options = [{k: v for k, v in saved[number].items() if k != "params"} for number in numbers]
        if any(not _equal(other, options[0]) for other in options[1:]):
            raise CheckpointError(
                f"the param group of {view.names_of(live)[0]} was several with different options when saved: build the "
                "optimizer with the same groups"
            )
        found.append(options[0] if options else {})
        for name, value in found[-1].items():
            if name in live and not _fits(value, live[name]):
                raise CheckpointError(
                    f"the optimizer's {name} was saved as {reprlib.repr(value)}, and is {reprlib.repr(live[name])} now"
                )
    return found


def _fits(saved: Any, live: Any) -> bool:
    """Whether an option is of the kind that it was; None may stand for any but a list."""
    if isinstance(saved, list | tuple) or isinstance(live, list | tuple):
        both = isinstance(saved, list | tuple) and isinstance(live, list | tuple)
        return both and len(saved) == len(live) and all(map(_fits, saved, live))
    if saved is None or live is None:
        return True
    if isinstance(saved, Tensor) and isinstance(live, Tensor):
        return saved.shape == live.shape
    numbers = (bool, int, float, Tensor)
    return isinstance(saved, numbers) == isinstance(live, numbers) and isinstance(saved, str) == isinstance(live, str)


def set_options(view: LogicalView, options: list[dict[str, Any]]) -> None:
    groups = view.optimizer.param_groups if view.optimizer is not None else []
    for live, new in zip(groups, options, strict=True):
        for option, value in new.items():
            if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                live[option].copy_(value)
            else:
                live[option] = tuple(value) if isinstance(live.get(option), tuple) else value


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)


def restore_placement(view: LogicalView, saved: Mapping[str, Any] | None, warm_start: bool) -> None:
    if view.balancer is None or saved is None or not warm_start:
        return
    if view.balancer._closed:
        logger.info("the saved placement is not used: the balancer is closed, experts stay where they are")
        return
    try:
        view.balancer.load_state_dict(saved)
    except PlacementError as error:
        logger.info("the saved placement is not used: %s", error)
    except RuntimeError as error:
        logger.warning("%s; training starts from the placement that stands", error)
