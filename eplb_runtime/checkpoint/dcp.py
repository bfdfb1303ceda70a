"""Checkpoints on disk, with torch.distributed.checkpoint (DCP), in logical order.

Every rank writes and reads its own experts' rows, and its share of the rest. On disk are the model's own names and
whole tensors ``[E, ...]``, in the layout that ``get_state_dict`` of DCP gives: ``model.<name>``,
``optimizer.state.<parameter>.<key>``, ``optimizer.param_groups.<i>.<option>``. So plain DCP reads what is saved here,
and what plain DCP saved is read here. ``eplb_runtime`` beside them holds the placement, as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata

from ..moe.experts.slices import columns, local
from .expert_rows import ExpertRows
from .joint_access import JointAccess
from .optimizers import Given
from .restoring import options_of, restore_placement, set_options
from .state import CheckpointError, LogicalView, is_expert_state, new_state_tensor, set_optimizer_state

FORMAT = "eplb-runtime-checkpoint"
VERSION = 1


class LogicalState:
    """Model and optimizer as one ``Stateful`` of DCP, for your own ``dcp.save`` or ``dcp.async_save`` call.

    ``dcp.save({"app": LogicalState(model, optimizer), "loader": loader}, checkpoint_id=folder)``; to be read by
    ``load(folder, model, optimizer, key="app")``. Plain ``dcp.load`` reads it too, once the optimizer has state.

    Args:
        model: attached or not.
        optimizer: one, or the list of them; None: without.
    """

    def __init__(self, model: nn.Module, optimizer: Given = None) -> None:
        self._view = LogicalView(model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Nested; the tensors are the live ones, experts as ``ExpertRows``."""
        view = self._view
        view.refuse_freed("state_dict")
        state: dict[str, Any] = {"model": {}}
        states: dict[str, dict[str, Any]] = {}
        for entry in view.entries():
            value = _as_saved(view, entry.tensor, entry.layer)
            if entry.part == "optimizer":
                states.setdefault(entry.name, {})[entry.state] = value
            else:
                state.setdefault(entry.part, {})[entry.name] = value
        if view.optimizer is not None:
            for name in view.parameters:
                numbers = {str(k): v for k, v in view.optimizer_state(name).items() if not isinstance(v, Tensor)}
                if numbers:
                    states.setdefault(name, {}).update(numbers)
            groups = [
                {**{k: v for k, v in group.items() if k != "params"}, "params": view.names_of(group)}
                for group in view.optimizer.param_groups
            ]
            state["optimizer"] = {"state": states, "param_groups": groups}
        header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "optimizer_tensors": self._optimizer_values()}
        if view.balancer is not None:
            header["balancer"] = view.balancer.state_dict()
        state["eplb_runtime"] = json.dumps(header)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``dcp.load`` calls when it has filled the tensors of ``state_dict()`` in place.

        Raises:
            CheckpointError: the checkpoint has optimizer state that had no tensors to go to.
        """
        header = _read_header(state["eplb_runtime"])
        here = self._optimizer_values()
        if self._view.optimizer is not None:
            if header["optimizer_tensors"] != here:
                raise CheckpointError(
                    f"the checkpoint has {header['optimizer_tensors']} optimizer tensors, the optimizer has {here} so "
                    "far: load it with eplb_runtime.checkpoint.load, which makes them"
                )
            for name, values in state["optimizer"]["state"].items():
                plain = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
                self._view.optimizer.state[self._view.parameters[name]].update(plain)
            set_options(self._view, options_of(self._view, dict(enumerate(state["optimizer"]["param_groups"]))))
        restore_placement(self._view, header.get("balancer"), warm_start=True)
        self._view.weights_changed()

    def _optimizer_values(self) -> int:
        return sum(len(self._view.optimizer_state(name)) for name in self._view.parameters)


def save(
    folder: str | Path,
    view: LogicalView,
    storage_writer: dcp.StorageWriter | None,
    process_group: dist.ProcessGroup | None,
) -> None:
    """`saving.save` by DCP. It writes over what it finds, so a folder that has a checkpoint is refused."""
    if storage_writer is None and JointAccess.of(view, process_group).folder_has(Path(folder) / ".metadata"):
        raise CheckpointError(
            f"{folder} has a checkpoint already, which DCP cannot replace in one step: give a new one"
        )
    with _without_advice():
        dcp.save(
            LogicalState(view.model, view.optimizer).state_dict(),
            checkpoint_id=str(folder),
            storage_writer=storage_writer,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def async_save(folder: str | Path, view: LogicalView, storage_writer: dcp.StorageWriter | None) -> Future[Any]:
    """`saving.async_save` by DCP."""
    state = LogicalState(view.model, view.optimizer).state_dict()
    with _without_advice():
        if view.balancer is None:
            return dcp.async_save(  # type: ignore[return-value]
                state, checkpoint_id=str(folder), storage_writer=storage_writer, no_dist=not dist.is_initialized()
            )
        with view.balancer.quiesce():
            return dcp.async_save(  # type: ignore[return-value]
                state,
                checkpoint_id=str(folder),
                storage_writer=storage_writer,
                process_group=view.balancer._background_group(),
            )


@torch.no_grad()
def load(
    folder: str | Path,
    view: LogicalView,
    *,
    key: str,
    warm_start: bool,
    storage_reader: dcp.StorageReader | None,
    process_group: dist.ProcessGroup | None,
) -> None:
    """`saving.load` by DCP. Names and shapes are checked before anything is written; there are no checksums."""
    optimizer = view.optimizer
    reader = storage_reader if storage_reader is not None else dcp.FileSystemReader(str(folder))
    metadata = _metadata(reader, folder)
    saved = metadata.state_dict_metadata
    prefix = f"{key}." if key else ""

    def read(entries: dict[str, Any]) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        alone = not dist.is_initialized()
        with _without_advice():
            dcp.load(entries, storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone)

    names = [f"{prefix}{entry.key}" for entry in view.entries("model", "extra")]
    _check_names(names, metadata, f"{prefix}model.", folder)
    paths = _optimizer_paths(view, metadata, key, folder) if optimizer is not None else {}

    # What is small first, so that everything is checked before anything is written.
    header_key = f"{prefix}eplb_runtime"
    small = _small(saved, paths)
    small |= {header_key: None} if header_key in saved else {}
    read(small)
    header = _read_header(small.get(header_key))
    groups: dict[int, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {name: {} for name in view.parameters}
    for fqn, path in paths.items():
        if path[0] == "param_groups":
            groups.setdefault(int(path[1]), {})[path[2]] = small[fqn]
        elif fqn in small:
            states[path[1]][path[2]] = small[fqn]
    options = options_of(view, groups)
    _check_sizes(view, metadata, prefix, folder)

    # The placement next: nothing moves cheaper than an optimizer without state.
    restore_placement(view, header.get("balancer"), warm_start)
    entries = view.entries("model", "extra")
    large = {f"{prefix}{entry.key}": _as_saved(view, entry.tensor, entry.layer) for entry in entries}
    for fqn, path in paths.items():
        if path[0] == "state" and fqn not in small:
            name, state_key = path[1], path[2]
            size, dtype = _size_and_dtype(saved[fqn])
            states[name][state_key] = new_state_tensor(view, name, state_key, size, dtype)
            layer = view.layer_of(name) if is_expert_state(view, name, size) else None
            large[fqn] = _as_saved(view, states[name][state_key], layer)
    read(large)
    if optimizer is not None:
        for name, values in states.items():
            set_optimizer_state(view, name, values)
        set_options(view, options)
    view.weights_changed()


def _small(saved: Mapping[str, STORAGE_TYPES], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """What is read ahead of all else: options of the optimizer, and state that is no tensor."""
    small: dict[str, Any] = {}
    for fqn, path in paths.items():
        if not isinstance(saved[fqn], TensorStorageMetadata):
            small[fqn] = None
        elif path[0] == "param_groups":
            size, dtype = _size_and_dtype(saved[fqn])
            small[fqn] = torch.empty(size, dtype=dtype)
    return small


def _as_saved(view: LogicalView, value: Any, layer: int | None) -> Any:
    if layer is not None:
        size = (view.num_experts, *value.shape[1:])
        return ExpertRows(local(value), view.experts_here(layer), size, columns(value).start or 0)
    return value.detach() if isinstance(value, Tensor) else value


def _metadata(reader: dcp.StorageReader, folder: str | Path) -> Metadata:
    try:
        return reader.read_metadata()
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read as a checkpoint: {type(error).__name__}: {error}") from None


def _size_and_dtype(saved: STORAGE_TYPES) -> tuple[torch.Size, torch.dtype]:
    assert isinstance(saved, TensorStorageMetadata)
    return saved.size, saved.properties.dtype


def _check_names(names: list[str], metadata: Metadata, model_prefix: str, folder: str | Path) -> None:
    saved = metadata.state_dict_metadata
    for fqn in names:
        if fqn not in saved:
            raise CheckpointError(f"{folder} has no {fqn}: it was saved from another model, or under another key")
    unknown = sorted({fqn for fqn in saved if fqn.startswith(model_prefix)} - set(names))
    if unknown:
        raise CheckpointError(f"{unknown[0]} in {folder} has no place in the model ({len(unknown)} such entries)")


def _check_sizes(view: LogicalView, metadata: Metadata, prefix: str, folder: str | Path) -> None:
    for entry in view.entries("model", "extra"):
        saved = metadata.state_dict_metadata[f"{prefix}{entry.key}"]
        wanted = view.whole_size(entry)
        size = saved.size if isinstance(saved, TensorStorageMetadata) else None
        if size != wanted:
            raise CheckpointError(
                f"{prefix}{entry.key} has shape {tuple(size or ())} in {folder}, {tuple(wanted)} in the model"
            )


def _optimizer_paths(view: LogicalView, metadata: Metadata, key: str, folder: str | Path) -> dict[str, tuple[Any, ...]]:
    """``{fqn: path}`` below ``optimizer`` of everything that the checkpoint holds there."""
    above = (key, "optimizer") if key else ("optimizer",)
    mapping: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
    paths = {fqn: path[len(above) :] for fqn, path in mapping.items() if path[: len(above)] == above}
    if not paths:
        raise CheckpointError(f"{folder} has no optimizer: load it with optimizer=None, or give the right key")
    for fqn, path in paths.items():
        if len(path) != 3 or path[0] not in ("state", "param_groups"):
            raise CheckpointError(f"{fqn} in {folder} is not in the layout of DCP's get_state_dict (not flattened)")
        if path[0] == "state" and path[1] not in view.parameters:
            raise CheckpointError(f"{folder} has optimizer state of {path[1]}, which is no parameter of the model")
    return paths


def _read_header(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    header: dict[str, Any] = json.loads(text)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CheckpointError(f"not a checkpoint of this version: its header is {text[:80]!r}")
    return header


class _without_advice(warnings.catch_warnings):
    """DCP warns in every single-process call that it is one."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
