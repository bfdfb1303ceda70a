"""Write a Hugging Face folder from an attached model, a piece at a time: the first rank writes what comes to it, and
holds a shard on the host, on top of a bucket of the stream. `checkpoint.save` writes from all ranks."""

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
    """Write what ``save_pretrained`` of the whole model would. Collective."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    assert view.balancer is not None
    job = view.balancer.runtime.job
    _refuse(view, job)
    size = options.pop("max_shard_size", "5GB")
    shard_bytes = parse_size_to_int(size) if isinstance(size, str) else size  # as save_pretrained understands it
    variant = options.pop("variant", None)
    weights = folder_weights(view, as_in_model=not options.pop("save_original_format", True))
    tensors, joint = TensorList(view.balancer, {job.stages[0]: weights}), JointAccess.of(view)
    token, failed = joint.new_token(), f"{folder} was not exported"
    parts = (("model", *named) for named in brought(tensors, [joint.ranks[0]] * len(tensors.pieces)))
    on_host = ((part, name, value.cpu()) for part, name, value in parts)
    try:
        files = joint.together(failed, lambda: write_tensors(folder, joint.number, token, on_host, shard_bytes))
        joint.on_first(failed, lambda: _finish(view, tensors, files, folder, variant, options))
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


def _finish(
    view: LogicalView,
    tensors: TensorList,
    files: Mapping[str, Sequence[str]],
    folder: Path,
    variant: str | None,
    options: Mapping[str, Any],
) -> None:
    """Give whole files the library's names, and write the rest of the folder: the index last, and an old one goes
    first, so in between nothing loads."""
    end = f".{variant}" if variant else ""
    index, alone = folder / f"model.safetensors.index{end}.json", folder / f"model{end}.safetensors"
    for old in (index, alone):
        old.unlink(missing_ok=True)
    # Configuration and the like by the library, which also clears old shards away.
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, variant=variant, **options)  # type: ignore[attr-defined]
    if len(files) == 1:
        (folder / next(iter(files))).rename(alone)
        return
    file_of: dict[str, str] = {}
    for number, (file, names) in enumerate(files.items(), start=1):
        name = f"model{end}-{number:05d}-of-{len(files):05d}.safetensors"
        (folder / file).rename(folder / name)
        file_of |= dict.fromkeys(names, name)
    parameters = {id(entry.tensor): view.whole_size(entry).numel() for entry in view.entries("model")}
    own = {id(parameter) for parameter in view.parameters.values()}
    metadata = {
        "total_parameters": sum(number for key, number in parameters.items() if key in own),
        "total_size": sum(piece.spec.nbytes for piece in tensors.pieces),
    }
    write_file(index, json.dumps({"metadata": metadata, "weight_map": file_of}, indent=2, sort_keys=True) + "\n")
