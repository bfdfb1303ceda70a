"""Write a Hugging Face folder from an attached model: each rank its own experts, a piece at a time.

What fits into one shard is one file, written by rank 0; of anything larger each rank writes shards of its own, and
nothing travels but experts that the folder stores stacked. A rank holds on the host what has come for its shards,
besides one expert (or a block of small ones) and one dense tensor.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...checkpoint.disk import save_tensors
from ...checkpoint.joint_access import JointAccess
from ...checkpoint.state import CheckpointError, Entry, LogicalView
from ...checkpoint.weights import TensorSpec
from ...distributed.ranks import Job
from ...moe.experts.gathering import rows_per_call
from ...utils.files import PARTIALS, write_file
from .adapters import is_saved_with_adapters
from .naming import Convert, Piece, State, converter, pieces_of, saved_entries

SHARD_SIZE = "5GB"
"""Of a shard, unless told otherwise."""
_NOT_HERE = {
    "push_to_hub": "upload the folder when it is written",
    "distributed_checkpoint": "use checkpoint.save",
    "state_dict": "the model's own weights are written",
    "is_main_process": "every rank takes part",
}


@dataclass(frozen=True)
class _Rows:
    """Rows ``first:last`` of the EP rank ``source`` go into a file of rank ``destination``."""

    piece: Piece
    source: int
    first: int
    last: int
    destination: int


@dataclass(frozen=True)
class _Whole:
    """A piece goes whole into a file of rank ``destination``."""

    piece: Piece
    destination: int


@dataclass(frozen=True)
class _Plan:
    """Who writes what: the same on every rank.

    Args:
        files: for each file, its rank and its tensors.
        steps: in the order in which all ranks go through them.
    """

    files: dict[str, tuple[int, dict[str, TensorSpec]]]
    steps: list[_Rows | _Whole]


@torch.no_grad()
def write(view: LogicalView, folder: Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, cut into shards by rank. Collective."""
    for name, mend in _NOT_HERE.items():
        if options.pop(name, None):
            raise CheckpointError(f"export_pretrained does not take {name}: {mend}")
    _refuse(view)
    shard_size = options.pop("max_shard_size", SHARD_SIZE)
    variant = options.pop("variant", None)
    entries = saved_entries(view)
    convert = converter(view.model) if options.pop("save_original_format", True) else lambda state: state  # type: ignore[arg-type]
    plan = _plan(view, entries, pieces_of(view, entries, convert), shard_size, f".{variant}" if variant else "")
    files = _OwnFiles(plan, folder)
    joint = JointAccess.of(view)
    failed = f"{folder} was not exported"
    try:
        for step in plan.steps:
            _write(view, entries, convert, step, files, joint)
        joint.agree(failed)
        # The files get their names only when all of them are whole; in between there is no index, so nothing loads.
        joint.on_first(failed, lambda: _renew_folder(view, folder, variant, options))
        joint.together(failed, files.publish)
        joint.on_first(failed, lambda: _write_index(view, plan, folder, variant))
    finally:
        files.discard()


def _refuse(view: LogicalView) -> None:
    model = view.model
    if not hasattr(model, "save_pretrained"):
        raise CheckpointError(f"{type(model).__name__} has no save_pretrained: use checkpoint.save")
    if getattr(model, "hf_quantizer", None) is not None:
        raise CheckpointError("the model is quantised: load it with dequantize=True to export it")
    if is_saved_with_adapters(model):
        raise CheckpointError(
            "the model has adapters, and its folders hold nothing else: call its own save_pretrained, on every rank"
        )
    if len(_job(view).stage_sets) > 1 or len(_job(view).stages) > 1:
        raise CheckpointError("a pipeline stage is no whole model: use checkpoint.save")


def _job(view: LogicalView) -> Job:
    assert view.balancer is not None
    return view.balancer._runtime.job


# -- who writes what -------------------------------------------------------------------------------------------------


def _plan(
    view: LogicalView, entries: Mapping[str, Entry], pieces: Sequence[Piece], shard_size: int | str, variant: str
) -> _Plan:
    made = {key: spec for piece in pieces for key, spec in piece.made.items()}
    at_once = not _shards(made, shard_size)[1:]
    job = _job(view)
    load = dict.fromkeys(job.data_ranks, 0)
    writer_of: dict[str, int] = {}
    steps: list[_Rows | _Whole] = []

    def least_busy(piece: Piece) -> int:
        rank = job.ranks[0] if at_once else min(load, key=lambda rank: load[rank])
        load[rank] += sum(spec.nbytes for spec in piece.made.values())
        writer_of.update(dict.fromkeys(piece.made, rank))
        return rank

    # Experts with tensors of their own stay on their rank, then the others go to whoever has least.
    for piece in pieces:
        if piece.by_expert is None or piece.stacked or at_once:
            continue
        for rows in _rows_of(view, entries[piece.names[0]], piece):
            steps.append(rows)
            for expert in _experts(view, entries, rows):
                for key, _ in piece.by_expert[expert].values():
                    writer_of[key] = rows.destination
                    load[rows.destination] += piece.made[key].nbytes
    for piece in pieces:
        if piece.by_expert is None:
            steps.append(_Whole(piece, least_busy(piece)))
        elif piece.stacked or at_once:
            steps.extend(_rows_of(view, entries[piece.names[0]], piece, least_busy(piece)))
    shards_of = {rank: _shards({key: made[key] for key in made if writer_of[key] == rank}, shard_size) for rank in load}
    shards = [(rank, shard) for rank, of_rank in shards_of.items() for shard in of_rank]
    place = {key: at for of_rank in shards_of.values() for at, shard in enumerate(of_rank) for key in shard}
    steps.sort(key=lambda step: place[_first_key(view, entries, step)])  # a rank fills one file after the other
    names = [f"model{variant}.safetensors"]
    if len(shards) > 1:
        names = [f"model{variant}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    return _Plan(dict(zip(names, shards, strict=True)), steps)


def _rows_of(view: LogicalView, entry: Entry, piece: Piece, destination: int | None = None) -> Iterator[_Rows]:
    """Every expert once; without a destination each goes to a rank that has it, the EP groups in turn."""
    ep_sets = _job(view).ep_sets
    homes, step = entry.tensor.shape[0], rows_per_call(entry.tensor)
    for source in range(len(ep_sets[0])):
        for number, first in enumerate(range(0, homes, step)):
            own = ep_sets[(number + (entry.layer or 0)) % len(ep_sets)][source]
            to = own if destination is None else destination
            yield _Rows(piece, source, first, min(first + step, homes), to)


def _first_key(view: LogicalView, entries: Mapping[str, Entry], step: _Rows | _Whole) -> str:
    """The first tensor of the folder that a step adds to."""
    if isinstance(step, _Rows) and step.piece.by_expert is not None:
        return next(iter(step.piece.by_expert[_experts(view, entries, step)[0]].values()))[0]
    return next(iter(step.piece.made))


def _experts(view: LogicalView, entries: Mapping[str, Entry], rows: _Rows) -> list[int]:
    layer = entries[rows.piece.names[0]].layer
    assert view.balancer is not None and layer is not None
    return view.balancer.placement.homes_LRH[layer, rows.source, rows.first : rows.last].tolist()


def _shards(tensors: Mapping[str, TensorSpec], shard_size: int | str) -> list[dict[str, TensorSpec]]:
    """Cut into files by the library's own rule."""
    empty = {key: torch.empty(spec.shape, dtype=spec.dtype, device="meta") for key, spec in tensors.items()}
    split = split_torch_state_dict_into_shards(empty, max_shard_size=shard_size)
    return [{key: tensors[key] for key in keys} for keys in split.filename_to_tensors.values()]


# -- writing ---------------------------------------------------------------------------------------------------------


class _OwnFiles:
    """The files of this rank, each written as soon as it has all of its tensors."""

    def __init__(self, plan: _Plan, folder: Path) -> None:
        self._folder = folder
        self._tensors = {name: tensors for name, (rank, tensors) in plan.files.items() if rank == dist.get_rank()}
        self._file_of = {key: name for name, tensors in self._tensors.items() for key in tensors}
        self._arrived: dict[str, State] = {name: {} for name in self._tensors}
        self._missing = {name: sum(spec.nbytes for spec in tensors.values()) for name, tensors in self._tensors.items()}
        self._partial = {name: folder / PARTIALS.replace("*", secrets.token_hex(16)) for name in self._tensors}

    def write_whole(self, piece: Piece, values: State, convert: Convert) -> None:
        made = convert(values) if piece.convert else dict(zip(piece.made, values.values(), strict=True))
        for key, value in made.items():
            self._put(key, None, value)

    def write_experts(self, piece: Piece, rows: Tensor, experts: Sequence[int], convert: Convert) -> None:
        """``rows``: one for each of ``experts``."""
        assert piece.by_expert is not None
        for row, expert in enumerate(experts):
            state = {piece.names[0]: rows[row : row + 1]}
            for key, value in (convert(state) if piece.convert else state).items():
                self._put(*piece.by_expert[expert][key], value)

    def _put(self, key: str, row: int | None, value: Tensor) -> None:
        name = self._file_of[key]
        arrived, spec = self._arrived[name], self._tensors[name][key]
        if row is None:
            arrived[key] = value.cpu()
        else:
            arrived.setdefault(key, torch.empty(spec.shape, dtype=spec.dtype))[row : row + 1] = value
        self._missing[name] -= value.nbytes
        if not self._missing[name]:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_tensors(self._partial[name], self._arrived.pop(name))

    def publish(self) -> None:
        for name, partial in self._partial.items():
            partial.rename(self._folder / name)

    def discard(self) -> None:
        for partial in self._partial.values():
            partial.unlink(missing_ok=True)


def _write(
    view: LogicalView,
    entries: Mapping[str, Entry],
    convert: Convert,
    step: _Rows | _Whole,
    files: _OwnFiles,
    joint: JointAccess,
) -> None:
    """One step of the plan; collective where experts or slices travel."""
    assert view.balancer is not None
    piece = step.piece
    if isinstance(step, _Whole):
        values = {name: _whole(view, entries[name]) for name in piece.names}
        if dist.get_rank() == step.destination:
            joint.trying(lambda: files.write_whole(piece, values, convert))
        return
    (name,) = piece.names
    rows = view.balancer._bring_rows(entries[name].tensor, step.first, step.last, step.source, step.destination)
    if rows is not None:
        joint.trying(lambda: files.write_experts(piece, rows, _experts(view, entries, step), convert))


def _whole(view: LogicalView, entry: Entry) -> Tensor:
    tensor = entry.tensor.detach()
    if entry.layer is not None and view.balancer is not None:
        return view.balancer.gather_experts(entry.layer, tensor)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# -- the rest of the folder ------------------------------------------------------------------------------------------


def _renew_folder(view: LogicalView, folder: Path, variant: str | None, options: Mapping[str, Any]) -> None:
    """Configuration and the like by the library, which also clears old shards away; an old index goes first."""
    for name in (_index_name(variant), f"model.{variant}.safetensors" if variant else "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    type(view.model).save_pretrained(view.model, str(folder), state_dict={}, variant=variant, **options)  # type: ignore[attr-defined]


def _write_index(view: LogicalView, plan: _Plan, folder: Path, variant: str | None) -> None:
    unseen = [name for name in plan.files if not (folder / name).exists()]
    if unseen:
        raise CheckpointError(f"the first rank does not see {unseen[0]} in {folder}: give a folder that all ranks see")
    if len(plan.files) == 1:
        return
    sizes = [spec.nbytes for _, tensors in plan.files.values() for spec in tensors.values()]
    parameters = {id(entry.tensor): view.whole_size(entry).numel() for entry in view.entries("model")}
    own = {id(parameter) for parameter in view.parameters.values()}
    index = {
        "metadata": {
            "total_parameters": sum(number for key, number in parameters.items() if key in own),
            "total_size": sum(sizes),
        },
        "weight_map": {key: name for name, (_, tensors) in plan.files.items() for key in tensors},
    }
    write_file(folder / _index_name(variant), json.dumps(index, indent=2, sort_keys=True) + "\n")


def _index_name(variant: str | None) -> str:
    return f"model.safetensors.index.{variant}.json" if variant else "model.safetensors.index.json"
