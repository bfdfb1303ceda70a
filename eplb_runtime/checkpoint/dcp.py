"""Checkpoints on disk, with torch.distributed.checkpoint (DCP), in logical order.

Every rank writes and reads its own experts' rows, and its share of the rest. On disk are the model's own names and
whole tensors ``[E, ...]``, in the layout that ``get_state_dict`` of DCP gives: ``model.<name>``,
``optimizer.state.<parameter>.<key>``, ``optimizer.param_groups.<i>.<option>``. So plain DCP reads what is saved here,
and what plain DCP saved is read here. ``eplb_runtime`` beside them holds the placement, as JSON.
"""

from __future__ import annotations

import json
import logging
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

from ..experts.slices import columns, local
from ..placement import PlacementError
from .expert_rows import ExpertRows
from .state import CheckpointError, LogicalView, is_expert_state, new_state_tensor, set_optimizer_state

logger = logging.getLogger("eplb_runtime")

FORMAT = "eplb-runtime-checkpoint"
VERSION = 1


class LogicalState:
    """Model and optimizer as one ``Stateful`` of DCP, for your own ``dcp.save`` or ``dcp.async_save`` call.

    ``dcp.save({"app": LogicalState(model, optimizer), "loader": loader}, checkpoint_id=folder)``; to be read by
    ``load(folder, model, optimizer, key="app")``. Plain ``dcp.load`` reads it too, once the optimizer has state.

    Args:
        model: attached or not.
        optimizer: None: without it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._view = LogicalView(model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Nested; the tensors are the live ones, experts as ``ExpertRows``."""
        view = self._view
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
            _set_options(self._view, _options(self._view, dict(enumerate(state["optimizer"]["param_groups"]))))
        _restore_placement(self._view, header, warm_start=True)
        self._view.weights_changed()

    def _optimizer_values(self) -> int:
        return sum(len(self._view.optimizer_state(name)) for name in self._view.parameters)


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    storage_writer: dcp.StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint in logical order; each rank its own experts. Collective, between steps.

    Args:
        folder: new or empty, one that all ranks see.
        storage_writer: for storage other than a file system.
        process_group: for DCP's plan; None: the default group.
    """
    with _without_advice():
        dcp.save(
            LogicalState(model, optimizer).state_dict(),
            checkpoint_id=str(folder),
            storage_writer=storage_writer,
            process_group=process_group,
            no_dist=not dist.is_initialized(),
        )


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    storage_writer: dcp.StorageWriter | None = None,
) -> Future[Any]:
    """As ``save``, but writes in the background: when it returns, the state is copied, and training may go on.

    A commit that comes while the copy is made waits, as the next step does; later ones touch only the live tensors.
    The background thread talks over a group of the balancer's own, so that it cannot meet training's collectives.

    Returns:
        A future that is done when the checkpoint is whole on disk; its ``result()`` raises what went wrong.
    """
    view = LogicalView(model, optimizer)
    state = LogicalState(model, optimizer).state_dict()
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
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    key: str = "",
    warm_start: bool = True,
    storage_reader: dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint, whatever placement, EP size or balancer it was saved with. Collective, between steps.

    Each rank reads its own experts, straight into the live tensors. Optimizer state is made where there is none yet,
    with the saved dtype. A load that fails half-way leaves a mixture.

    Args:
        folder: what ``save``, ``async_save`` or plain DCP wrote.
        model: attached or not.
        optimizer: None: its entries are not read.
        key: under which the state was saved, when it was one of several (``{"app": LogicalState(...)}``).
        warm_start: migrate to the saved placement when EP size and slots are the same, else say so in the log.
        storage_reader: for storage other than a file system.
        process_group: for DCP's plan; None: the default group.

    Raises:
        CheckpointError: entries are missing, have no place in the model, or have other shapes; nothing is changed then.
    """
    view = LogicalView(model, optimizer)
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
    small: dict[str, Any] = {header_key: None} if header_key in saved else {}
    for fqn, path in paths.items():
        if not isinstance(saved[fqn], TensorStorageMetadata):
            small[fqn] = None
        elif path[0] == "param_groups":
            size, dtype = _size_and_dtype(saved[fqn])
            small[fqn] = torch.empty(size, dtype=dtype)
    read(small)
    header = _read_header(small.get(header_key))
    groups: dict[int, dict[str, Any]] = {}
    states: dict[str, dict[str, Any]] = {name: {} for name in view.parameters}
    for fqn, path in paths.items():
        if path[0] == "param_groups":
            groups.setdefault(int(path[1]), {})[path[2]] = small[fqn]
        elif fqn in small:
            states[path[1]][path[2]] = small[fqn]
    options = _options(view, groups)
    _check_sizes(view, metadata, prefix, folder)

    # The placement next: nothing moves cheaper than an optimizer without state.
    _restore_placement(view, header, warm_start)
    large: dict[str, Any] = {}
    for entry in view.entries("model", "extra"):
        large[f"{prefix}{entry.key}"] = _as_saved(view, entry.tensor, entry.layer)
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
        _set_options(view, options)
    view.weights_changed()


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


def _options(view: LogicalView, saved: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
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
    return found


def _set_options(view: LogicalView, options: list[dict[str, Any]]) -> None:
    groups = view.optimizer.param_groups if view.optimizer is not None else []
    for live, new in zip(groups, options, strict=True):
        for option, value in new.items():
            if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                live[option].copy_(value)
            else:
                live[option] = value


def _equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(bool(one[key] == other[key]) for key in one)


def _read_header(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    header: dict[str, Any] = json.loads(text)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CheckpointError(f"not a checkpoint of this version: its header is {text[:80]!r}")
    return header


def _restore_placement(view: LogicalView, header: Mapping[str, Any], warm_start: bool) -> None:
    saved = header.get("balancer")
    if view.balancer is None or saved is None or not warm_start:
        return
    try:
        view.balancer.load_state_dict(saved)
    except PlacementError as error:
        logger.info("the saved placement is not used: %s", error)
    except RuntimeError as error:
        logger.warning("%s; training starts from the placement that stands", error)


class _without_advice(warnings.catch_warnings):
    """DCP warns in every single-process call that it is one."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
