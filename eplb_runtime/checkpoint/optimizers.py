"""Optimizers in a checkpoint, but for their tensors: options of param groups, and state that is a number."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .state import CheckpointError, LogicalView

_KINDS = (list, tuple), (bool, int, float, Tensor), str


def numbers_of(view: LogicalView, encode: Callable[[Any, str], Any] = lambda value, _: value) -> dict[str, Any] | None:
    """Param groups and state that is no tensor, each value encoded, as in `Saved.optimizers`; None: no optimizer."""
    if not view.optimizers:
        return None
    groups = [
        {**{k: encode(v, k) for k, v in group.items() if k != "params"}, "params": view.names_of(group)}
        for group in view.param_groups
    ]
    numbers = {}
    for name in view.parameters:
        state = view.optimizer_state(name).items()
        if found := {str(key): encode(v, str(key)) for key, v in state if not isinstance(v, Tensor)}:
            numbers[name] = found
    return {"param_groups": groups, "numbers": numbers}


def to_json(value: Any, name: str) -> Any:
    """An option as `json.dumps` takes it; `from_json` is the way back."""
    if isinstance(value, Tensor):
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    plain = list(value) if isinstance(value, tuple) else value
    try:
        retained = not isinstance(value, dict) and json.loads(json.dumps(plain)) == plain
    except (TypeError, ValueError):
        retained = False
    if not retained:
        kind = type(value).__name__
        raise CheckpointError(f"the optimizer's {name} is a {kind}, which JSON does not keep: save with format='dcp'")
    return value


def from_json(value: dict[str, Any]) -> Any:
    """Of `json.loads`: the tensor that a dictionary describes, or the dictionary."""
    if value.keys() != {"tensor", "dtype"}:
        return value
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]))


def options_of(view: LogicalView, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Learning rates and the like for each live param group, by parameter name: groups may be cut otherwise than when
    they were saved, so long as a group has one set of options."""
    group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
    found: list[dict[str, Any]] = []
    for live in view.param_groups:
        names = view.names_of(live)
        numbers = sorted({group_of[name] for name in names if name in group_of})
        options = [{k: v for k, v in saved[number].items() if k != "params"} for number in numbers] or [{}]
        if any(_plain(other) != _plain(options[0]) for other in options):
            raise CheckpointError(
                f"the param group of {names[0]} was several with different options when saved: build the optimizer "
                "with the same groups"
            )
        for name, value in options[0].items():
            if name in live and not _fits(value, live[name]):
                raise CheckpointError(
                    f"the optimizer's {name} was saved as {reprlib.repr(value)}, and is {reprlib.repr(live[name])} now"
                )
        found.append(options[0])
    return found


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in options.items()}


def _fits(saved: Any, live: Any) -> bool:
    """Return whether an option is of the kind that it was; None fits any but a list."""
    kinds, now = ([isinstance(value, kind) for kind in _KINDS] for value in (saved, live))
    if kinds[0] and now[0]:
        return len(saved) == len(live) and all(map(_fits, saved, live))
    if isinstance(saved, Tensor) and isinstance(live, Tensor):
        return saved.shape == live.shape
    return kinds == now or ((saved is None or live is None) and not (kinds[0] or now[0]))


def set_options(view: LogicalView, options: Sequence[Mapping[str, Any]]) -> None:
    """Write what `options_of` gave."""
    for live, new in zip(view.param_groups, options, strict=True):
        for option, value in new.items():
            if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                live[option].copy_(value)
            else:
                live[option] = tuple(value) if isinstance(live.get(option), tuple) else value
