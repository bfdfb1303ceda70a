"""Save to and load from our own folders, jointly on all ranks (`disk` has the format)."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ..utils.errors import one_line
from . import disk, old_folder
from .disk import Named, SavedTensors
from .joint_access import JointAccess
from .pretrained import folders_of
from .restoring import options_of, restore_placement, set_options
from .state import CheckpointError, Entry, LogicalView, new_state_tensor, set_optimizer_state, split_key

_TOKEN_BYTES = 8


# -- saving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """What this rank writes.

    Args:
        tensors: its share of them.
        numbers: of its pipeline stage, as JSON: names of tensors, and the optimizer's options and numbers.
        balancer: state of the balancer.
    """

    tensors: Iterable[Named]
    numbers: str
    balancer: dict[str, Any] | None


def save(folder: Path, view: LogicalView, process_group: dist.ProcessGroup | None = None) -> None:
    """`saving.save` in our own format."""
    wait_for_saving(view)
    view.refuse_freed("save")
    access = JointAccess.of(view, process_group)
    found: list[_Content] = []
    access.trying(lambda: found.append(_content(view, access)))
    _write(folder, view, access, found)


def async_save(folder: Path, view: LogicalView) -> Future[None]:
    """`saving.async_save` in our own format: what this rank writes is copied to the CPU when this returns."""
    view.refuse_freed("async_save")
    if view.balancer is None:
        wait_for_saving(view)  # its thread talks over the same group
    access = JointAccess.of(view)
    live: list[_Content] = []
    access.trying(lambda: live.append(_content(view, access)))
    access.agree(f"{folder} was not saved")
    found = [replace(live[0], tensors=_on_host(live[0].tensors))]
    if view.balancer is not None:
        access = JointAccess(view.balancer._background_group(), torch.device("cpu"))
    before = _saving(view)

    def write() -> None:
        _ended(before)
        _write(folder, view, access, found)

    worker = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime save")
    saving = worker.submit(write)
    worker.shutdown(wait=False)
    object.__setattr__(view.model, "_eplb_runtime_saving", saving)
    return saving


def _on_host(tensors: Iterable[Named]) -> list[Named]:
    return [(part, name, value.to("cpu", copy=True)) for part, name, value in tensors]


def wait_for_saving(view: LogicalView) -> None:
    """Wait until an `async_save` of this model has ended, well or not: a folder has one writer and no reader then."""
    _ended(_saving(view))


def _ended(saving: Future[None] | None) -> None:
    if saving is not None:
        with suppress(Exception):  # its own caller hears of it
            saving.result()


def _saving(view: LogicalView) -> Future[None] | None:
    return view.model.__dict__.get("_eplb_runtime_saving")


def _content(view: LogicalView, access: JointAccess) -> _Content:
    balancer = view.balancer.state_dict() if view.balancer is not None else None  # first: all ranks meet in it
    ranks = view.balancer._runtime.job.data_ranks if view.balancer is not None else access.ranks
    layout, tied = disk.layout_of(view)
    renamed = {key: asdict(stored) for key, stored in layout.items() if stored.names != (key.partition(".")[2],)}
    numbers = json.dumps({"layout": renamed, "tied": tied, "optimizer": _optimizer_of(view)})
    is_first = access.ranks[access.number] == ranks[0]  # of its stage
    return _Content(disk.tensors_of_rank(view, layout, ranks), numbers if is_first else "", balancer)


@torch.no_grad()
def _write(folder: Path, view: LogicalView, access: JointAccess, found: list[_Content]) -> None:
    """Write a checkpoint.

    Args:
        found: what this rank writes; empty: it could not be had, and all ranks hear of it.
    """
    problem = f"{folder} was not saved"
    access.agree(problem)
    (content,) = found
    token = access.gather_bytes(secrets.token_bytes(_TOKEN_BYTES))[0].hex()
    files: dict[str, tuple[int, str]] = {}
    access.trying(lambda: files.update(disk.write_tensors(folder, access.number, token, content.tensors)))
    try:
        access.agree(problem)
        of_ranks = [json.loads(text) for text in access.gather_bytes(json.dumps(files).encode())]
        stages = [json.loads(text) for text in access.gather_bytes(content.numbers.encode()) if text]
    except BaseException:
        disk.remove_files(folder, lambda name, other: name in files)
        raise
    folders = folders_of(view)
    access.trying(
        lambda: disk.publish(
            folder,
            token,
            {name: tuple(known) for one in of_ranks for name, known in one.items()},
            {
                "layout": {key: stored for stage in stages for key, stored in stage["layout"].items()},
                "tied": {key: other for stage in stages for key, other in stage["tied"].items()},
                "optimizers": [stage["optimizer"] for stage in stages if stage["optimizer"] is not None],
                "balancer": content.balancer,
            },
            lambda: None if folders is None else folders.describe(view, folder),
        ),
        first_only=True,
    )
    access.agree(problem)


# -- loading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(folder: Path, view: LogicalView, *, warm_start: bool, process_group: dist.ProcessGroup | None) -> None:
    """`saving.load` of our own format."""
    access = JointAccess.of(view, process_group)
    problem = f"{folder} was not loaded, nothing is changed"
    markers: list[dict[str, Any]] = []
    opened: list[SavedTensors] = []
    options: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}

    def verify() -> None:
        markers.append(disk.read_marker(folder))
        verify = old_folder.verify if markers[0]["version"] == old_folder.VERSION else disk.verify
        verify(folder, markers[0], access.number, access.size)

    def check() -> None:
        open_folder = old_folder.OldFolder if markers[0]["version"] == old_folder.VERSION else disk.Folder
        try:
            opened.append(open_folder(folder, markers[0]))
            numbers = _checked(folder, view, opened[0])
            options.extend(_options(view, opened[0]))
            states.update(_new_states(view, opened[0], numbers))
        except CheckpointError:
            raise
        except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{folder} cannot be used: {one_line(error, with_type=True)}") from error

    for action in (verify, check):
        access.trying(action)
        access.agree(problem)
    (saved,) = opened
    restore_placement(view, saved.balancer, warm_start)

    def fill() -> None:
        for entry in [*view.entries("model", "extra"), *_state_entries(view, states)]:
            for offsets, block in disk.blocks_here(view, entry):
                saved.fill(entry.key, offsets, block)
        for name, values in states.items():
            set_optimizer_state(view, name, values)
        set_options(view, options)

    access.trying(fill)
    access.agree(f"{folder} was not loaded, the model is a mixture now")
    view.weights_changed()


def _checked(folder: Path, view: LogicalView, saved: SavedTensors) -> dict[str, dict[str, Any]]:
    """Compare names and shapes; returns the optimizer state that is no tensor."""
    wanted = {entry.key: entry for entry in view.entries("model", "extra")}
    for key, entry in wanted.items():
        if key not in saved.tensors:
            raise CheckpointError(f"{folder} has no {key}: it was saved from another model")
        size, shape = tuple(view.whole_size(entry)), tuple(saved.tensors[key].shape)
        if shape != size:
            raise CheckpointError(f"{key} has shape {shape} in {folder}, {size} in the model")
    unknown = sorted({key for key in saved.tensors if key.startswith("model.")} - set(wanted))
    if unknown and not _in_stages(view):
        raise CheckpointError(f"{unknown[0]} in {folder} has no place in the model ({len(unknown)} such entries)")
    if view.optimizer is None:
        return {}
    if not saved.optimizers:
        raise CheckpointError(f"{folder} has no optimizer: load it with optimizer=None")
    numbers = {name: values for optimizer in saved.optimizers for name, values in optimizer["numbers"].items()}
    for name in numbers:
        if name not in view.parameters and not _in_stages(view):
            raise CheckpointError(f"{folder} has optimizer state of {name}, which is no parameter of the model")
    return numbers


def _options(view: LogicalView, saved: SavedTensors) -> list[dict[str, Any]]:
    """Options of each live param group."""
    groups = [group for optimizer in saved.optimizers for group in optimizer["param_groups"]]
    decoded = [{option: _from_json(value) for option, value in group.items()} for group in groups]
    return options_of(view, dict(enumerate(decoded)))


def _in_stages(view: LogicalView) -> bool:
    """Return whether the model here is a stage, and the checkpoint has others."""
    return view.balancer is not None and len(view.balancer._runtime.job.layers_of_stage) > 1


def _new_states(
    view: LogicalView, saved: SavedTensors, numbers: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Optimizer state to fill: the live tensors where they fit, else new ones."""
    if view.optimizer is None:
        return {}
    states: dict[str, dict[str, Any]] = {name: {} for name in view.parameters}
    for name, values in numbers.items():
        if name in states:
            states[name].update({key: _from_json(value) for key, value in values.items()})
    for key in sorted(key for key in saved.tensors if key.startswith("optimizer.")):
        try:
            name, state = split_key(view, key.removeprefix("optimizer."))
        except CheckpointError:
            if _in_stages(view):
                continue
            raise
        spec = saved.tensors[key]
        states[name][state] = new_state_tensor(view, name, state, torch.Size(spec.shape), spec.dtype, reuse=True)
    return states


def _state_entries(view: LogicalView, states: Mapping[str, Mapping[str, Any]]) -> list[Entry]:
    return [
        Entry("optimizer", name, key, value, view.layer_of_state(name, key, value))
        for name, values in states.items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    ]


# -- what is no tensor -----------------------------------------------------------------------------------------------


def _optimizer_of(view: LogicalView) -> dict[str, Any] | None:
    if view.optimizer is None:
        return None
    numbers = {}
    for name in view.parameters:
        found = {str(k): _to_json(v, k) for k, v in view.optimizer_state(name).items() if not isinstance(v, Tensor)}
        if found:
            numbers[name] = found
    groups = [
        {**{k: _to_json(v, k) for k, v in group.items() if k != "params"}, "params": view.names_of(group)}
        for group in view.optimizer.param_groups
    ]
    return {"param_groups": groups, "numbers": numbers}


def _to_json(value: Any, name: Any) -> Any:
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


def _from_json(value: Any) -> Any:
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])) if isinstance(value, dict) else value
