"""Checkpoints of torch.distributed.checkpoint (DCP), in logical order.

Every rank writes and reads its own experts' rows, and its share of the rest. On disk are the model's own names and
whole tensors ``[E, ...]``, in the layout that ``get_state_dict`` of DCP gives: ``model.<name>``,
``optimizer.state.<parameter>.<key>``, ``optimizer.param_groups.<i>.<option>``. So plain DCP reads what is saved here,
and what plain DCP saved is read here. The entry ``eplb_runtime`` beside them holds the placement, as JSON.
"""

import json
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
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
from .state import CheckpointError, Entry, JointAccess, LogicalView, Saved, TensorSpec

_STATE, _GROUPS = "optimizer.state.", "optimizer.param_groups."


def save(folder: str | Path, view: LogicalView) -> None:
    """Write a DCP checkpoint of the view. Collective. CheckpointError: the model is one of several pipeline stages, the
    folder has a checkpoint already, or a rank failed."""
    if view.in_stages:
        raise CheckpointError("pipeline stages share names, and DCP keeps one of each: use format='safetensors'")
    access = JointAccess.of(view)
    if access.folder_has(Path(folder) / ".metadata"):
        raise CheckpointError(f"{folder} has a checkpoint, which DCP cannot replace in one step: give a new one")
    state: dict[str, Any] = {"model": {}}
    states: dict[str, dict[str, Any]] = {}
    for entry in view.entries():
        if entry.part == "optimizer":
            states.setdefault(entry.name, {})[entry.state] = _as_saved(view, entry)
        else:
            state.setdefault(entry.part, {})[entry.name] = _as_saved(view, entry)
    for name, key, value in view.numbers():
        states.setdefault(name, {})[key] = value
    if view.optimizers:
        state["optimizer"] = {"state": states, "param_groups": view.named_groups}
    if view.balancer is not None:
        state["eplb_runtime"] = json.dumps({"balancer": view.balancer.state_dict()})
    with _in_a_line(f"{folder} was not saved", access):
        dcp.save(state, checkpoint_id=str(folder), process_group=access.group, no_dist=access.group is None)


class FolderOfDCP(Saved):
    """A checkpoint of DCP, open for reading; there are no checksums. Without an optimizer in the view, what the
    checkpoint has of one is not looked at."""

    def __init__(self, folder: str | Path, view: LogicalView) -> None:
        self.name, self._reader = str(folder), dcp.FileSystemReader(str(folder))
        self._fqns: dict[str, str] = {}
        self.tensors: dict[str, TensorSpec] = {}
        small: dict[str, Any] = {}  # what is no tensor, and options: each rank reads them by itself
        metadata = self._reader.read_metadata()
        for fqn, one in metadata.state_dict_metadata.items():
            spec = TensorSpec(tuple(one.size), one.properties.dtype) if isinstance(one, TensorStorageMetadata) else None
            of_optimizer = fqn.startswith("optimizer.")
            if of_optimizer and not view.optimizers:
                continue
            if of_optimizer and len((metadata.planner_data or {}).get(fqn, ())) != 4:
                raise CheckpointError(f"{fqn} in {folder} is not in the layout of DCP's get_state_dict (not flattened)")
            if spec is not None and not fqn.startswith(_GROUPS):
                key = fqn.replace(_STATE, "optimizer.", 1) if of_optimizer else fqn
                self._fqns[key], self.tensors[key] = fqn, spec
            elif of_optimizer or fqn == "eplb_runtime":
                small[fqn] = None if spec is None else torch.empty(spec.shape, dtype=spec.dtype)
        self._read(small, JointAccess(None, torch.device("cpu")))
        groups: dict[int, dict[str, Any]] = {}
        for fqn in (fqn for fqn in small if fqn.startswith(_GROUPS)):
            number, _, option = fqn.removeprefix(_GROUPS).partition(".")
            groups.setdefault(int(number), {})[option] = small[fqn]
        self.param_groups = [groups[number] for number in sorted(groups)] or None
        self.numbers = {fqn.removeprefix(_STATE): small[fqn] for fqn in small if fqn.startswith(_STATE)}
        self.balancer = json.loads(small.get("eplb_runtime") or "{}").get("balancer")

    def fill(self, view: LogicalView, entries: Sequence[Entry]) -> None:
        """Read the saved values of all ``entries`` into their live tensors, in one ``dcp.load``. Collective."""
        self._read({self._fqns[one.key]: _as_saved(view, one) for one in entries}, JointAccess.of(view))

    def _read(self, entries: dict[str, Any], access: JointAccess) -> None:
        planner, group = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), access.group
        with _in_a_line(f"{self.name} cannot be read", access):
            dcp.load(entries, process_group=group, storage_reader=self._reader, planner=planner, no_dist=group is None)


@contextmanager
def _in_a_line(what: str, access: JointAccess) -> Iterator[None]:
    """DCP raises a traceback of each rank, and warns in every single-process call that it is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise CheckpointError(f"{what}: rank {access.ranks[rank]}: {one_line(cause, with_type=True)}") from None


def _as_saved(view: LogicalView, entry: Entry) -> Tensor:
    if entry.layer is None:
        return entry.tensor.detach()
    spec = view.spec_of(entry)
    rows = torch.empty((), dtype=spec.dtype, device=entry.tensor.device).expand(spec.shape).as_subclass(ExpertRows)
    rows.blocks = {torch.Size(offsets): block for offsets, block in view.blocks_of(entry)}
    return rows


class ExpertRows(Tensor):
    """An entry ``[E, ...]`` of which this rank holds some rows, to be saved (read) and loaded (written in place).

    DTensor knows contiguous shards only, and experts stand anywhere. So this class speaks DCP's protocol for tensors of
    other libraries: each expert is one chunk of the logical tensor, and a checkpoint holds plain whole tensors. It has
    the shape alone, and no values of its own.
    """

    blocks: dict[torch.Size, Tensor]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, block.shape) for offsets, block in self.blocks.items()]

    def __create_write_items__(self, fqn: str, tensor: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(next(iter(self.blocks.values())))
        data = [TensorWriteData(chunk, properties, self.size()) for chunk in self.__create_chunk_list__()]
        return [WriteItem(MetadataIndex(fqn, one.chunk.offsets), WriteItemType.SHARD, tensor_data=one) for one in data]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.blocks[index.offset]
