"""Write a Hugging Face folder from an attached model: each rank its own experts, a piece at a time.

What fits into one shard is one file, written by rank 0; of anything larger each rank writes shards of its own, and
nothing travels but experts that the folder stores stacked. A rank holds on the host what has come for its shards,
besides a bucket of the stream.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ...checkpoint.disk import save_tensors
from ...checkpoint.joint_access import JointAccess
from ...checkpoint.state import CheckpointError, LogicalView
from ...checkpoint.stream import StreamItem, TensorList, brought
from ...checkpoint.weights import TensorSpec
from ...distributed.ranks import Job
from ...utils.files import PARTIALS, write_file
from .adapters import is_saved_with_adapters
from .naming import folder_weights

SHARD_SIZE = "5GB"
"""Of a shard, unless told otherwise."""
_NOT_HERE = {
    "push_to_hub": "upload the folder when it is written",
    "distributed_checkpoint": "use checkpoint.save",
    "state_dict": "the model's own weights are written",
    "is_main_process": "every rank takes part",
}
_Files = dict[str, tuple[int, dict[str, TensorSpec]]]
"""Rank and tensors of each file: the same on every rank."""


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, cut into shards by rank. Collective."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    balancer = view.balancer
    assert balancer is not None
    _refuse(view, balancer._runtime.job)
    shard_size = options.pop("max_shard_size", SHARD_SIZE)
    variant = options.pop("variant", None)
    weights = folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    tensors = TensorList(balancer, {balancer._runtime.job.stages[0]: weights})
    to = _destinations(tensors, at_once=len(_shards({i.name: i.spec for i in tensors.items}, shard_size)) <= 1)
    files = _files(tensors, to, shard_size, f".{variant}" if variant else "")
    own = _OwnFiles(files, folder)
    joint = JointAccess.of(view)
    failed = f"{folder} was not exported"
    try:
        for item, row, tensor in brought(tensors, to):
            joint.trying(partial(own.put, item, row, tensor))
        joint.agree(failed)
        # The files get their names only when all of them are whole; in between there is no index, so nothing loads.
        joint.on_first(failed, lambda: _renew_folder(view, folder, variant, options))
        joint.together(failed, own.publish)
        joint.on_first(failed, lambda: _write_index(view, files, folder, variant))
    finally:
        own.discard()


def _refuse(view: LogicalView, job: Job) -> None:
    model = view.model
    if not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} has no save_pretrained: use checkpoint.save")
    if is_saved_with_adapters(model):
        raise CheckpointError(
            "the model has adapters, and its folders hold nothing else: call its own save_pretrained, on every rank"
        )
    if len(job.stage_sets) > 1 or len(job.stages) > 1:
        raise CheckpointError("a pipeline stage is no whole model: use checkpoint.save")


def _destinations(tensors: TensorList, at_once: bool) -> list[int]:
    """The rank that writes each tensor: experts with tensors of their own stay on their rank, the others go to the rank
    that has least."""
    nbytes = dict.fromkeys(tensors.job.data_ranks, 0)
    if at_once:
        return [tensors.job.ranks[0]] * len(tensors.items)
    to = [-1 if item.expert is None else tensors.owner_of(item, item.expert) for item in tensors.items]
    for rank, item in zip(to, tensors.items, strict=True):
        if rank >= 0:
            nbytes[rank] += item.spec.nbytes
    for number, item in enumerate(tensors.items):
        if to[number] < 0:
            to[number] = min(nbytes, key=lambda rank: nbytes[rank])
            nbytes[to[number]] += item.spec.nbytes
    return to


def _files(tensors: TensorList, to: list[int], shard_size: int | str, variant: str) -> _Files:
    shards: list[tuple[int, dict[str, TensorSpec]]] = []
    for rank in tensors.job.data_ranks:
        own = {item.name: item.spec for item, other in zip(tensors.items, to, strict=True) if other == rank}
        shards += [(rank, shard) for shard in _shards(own, shard_size)]
    if len(shards) == 1:
        return {f"model{variant}.safetensors": shards[0]}
    return {
        f"model{variant}-{number:05d}-of-{len(shards):05d}.safetensors": shard
        for number, shard in enumerate(shards, start=1)
    }


def _shards(tensors: Mapping[str, TensorSpec], shard_size: int | str) -> list[dict[str, TensorSpec]]:
    """Cut into files by the library's own rule."""
    empty = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in tensors.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_size)
    return [{key: tensors[key] for key in keys} for keys in split.filename_to_tensors.values()]


class _OwnFiles:
    """The files of this rank, each written as soon as it has all of its tensors."""

    def __init__(self, files: _Files, folder: Path) -> None:
        self._folder = folder
        self._missing = {
            name: sum(spec.nbytes for spec in tensors.values())
            for name, (rank, tensors) in files.items()
            if rank == dist.get_rank()
        }
        self._file_of = {key: name for name in self._missing for key in files[name][1]}
        self._arrived: dict[str, dict[str, Tensor]] = {name: {} for name in self._missing}
        self._partial = {name: folder / PARTIALS.replace("*", secrets.token_hex(16)) for name in self._missing}

    def put(self, item: StreamItem, row: int | None, value: Tensor) -> None:
        name = self._file_of[item.name]
        arrived = self._arrived[name]
        if row is None:
            arrived[item.name] = value.cpu()
        else:
            if item.name not in arrived:
                arrived[item.name] = torch.empty(item.spec.shape, dtype=item.spec.dtype)
            arrived[item.name][row] = value[0]
        self._missing[name] -= value.nbytes
        if not self._missing[name]:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_tensors(self._partial[name], self._arrived.pop(name))

    def publish(self) -> None:
        for name, path in self._partial.items():
            path.rename(self._folder / name)

    def discard(self) -> None:
        for path in self._partial.values():
            path.unlink(missing_ok=True)


# -- the rest of the folder ------------------------------------------------------------------------------------------


def _renew_folder(view: LogicalView, folder: Path, variant: str | None, options: Mapping[str, Any]) -> None:
    """Configuration and the like by the library, which also clears old shards away; an old index goes first."""
    for name in (_index_name(variant), f"model.{variant}.safetensors" if variant else "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, variant=variant, **options)  # type: ignore[attr-defined]


def _write_index(view: LogicalView, files: _Files, folder: Path, variant: str | None) -> None:
    unseen = [name for name in files if not (folder / name).exists()]
    if unseen:
        raise CheckpointError(f"the first rank does not see {unseen[0]} in {folder}: give a folder that all ranks see")
    if len(files) == 1:
        return
    sizes = [spec.nbytes for _, tensors in files.values() for spec in tensors.values()]
    parameters = {id(entry.tensor): view.whole_size(entry).numel() for entry in view.entries("model")}
    own = {id(parameter) for parameter in view.parameters.values()}
    index = {
        "metadata": {
            "total_parameters": sum(number for key, number in parameters.items() if key in own),
            "total_size": sum(sizes),
        },
        "weight_map": {key: name for name, (_, tensors) in files.items() for key in tensors},
    }
    write_file(folder / _index_name(variant), json.dumps(index, indent=2, sort_keys=True) + "\n")


def _index_name(variant: str | None) -> str:
    return f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"
