"""Write a Hugging Face folder from an attached model: each rank its own experts, a piece at a time.

What fits into one shard is one file, written by rank 0; of anything larger each rank writes shards of its own, and
nothing travels but experts that the folder stores stacked. A rank holds on the host what has come for its shards,
on top of a bucket of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization._base import parse_size_to_int

from ...checkpoint.disk import remove_own, write_tensors
from ...checkpoint.state import CheckpointError, JointAccess, LogicalView
from ...checkpoint.stream import TensorList, brought
from ...distributed.ranks import Job
from ...utils.files import write_file
from .adapters import is_saved_with_adapters
from .naming import folder_weights

_NOT_HERE = {
    "push_to_hub": "upload the folder when it is written",
    "distributed_checkpoint": "use checkpoint.save",
    "state_dict": "the model's own weights are written",
    "is_main_process": "every rank takes part",
}


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, cut into shards by rank. Collective."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    balancer = view.balancer
    assert balancer is not None
    _refuse(view, balancer.runtime.job)
    size = options.pop("max_shard_size", "5GB")
    shard_bytes = parse_size_to_int(size) if isinstance(size, str) else size  # as save_pretrained understands it
    variant = options.pop("variant", None)
    weights = folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    tensors = TensorList(balancer, {balancer.runtime.job.stages[0]: weights})
    to = _destinations(tensors, at_once=sum(piece.spec.nbytes for piece in tensors.pieces) <= shard_bytes)
    joint = JointAccess.of(view)
    failed = f"{folder} was not exported"
    token = joint.new_token()
    parts = (("model", name, value.cpu()) for name, value in brought(tensors, to))
    try:
        own = joint.together(failed, lambda: write_tensors(folder, joint.number, token, parts, shard_bytes))
        of_ranks = [json.loads(text) for text in joint.gather_bytes(json.dumps(own).encode())]
        names = _final_names([name for files in of_ranks for name in files], f".{variant}" if variant else "")
        # The files get their names only when all of them are whole; in between there is no index, so nothing loads.
        joint.on_first(failed, lambda: _renew_folder(view, folder, variant, options))
        joint.together(failed, lambda: [(folder / name).rename(folder / names[name]) for name in own])
        file_of = {key: names[name] for files in of_ranks for name, keys in files.items() for key in keys}
        joint.on_first(failed, lambda: _write_index(view, tensors, file_of, folder, variant))
    except BaseException:
        remove_own(folder, joint.number, token)
        raise


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
    """The rank that writes each piece: experts with tensors of their own stay on their rank, other tensors go to the
    rank that has least."""
    pieces, nbytes = tensors.pieces, dict.fromkeys(tensors.job.data_ranks, 0)
    if at_once:
        return [tensors.job.ranks[0]] * len(pieces)
    own = [None if piece.expert is None or piece.rows else tensors.owner_of(n) for n, piece in enumerate(pieces)]
    for rank, piece in zip(own, pieces, strict=True):
        if rank is not None:
            nbytes[rank] += piece.spec.nbytes
    to: list[int] = []
    of_stacked: dict[str, int] = {}
    for rank, piece in zip(own, pieces, strict=True):
        if rank is None and (rank := of_stacked.get(piece.name)) is None:
            rank = of_stacked[piece.name] = min(nbytes, key=lambda rank: nbytes[rank])
            nbytes[rank] += piece.whole.nbytes
        to.append(rank)
    return to


# -- the rest of the folder ------------------------------------------------------------------------------------------


def _renew_folder(view: LogicalView, folder: Path, variant: str | None, options: Mapping[str, Any]) -> None:
    """Configuration and the like by the library, which also clears old shards away; an old index goes first."""
    for name in (_index_name(variant), f"model.{variant}.safetensors" if variant else "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, variant=variant, **options)  # type: ignore[attr-defined]


def _final_names(files: Sequence[str], variant: str) -> dict[str, str]:
    """The library's names for the files of all ranks, in their order."""
    if len(files) == 1:
        return {files[0]: f"model{variant}.safetensors"}
    of = f"of-{len(files):05d}"
    return {name: f"model{variant}-{number:05d}-{of}.safetensors" for number, name in enumerate(files, start=1)}


def _write_index(
    view: LogicalView, tensors: TensorList, file_of: Mapping[str, str], folder: Path, variant: str | None
) -> None:
    files = sorted(set(file_of.values()))
    if unseen := [name for name in files if not (folder / name).exists()]:
        raise CheckpointError(f"the first rank does not see {unseen[0]} in {folder}: give a folder that all ranks see")
    if len(files) == 1:
        return
    parameters = {id(entry.tensor): view.whole_size(entry).numel() for entry in view.entries("model")}
    own = {id(parameter) for parameter in view.parameters.values()}
    index = {
        "metadata": {
            "total_parameters": sum(number for key, number in parameters.items() if key in own),
            "total_size": sum(piece.spec.nbytes for piece in tensors.pieces),
        },
        "weight_map": file_of,
    }
    write_file(folder / _index_name(variant), json.dumps(index, indent=2, sort_keys=True) + "\n")


def _index_name(variant: str | None) -> str:
    return f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"
