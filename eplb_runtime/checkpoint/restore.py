"""Put a checkpoint into a model: the same checks and the same order for files of ours, of DCP, and state in memory."""

from __future__ import annotations

import json
import logging
import reprlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..placement import PlacementError
from .state import CheckpointError, Entry, Given, LogicalView
from .weights import Stored, TensorSpec

logger = logging.getLogger("eplb_runtime")


class Saved:
    """A checkpoint that is open for reading.

    Attributes:
        name: of messages.
        tensors: by the keys of `logical_state_dict`.
        optimizers: param groups, and state that is no tensor by parameter (``"numbers"``), of each pipeline stage.
        balancer: `Balancer.state_dict`, or None.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    optimizers: Sequence[Mapping[str, Any]]
    balancer: Mapping[str, Any] | None

    def fill(self, view: LogicalView, entries: Sequence[Entry]) -> None:
        """Write the saved values into live tensors, an expert at a time."""
        for entry in entries:
            for offsets, block in view.blocks_of(entry):
                self.read_block(entry.key, offsets, block)

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        """Fill a block of a tensor, which begins at ``offsets``; values are cast to its dtype."""
        raise NotImplementedError


class PretrainedFolders(Protocol):
    """A framework's own checkpoint folders (``save_pretrained``, ``from_pretrained``), for an attached model."""

    def write(self, view: LogicalView, folder: Path, **options: Any) -> None:
        """Write the whole model in logical order. Collective."""

    def opened(self, view: LogicalView, folder: Path) -> Saved:
        """Open a folder whose weights are to be read."""

    def names(self, view: LogicalView) -> Mapping[str, Stored]:
        """How the folders store tensors, by the model's names, where they store parts of them."""

    def describe(self, view: LogicalView, folder: Path) -> None:
        """Write the configuration that the framework reads a folder with."""


def folders_of(view: LogicalView) -> PretrainedFolders | None:
    """The folders of the attached host's framework; None: it has none, or the model is not attached."""
    stage = view.model.__dict__.get("_eplb_runtime_stage")
    return stage.host.folders if stage is not None else None


class Fitted:
    """A checkpoint that fits a model, and what `write` will write there. An entry that is missing, has no place in the
    model or another shape, or options that do not fit, are refused here. ``parts``: of what is no optimizer state."""

    def __init__(self, view: LogicalView, saved: Saved, *parts: str) -> None:
        self._view, self._saved = view, saved
        self._parts = parts or ("model", "extra")
        known = {entry.key: entry for entry in view.entries(*self._parts)}
        for key, entry in known.items():
            if key not in saved.tensors:
                raise CheckpointError(f"{saved.name} has no {key}: it was saved from another model")
            size, shape = tuple(view.whole_size(entry)), tuple(saved.tensors[key].shape)
            if shape != size:
                raise CheckpointError(f"{key} has shape {shape} in {saved.name}, {size} in the model")
        unknown = sorted(key for key in saved.tensors if key not in known and key.startswith("model."))
        if unknown and not view.in_stages:
            raise CheckpointError(f"{unknown[0]} in {saved.name} has no place in the model ({len(unknown)} such)")
        warn_of_left_out(view, [key.removeprefix("extra.") for key in saved.tensors if key.startswith("extra.")])
        self._states: dict[str, dict[str, Any]] = {}
        self._options: list[dict[str, Any]] = []
        if not view.optimizers:
            return
        if not saved.optimizers:
            raise CheckpointError(f"{saved.name} has no optimizer: load it with optimizer=None")
        self._states = {name: {} for name in view.parameters}
        for name, values in ((n, v) for optimizer in saved.optimizers for n, v in optimizer["numbers"].items()):
            if name in self._states:
                self._states[name].update(values)
            elif not view.in_stages:
                raise CheckpointError(f"{saved.name} has optimizer state of {name}, which is no parameter of the model")
        for key in sorted(key for key in saved.tensors if key.startswith("optimizer.")):
            name, state = _split(view, key.removeprefix("optimizer."))
            if name:
                self._states[name][state] = _state_tensor(view, name, state, saved.tensors[key])
            elif not view.in_stages:
                raise CheckpointError(f"{key} in {saved.name} belongs to no parameter of the model")
        self._options = options_of(view, [group for one in saved.optimizers for group in one["param_groups"]])

    def write(self) -> None:
        """Fill weights, optimizer state and options. Collective where reading is."""
        view = self._view
        states = [entry for name, state in self._states.items() for entry in view.state_entries(name, state)]
        self._saved.fill(view, [*view.entries(*self._parts), *states])
        for name, values in self._states.items():
            view.set_optimizer_state(name, values)
        set_options(view, self._options)


def _split(view: LogicalView, key: str) -> tuple[str, str]:
    """``<parameter>.<state>`` in two; state keys may have dots, so the longest parameter name counts."""
    name = key
    while name and name not in view.parameters:
        name = name.rpartition(".")[0]
    return name, key[len(name) + 1 :]


def _state_tensor(view: LogicalView, name: str, key: str, saved: TensorSpec) -> Tensor:
    """Where an entry of optimizer state is read to: the live tensor if it fits, else a new one."""
    parameter, size = view.parameters[name], torch.Size(saved.shape)
    if view.layer_of(name) is not None and len(size) == parameter.ndim and size[0] == view.num_experts:
        size = torch.Size([parameter.shape[0], *size[1:]])
    old = view.optimizer_state(name).get(key)
    if isinstance(old, Tensor) and (old.shape, old.dtype) == (size, saved.dtype):
        return old
    if isinstance(parameter, DTensor) and size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=saved.dtype)
    device = old.device if isinstance(old, Tensor) else parameter.device
    if key == "step" and not isinstance(old, Tensor):
        # torch.optim keeps it on the host, but for optimizers that run on the device.
        group = next((g for g in view.param_groups if any(p is parameter for p in g["params"])), {})
        device = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    return torch.empty(size, dtype=saved.dtype, device=device)


class _InMemory(Saved):
    """What `logical_state_dict` gave."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.name, self.balancer = "the state", None
        self.optimizers = [{"param_groups": [], "numbers": {}}]
        self._state = state
        self.tensors = {key: TensorSpec(tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        inside = tuple(slice(at, at + length) for at, length in zip(offsets, block.shape, strict=True))
        block.copy_(self._state[key][inside])


@torch.no_grad()
def load_logical_state_dict(model: nn.Module, optimizer: Given, state: Mapping[str, Tensor]) -> None:
    """Take what ``logical_state_dict`` gave: each rank its own experts' rows. Between steps; collective when attached.

    Optimizer state that does not exist yet is made, with the saved dtype; what exists for a parameter without an entry
    goes. Options of param groups are not in ``state`` and stay.

    Args:
        model: attached or not.
        optimizer: one, or the list of them; None: their entries are ignored.
        state: the same on every rank.

    Raises:
        CheckpointError: an entry is missing, has no place in the model, or another shape; nothing is changed then.
    """
    view = LogicalView(model, optimizer)
    view.refuse_freed("load_logical_state_dict", patient=True)
    Fitted(view, _InMemory(state)).write()
    view.weights_changed()


# -- what is no tensor -----------------------------------------------------------------------------------------------


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
    found = []
    for live in view.param_groups:
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
    """Return whether an option is of the kind that it was; None fits any but a list."""
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
    """Write what `options_of` gave."""
    for live, new in zip(view.param_groups, options, strict=True):
        for option, value in new.items():
            if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                live[option].copy_(value)
            else:
                live[option] = tuple(value) if isinstance(live.get(option), tuple) else value


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def same(some: Any, value: Any) -> bool:
        if isinstance(some, Tensor) or isinstance(value, Tensor):
            return isinstance(some, Tensor) and isinstance(value, Tensor) and torch.equal(some, value)
        return bool(some == value)

    return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)


def warn_of_left_out(view: LogicalView, saved: Sequence[str]) -> None:
    """Name tensors that were registered when a checkpoint was saved, and are not now."""
    left = sorted(set(saved) - {entry.name for entry in view.entries("extra")})
    if left and not view.in_stages and not (dist.is_initialized() and dist.get_rank()):
        named = f"{left[0]} and {len(left) - 1} more" if left[1:] else left[0]
        logger.warning("balancer.register %s ahead of the load: the checkpoint has it, and it is left out", named)


def restore_placement(view: LogicalView, saved: Mapping[str, Any] | None, warm_start: bool) -> None:
    """Migrate to the saved placement if it fits. Collective."""
    if view.balancer is None or saved is None or not warm_start:
        return
    if view.balancer.closed:
        logger.info("the saved placement is not used: the balancer is closed, experts stay where they are")
        return
    try:
        view.balancer.load_state_dict(saved)
    except PlacementError as error:
        logger.info("the saved placement is not used: %s", error)
    except RuntimeError as error:
        logger.warning("%s; training starts from the current placement", error)
