"""Our own checkpoint folder: a safetensors file from each rank, and an index that is written last.

A save writes files with names of their own beside what is there, and then puts its index in the place of the old one,
in one step: whoever dies on the way leaves the old checkpoint whole. A load checks everything, names, shapes and every
byte, before it writes to the model.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.files import PARTIALS, write_file
from .joint_access import JointAccess
from .manifest import INDEX, Manifest, index_checksum, names_of
from .restoring import options_of, restore_placement, set_options
from .schema import FORMAT, VERSION
from .shards import Shard, local_shards, shards_to_write
from .state import (
    CheckpointError,
    Entry,
    LogicalView,
    new_state_tensor,
    set_optimizer_state,
    split_key,
)
from .tensor_file import DTYPE_NAMES, DTYPES, TensorFile, TensorSpec

_OURS = re.compile(r"tensors-\d{5}-of-\d{5}-([0-9a-f]{16})\.safetensors")
_TOKEN_BYTES = 8


# -- saving ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Content:
    """What this rank writes: its shards, the optimizer's state that is no tensor (JSON), and the balancer's state."""

    shards: Sequence[Shard]
    optimizer: str
    balancer: dict[str, Any] | None


def save(folder: Path, view: LogicalView, process_group: dist.ProcessGroup | None = None) -> None:
    """`saving.save` in our own format."""
    wait_for_saving(view)
    view.refuse_freed("save")
    access = JointAccess.of(view, process_group)
    found: list[_Content] = []
    access.trying(lambda: found.append(_content(view, access)))
    _write(folder, access, found)


def async_save(folder: Path, view: LogicalView) -> Future[None]:
    """`saving.async_save` in our own format: what this rank writes is copied to the CPU when this returns."""
    view.refuse_freed("async_save")
    access = JointAccess.of(view)
    if view.balancer is not None:
        access = JointAccess(view.balancer._background_group(), torch.device("cpu"))
    found: list[_Content] = []

    def copy() -> None:
        live = _content(view, access)
        copies = [replace(shard, tensor=shard.tensor.to("cpu", copy=True)) for shard in live.shards]
        found.append(replace(live, shards=copies))

    access.trying(copy)
    before = _saving(view)

    def write() -> None:
        _ended(before)
        _write(folder, access, found)

    worker = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime save")
    saving = worker.submit(write)
    worker.shutdown(wait=False)
    object.__setattr__(view.model, "_eplb_runtime_saving", saving)
    return saving


def wait_for_saving(view: LogicalView) -> None:
    """Until an `async_save` of this model has ended, well or not: a folder has one writer, and no reader meanwhile."""
    _ended(_saving(view))


def _ended(saving: Future[None] | None) -> None:
    if saving is not None:
        with suppress(Exception):  # its own caller hears of it
            saving.result()


def _saving(view: LogicalView) -> Future[None] | None:
    return view.model.__dict__.get("_eplb_runtime_saving")


def _content(view: LogicalView, access: JointAccess) -> _Content:
    ranks = view.balancer._runtime.job.data_ranks if view.balancer is not None else access.ranks
    shards = shards_to_write(view, list(view.entries()), ranks)
    balancer = view.balancer.state_dict() if view.balancer is not None else None
    return _Content(shards, json.dumps(_optimizer_of(view)), balancer)


@torch.no_grad()
def _write(folder: Path, access: JointAccess, found: Sequence[_Content]) -> None:
    """``found``: what this rank writes; empty: it could not be had, and all ranks hear of it."""
    access.agree(f"{folder} was not saved")
    (content,) = found
    shards = content.shards
    token = bytes(access.gather(_bytes(secrets.token_bytes(_TOKEN_BYTES)))[0].tolist()).hex()
    names = [f"tensors-{i:05d}-of-{access.size:05d}-{token}.safetensors" for i in range(access.size)]
    sizes = {shard.key: shard.size for shard in shards}
    metadata = {"format": FORMAT, "sizes": json.dumps(sizes), "optimizer": content.optimizer}
    specs = {shard.name: TensorSpec(tuple(shard.tensor.shape), shard.tensor.dtype) for shard in shards}
    path = folder / names[access.number]
    files: list[TensorFile] = []
    sums = bytes(16)

    def write() -> None:
        nonlocal sums
        folder.mkdir(parents=True, exist_ok=True)
        files.append(TensorFile(path, specs, metadata, checksums=True))
        for shard in shards:
            files[0].write(shard.name, shard.tensor)
        sums = files[0].finish()

    try:
        access.trying(write)
        access.agree(f"{folder} was not saved")
        access.trying(lambda: files[0].publish())
        size = path.stat().st_size if path.exists() else 0
        headers = access.gather(_bytes(sums + size.to_bytes(8, "little")))
        access.agree(f"{folder} was not saved")
        index = {
            "format": FORMAT,
            "version": VERSION,
            "save": token,
            "balancer": content.balancer,
            "files": [
                {
                    "name": name,
                    "bytes": int.from_bytes(bytes(row[16:].tolist()), "little"),
                    "checksum": bytes(row[:16].tolist()).hex(),
                }
                for name, row in zip(names, headers, strict=True)
            ],
        }
        access.trying(lambda: _switch(folder, index), first_only=True)
        access.agree(f"{folder} was not saved")
    finally:
        # What has its name stays: the index may stand for it already, though a rank did not live to say so.
        for file in files:
            file.discard()


def _switch(folder: Path, index: Mapping[str, Any]) -> None:
    """Check the new files, replace the index, then remove the files of the old checkpoint."""
    try:
        Manifest.of(folder, index)
        write_file(folder / INDEX, json.dumps({**index, "checksum": index_checksum(index)}))
    except Exception:
        _clear(folder, lambda token: token == index["save"])
        raise
    _clear(folder, lambda token: token != index["save"])
    for left_by_a_crash in folder.glob(PARTIALS):
        with suppress(OSError):
            left_by_a_crash.unlink()


def _clear(folder: Path, unwanted: Callable[[str], bool]) -> None:
    """Remove files of other saves; what cannot be removed is in nobody's way."""
    for file in folder.iterdir():
        match = _OURS.fullmatch(file.name)
        if match is not None and unwanted(match[1]):
            with suppress(OSError):
                file.unlink()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


# -- loading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(folder: Path, view: LogicalView, *, warm_start: bool, process_group: dist.ProcessGroup | None) -> None:
    """`saving.load` of our own format."""
    access = JointAccess.of(view, process_group)
    problem = f"{folder} was not loaded, nothing is changed"
    found: list[Any] = []
    access.trying(lambda: found.extend(_checked(folder, view)))
    access.agree(problem)
    manifest, options, numbers = found
    access.trying(lambda: manifest.verify(access.number, access.size))
    access.agree(problem)
    states: dict[str, dict[str, Any]] = {}
    access.trying(lambda: states.update(_new_states(view, manifest, numbers)))
    access.agree(problem)
    restore_placement(view, manifest.index["balancer"], warm_start)

    def fill() -> None:
        entries = [*view.entries("model", "extra"), *_state_entries(view, states)]
        for shard in (shard for entry in entries for shard in local_shards(view, entry)):
            manifest.fill(shard)
        for name, values in states.items():
            set_optimizer_state(view, name, values)
        set_options(view, options)

    access.trying(fill)
    access.agree(f"{folder} was not loaded, the model is a mixture now")
    view.weights_changed()


def _checked(folder: Path, view: LogicalView) -> tuple[Manifest, list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Check a checkpoint without writing anything.

    Returns:
        The manifest, the options of each live param group, and the optimizer state that is no tensor.
    """
    manifest = Manifest.read(folder)
    saved = manifest.tensors
    wanted = {entry.key: entry for entry in view.entries("model", "extra")}
    for key, entry in wanted.items():
        if key not in saved:
            raise CheckpointError(f"{folder} has no {key}: it was saved from another model")
        size = tuple(view.whole_size(entry))
        if saved[key].size != size:
            raise CheckpointError(f"{key} has shape {saved[key].size} in {folder}, {size} in the model")
    unknown = sorted(set(names_of(saved, "model")) - set(wanted))
    if unknown and not _in_stages(view):
        raise CheckpointError(f"{unknown[0]} in {folder} has no place in the model ({len(unknown)} such entries)")
    if view.optimizer is None:
        return manifest, [], {}
    if not manifest.optimizers:
        raise CheckpointError(f"{folder} has no optimizer: load it with optimizer=None")
    groups = [group for optimizer in manifest.optimizers for group in optimizer["param_groups"]]
    decoded = {
        number: {option: _from_json(value) for option, value in group.items()} for number, group in enumerate(groups)
    }
    numbers = {name: values for optimizer in manifest.optimizers for name, values in optimizer["numbers"].items()}
    for name in numbers:
        if name not in view.parameters and not _in_stages(view):
            raise CheckpointError(f"{folder} has optimizer state of {name}, which is no parameter of the model")
    return manifest, options_of(view, decoded), numbers


def _in_stages(view: LogicalView) -> bool:
    """Whether the model here is a stage, and the checkpoint has others."""
    return view.balancer is not None and len(view.balancer._runtime.job.layers_of_stage) > 1


def _new_states(
    view: LogicalView, manifest: Manifest, numbers: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Optimizer state to fill: the live tensors where they fit, else new ones."""
    if view.optimizer is None:
        return {}
    states: dict[str, dict[str, Any]] = {name: {} for name in view.parameters}
    for name, values in numbers.items():
        if name in states:
            states[name].update({key: _from_json(value) for key, value in values.items()})
    for key in names_of(manifest.tensors, "optimizer"):
        try:
            name, state = split_key(view, key.removeprefix("optimizer."))
        except CheckpointError:
            if _in_stages(view):
                continue
            raise
        saved = manifest.tensors[key]
        states[name][state] = new_state_tensor(view, name, state, torch.Size(saved.size), saved.dtype, reuse=True)
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
        return {"tensor": value.tolist(), "dtype": DTYPE_NAMES[value.dtype]}
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
    if isinstance(value, dict):
        return torch.tensor(value["tensor"], dtype=DTYPES[value["dtype"]])
    return value
