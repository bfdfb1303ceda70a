"""Checkpoints of torch.distributed.checkpoint (DCP), in logical order.

Every rank writes and reads its own experts' rows, and its share of the rest. On disk are the model's own names and
whole tensors ``[E, ...]``, in the layout that ``get_state_dict`` of DCP gives: ``model.<name>``,
``optimizer.state.<parameter>.<key>``, ``optimizer.param_groups.<i>.<option>``. So plain DCP reads what is saved here,
and what plain DCP saved is read here. The entry ``eplb_runtime`` beside them holds the placement, as JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ..utils.text import one_line
from .state import CheckpointError, Entry, Given, JointAccess, LogicalView, Saved, TensorSpec

FORMAT = "eplb-runtime-checkpoint"
VERSION = 1


class LogicalState:
    """Model and optimizer (one, or the list of them) as one ``Stateful`` of DCP, for your own ``dcp.save`` call.

    ``dcp.save({"app": LogicalState(model, optimizer), "loader": loader}, checkpoint_id=folder)``; to be read by
    ``load(folder, model, optimizer, key="app")``. Plain ``dcp.load`` reads it too, once the optimizer has state.
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
            view.set_options(view.options_of(state["optimizer"]["param_groups"]))
        view.warn_of_registered(header.get("extra", ()))
        view.restore_placement(header.get("balancer"))
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
    if optimizer := view.numbers():
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
    return entry.tensor.detach() if entry.layer is None else ExpertRows(view, entry)


def save(folder: str | Path, view: LogicalView) -> None:
    """`disk.save` by DCP. It writes over what it finds, so a folder that has a checkpoint is refused."""
    if JointAccess.of(view).folder_has(Path(folder) / ".metadata"):
        raise CheckpointError(
            f"{folder} has a checkpoint already, which DCP cannot replace in one step: give a new one"
        )
    with _in_a_line(f"{folder} was not saved"):
        dcp.save(_state_of(view), checkpoint_id=str(folder), no_dist=not dist.is_initialized())


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
        paths: Mapping[str, tuple[Any, ...]] = (metadata.planner_data or {}) if view.optimizers else {}
        self._fqns: dict[str, str] = {}
        self.tensors: dict[str, TensorSpec] = {}
        small: dict[str, Any] = {}  # what is no tensor, and options: each rank reads them by itself
        options: dict[tuple[str, Any], dict[str, str]] = {}
        for fqn in (fqn for fqn in found if fqn.startswith(prefix)):
            one, name = found[fqn], fqn.removeprefix(prefix)
            spec = TensorSpec(tuple(one.size), one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            match paths.get(fqn, ())[bool(key) :]:
                case ("optimizer", "state", of, option) if spec is not None:
                    name = f"optimizer.{of}.{option}"
                    self._fqns[name], self.tensors[name] = fqn, spec
                case ("optimizer", "state" | "param_groups" as part, of, option):
                    options.setdefault((part, of), {})[option] = fqn
                    small[fqn] = None if spec is None else torch.empty(spec.shape, dtype=spec.dtype)
                case ("optimizer", *_):
                    raise CheckpointError(
                        f"{fqn} in {folder} is not in the layout of DCP's get_state_dict (not flattened)"
                    )
                case _ if spec is not None and name.startswith(("model.", "extra.")):
                    self._fqns[name], self.tensors[name] = fqn, spec
                case _ if name == "eplb_runtime":
                    small[fqn] = None
        self._read(small, alone=True)
        parts: dict[str, dict[Any, dict[str, Any]]] = {"state": {}, "param_groups": {}}
        for (part, of), fqns in options.items():
            parts[part][of] = {option: small[fqn] for option, fqn in fqns.items()}
        groups = [parts["param_groups"][number] for number in sorted(parts["param_groups"], key=int)]
        self.optimizers = [{"param_groups": groups, "numbers": parts["state"]}] if groups else []
        self.balancer = _read_header(small.get(f"{prefix}eplb_runtime")).get("balancer")

    def fill(self, view: LogicalView, entries: Sequence[Entry]) -> None:
        """`Saved.fill`, all at once. Collective."""
        live = {self._fqns[entry.key]: _as_saved(view, entry) for entry in entries}
        self._read(live, alone=not dist.is_initialized())

    def _read(self, entries: dict[str, Any], alone: bool) -> None:
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _in_a_line(f"{self.name} cannot be read"):
            dcp.load(entries, storage_reader=self._reader, planner=planner, no_dist=alone)


def _read_header(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    header: dict[str, Any] = json.loads(text)
    if header.get("format") != FORMAT or header.get("version") != VERSION:
        raise CheckpointError(f"not a checkpoint of this version: its header is {text[:80]!r}")
    return header


@contextmanager
def _in_a_line(what: str) -> Iterator[None]:
    """DCP raises a traceback of each rank, and warns in every single-process call that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{what}: rank {rank}: {one_line(cause, with_type=True)}") from None


class ExpertRows(Tensor):
    """An entry ``[E, ...]`` of which this rank holds some rows, to be saved (read) and loaded (written in place).

    DTensor knows contiguous shards only, and experts stand anywhere. So this class speaks DCP's protocol for tensors of
    other libraries: each expert is one chunk of the logical tensor, and a checkpoint holds plain whole tensors.
    """

    _blocks: dict[torch.Size, Tensor]

    @staticmethod
    def __new__(cls, view: LogicalView, entry: Entry) -> ExpertRows:
        # The one constructor that torch has for a tensor that only describes others; DTensor is made by it too.
        wrapper: ExpertRows = torch.Tensor._make_wrapper_subclass(
            cls, view.spec_of(entry).shape, dtype=entry.tensor.dtype, device=entry.tensor.device
        )  # type: ignore[attr-defined]
        wrapper._blocks = {torch.Size(offsets): block for offsets, block in view.blocks_of(entry)}
        return wrapper

    def __init__(self, view: LogicalView, entry: Entry) -> None:
        super().__init__()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ExpertRows({tuple(self.shape)}, {self.dtype}, {len(self._blocks)} experts here)"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{func}: experts are saved and loaded in place, by dcp.save and dcp.load; in the background by "
            "eplb_runtime.checkpoint.async_save"
        )

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, block.shape) for offsets, block in self._blocks.items()]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(next(iter(self._blocks.values())))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._blocks[index.offset]
