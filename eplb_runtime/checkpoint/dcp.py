"""Checkpoints on disk, with torch.distributed.checkpoint (DCP), in logical order.

Every rank writes and reads its own experts' rows, and its share of the rest. On disk are the model's own names and
whole tensors ``[E, ...]``, in the layout that ``get_state_dict`` of DCP gives: ``model.<name>``,
``optimizer.state.<parameter>.<key>``, ``optimizer.param_groups.<i>.<option>``. So plain DCP reads what is saved here,
and what plain DCP saved is read here. The folder ``eplb_runtime`` next to them holds the placement, as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..moe.experts.slices import columns, local
from .restore import Saved, numbers_of, options_of, restore_placement, set_options, warn_of_left_out
from .state import CheckpointError, Entry, Given, JointAccess, LogicalView
from .weights import TensorSpec

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
        return _state_of(self._view)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What ``dcp.load`` calls when it has filled the tensors of ``state_dict()`` in place. Optimizer state that had
        no tensors to go to is a `CheckpointError`."""
        view, header = self._view, _read_header(state["eplb_runtime"])
        if view.optimizers:
            if header["optimizer_tensors"] != (here := _count(view)):
                raise CheckpointError(
                    f"the checkpoint has {header['optimizer_tensors']} optimizer tensors, the optimizer has {here} so "
                    "far: load it with eplb_runtime.checkpoint.load, which makes them"
                )
            for name, values in state["optimizer"]["state"].items():
                plain = {k: v for k, v in values.items() if not isinstance(v, Tensor)}
                view.set_optimizer_state(name, view.optimizer_state(name) | plain)
            set_options(view, options_of(view, state["optimizer"]["param_groups"]))
        warn_of_left_out(view, header.get("extra", ()))
        restore_placement(view, header.get("balancer"), warm_start=True)
        view.weights_changed()


def _state_of(view: LogicalView) -> dict[str, Any]:
    view.refuse_freed("state_dict")
    state: dict[str, Any] = {"model": {}}
    states: dict[str, dict[str, Any]] = {}
    for entry in view.entries():
        if entry.part == "optimizer":
            states.setdefault(entry.name, {})[entry.state] = _as_saved(view, entry)
        else:
            state.setdefault(entry.part, {})[entry.name] = _as_saved(view, entry)
    if optimizer := numbers_of(view):
        for name, numbers in optimizer["numbers"].items():
            states.setdefault(name, {}).update(numbers)
        state["optimizer"] = {"state": states, "param_groups": optimizer["param_groups"]}
    header: dict[str, Any] = {"format": FORMAT, "version": VERSION, "optimizer_tensors": _count(view)}
    header["extra"] = list(state.get("extra", ()))
    if view.balancer is not None:
        header["balancer"] = view.balancer.state_dict()
    state["eplb_runtime"] = json.dumps(header)
    return state


def _count(view: LogicalView) -> int:
    return sum(len(view.optimizer_state(name)) for name in view.parameters)


def _as_saved(view: LogicalView, entry: Entry) -> Tensor:
    if entry.layer is None:
        return entry.tensor.detach()
    experts, begin = view.experts_here(entry.layer), columns(entry.tensor).start or 0
    return ExpertRows(local(entry.tensor), experts, view.whole_size(entry), begin)


def save(folder: str | Path, view: LogicalView) -> None:
    """`saving.save` by DCP. It writes over what it finds, so a folder that has a checkpoint is refused."""
    if JointAccess.of(view).folder_has(Path(folder) / ".metadata"):
        raise CheckpointError(
            f"{folder} has a checkpoint already, which DCP cannot replace in one step: give a new one"
        )
    with _without_advice():
        dcp.save(_state_of(view), checkpoint_id=str(folder), no_dist=not dist.is_initialized())


def async_save(folder: str | Path, view: LogicalView) -> Future[Any]:
    """`saving.async_save` by DCP."""
    state, alone = _state_of(view), not dist.is_initialized()
    with _without_advice():
        if view.balancer is None:
            return dcp.async_save(state, checkpoint_id=str(folder), no_dist=alone)  # type: ignore[return-value]
        with view.balancer.quiesce():
            group = view.balancer.runtime.groups.background
            return dcp.async_save(state, checkpoint_id=str(folder), process_group=group)  # type: ignore[return-value]


class FolderOfDCP(Saved):
    """A checkpoint of DCP, open for reading; there are no checksums. Without an optimizer in the view, what the
    checkpoint has of one is not looked at."""

    def __init__(self, folder: str | Path, view: LogicalView, key: str) -> None:
        self.name, self._reader = str(folder), dcp.FileSystemReader(str(folder))
        try:
            metadata = self._reader.read_metadata()
        except Exception as error:
            why = f"{type(error).__name__}: {error}" if Path(folder).exists() else "there is no such folder"
            raise CheckpointError(f"{folder} cannot be read as a checkpoint: {why}") from None
        found, prefix = metadata.state_dict_metadata, f"{key}." if key else ""
        if key and not any(fqn.startswith(f"{key}.model.") for fqn in found):
            raise CheckpointError(f"{folder} has no {key}.model.: it was saved under another key")
        specs = {
            fqn: TensorSpec(tuple(one.size), one.properties.dtype)
            for fqn, one in found.items()
            if isinstance(one, TensorStorageMetadata)
        }
        weights = (f"{prefix}model.", f"{prefix}extra.")
        self._fqns = {fqn.removeprefix(prefix): fqn for fqn in specs if fqn.startswith(weights)}
        # Each rank reads by itself what is no tensor, and options.
        paths = self._optimizer_paths(metadata, key) if view.optimizers else {}
        header = f"{prefix}eplb_runtime"
        small: dict[str, Any] = {header: None} if header in found else {}
        for fqn, path in paths.items():
            if fqn in specs and path[0] == "state":
                self._fqns[f"optimizer.{path[1]}.{path[2]}"] = fqn
            else:
                small[fqn] = torch.empty(specs[fqn].shape, dtype=specs[fqn].dtype) if fqn in specs else None
        self.tensors = {name: specs[fqn] for name, fqn in self._fqns.items()}
        self._read(small, alone=True)
        groups: dict[int, dict[str, Any]] = {}
        numbers: dict[str, dict[str, Any]] = {}
        for fqn, (part, one, option) in paths.items():
            if part == "param_groups":
                groups.setdefault(int(one), {})[option] = small[fqn]
            elif fqn in small:
                numbers.setdefault(one, {})[option] = small[fqn]
        self.optimizers = [{"param_groups": [groups[n] for n in sorted(groups)], "numbers": numbers}] if paths else []
        self.balancer = _read_header(small.get(header)).get("balancer")

    def fill(self, view: LogicalView, entries: Sequence[Entry]) -> None:
        """`Saved.fill`, all at once. Collective."""
        live = {self._fqns[entry.key]: _as_saved(view, entry) for entry in entries}
        self._read(live, alone=not dist.is_initialized())

    def _read(self, entries: dict[str, Any], alone: bool) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _without_advice():
            dcp.load(entries, storage_reader=self._reader, planner=planner, no_dist=alone)

    def _optimizer_paths(self, metadata: Metadata, key: str) -> dict[str, tuple[Any, ...]]:
        """``{fqn: path}`` below ``optimizer`` of everything that the checkpoint holds there."""
        above = (key, "optimizer") if key else ("optimizer",)
        mapping: Mapping[str, tuple[Any, ...]] = metadata.planner_data or {}
        paths = {fqn: path[len(above) :] for fqn, path in mapping.items() if path[: len(above)] == above}
        for fqn, path in paths.items():
            if len(path) != 3 or path[0] not in ("state", "param_groups"):
                raise CheckpointError(
                    f"{fqn} in {self.name} is not in the layout of DCP's get_state_dict (not flattened)"
                )
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


# -- experts as DCP wants to see them --------------------------------------------------------------------------------

_ATEN = torch.ops.aten
_ALIKE = (
    _ATEN.detach.default,
    _ATEN.clone.default,
    _ATEN.zeros_like.default,
    _ATEN.empty_like.default,
    _ATEN._to_copy.default,
)
"""Calls of stagers on a tensor, row by row the same."""


class ExpertRows(Tensor):
    """A tensor ``[E, ...]`` of which this rank holds some rows; to be saved and loaded, not to be computed with.

    DTensor knows contiguous shards only, and experts stand anywhere. So this class speaks DCP's protocol for tensors of
    other libraries: each expert is one chunk of the logical tensor, and a checkpoint holds plain whole tensors.

    Args:
        rows: ``[H, ...]``, the live tensor: saving reads it, loading writes it in place. Or a slice of it along
            dimension 1.
        experts: the logical expert of each row.
        size: of the logical tensor, ``[E, ...]``.
        first_column: where a slice begins.
    """

    _rows: Tensor
    _experts: tuple[int, ...]
    _first_column: int

    @staticmethod
    def __new__(cls, rows: Tensor, experts: Sequence[int], size: Sequence[int], first_column: int = 0) -> ExpertRows:
        # The one constructor that torch has for a tensor that only describes others; DTensor is made by it too.
        wrapper: ExpertRows = torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=rows.dtype, device=rows.device
        )  # type: ignore[attr-defined]
        wrapper._rows = rows.detach()
        wrapper._experts = tuple(experts)
        wrapper._first_column = first_column
        return wrapper

    def __init__(self, rows: Tensor, experts: Sequence[int], size: Sequence[int], first_column: int = 0) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExpertRows({tuple(self.shape)}, {self.dtype}, experts {list(self._experts)} here)"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ExpertRows, (self._rows, self._experts, tuple(self.shape), self._first_column)

    def _like(self, rows: Tensor) -> ExpertRows:
        return ExpertRows(rows, self._experts, self.shape, self._first_column)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        twin, *rest = args
        if func is _ATEN.new_empty.default:
            # One of DCP's stagers makes an empty twin first and fills in its attributes (copies of ours) afterwards.
            return twin._like(twin._rows.new_empty(twin._rows.shape, **kwargs))
        if func is _ATEN.copy_.default and isinstance(rest[0], ExpertRows) and twin._experts == rest[0]._experts:
            twin._rows.copy_(rest[0]._rows, *rest[1:], **kwargs)
            return twin
        if func in _ALIKE:
            return twin._like(func(twin._rows, *rest, **kwargs))
        raise NotImplementedError(f"{func}: ExpertRows is for torch.distributed.checkpoint only")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        sizes = torch.Size([1, *self._rows.shape[1:]])
        return [ChunkStorageMetadata(self._offsets(expert), sizes) for expert in self._experts]

    def _offsets(self, expert: int) -> torch.Size:
        return torch.Size([expert, self._first_column, *[0] * self.ndim][: self.ndim])

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self._rows)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for row, expert in enumerate(self._experts):
            if index.offset == self._offsets(expert):
                return self._rows[row : row + 1]
        raise ValueError(f"{index.fqn}: no expert {index.offset} on this rank")
