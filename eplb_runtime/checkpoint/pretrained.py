"""A framework's own checkpoint folders (``save_pretrained``, ``from_pretrained``), by the attached host's contract."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from .state import CheckpointError, LogicalView
from .weights import Stored


class PretrainedFolders(Protocol):
    """A framework's own checkpoint folders, for an attached model. Collective."""

    def write(self, view: LogicalView, folder: Path, **options: Any) -> None:
        """Write the whole model in logical order."""

    def read(self, view: LogicalView, folder: Path) -> None:
        """Read weights into the live tensors, each rank its own experts."""

    def names(self, view: LogicalView) -> Mapping[str, Stored]:
        """How the folders store tensors, by the model's names, where they store parts of them. Not collective."""

    def describe(self, view: LogicalView, folder: Path) -> None:
        """Write the configuration that the framework reads a folder with. Not collective."""


def export_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, a piece at a time. Collective, between steps.

    A model that is larger than a shard is written by all ranks, each its own experts, in shards of its own; a smaller
    one is one file, written by rank 0. Beside its model a rank needs the memory of one expert and of one dense tensor,
    and on the host that of its shards, as far as they are not its own live memory. Files get their names when all of
    them are whole, the index last.

    Args:
        model: attached.
        folder: one that all ranks see.
        options: of the library's ``save_pretrained``: ``max_shard_size`` (here ``"5GB"`` unless given), ``variant``,
            ``save_original_format``; not what uploads or writes something else.

    Raises:
        CheckpointError: the model is not attached, its framework has no such folders, the library's own names for its
            weights cannot be given a tensor at a time, or another rank failed.
        OSError: this rank could not write; what was in the folder stays, or does not load.
    """
    view = LogicalView(model)
    view.refuse_freed("export_pretrained")
    _folders(view, "save_pretrained").write(view, Path(folder), **options)


def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Read a folder that ``from_pretrained`` reads (safetensors); each rank its own experts. Between steps.

    Collective (replica slots follow). Weights are cast to the model's dtype; optimizer state stays.

    Args:
        model: attached.
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: the model is not attached, there is no safetensors file, weights are missing or have another
            shape, or experts are stored in a way that cannot be read by expert; nothing is changed then.
    """
    view = LogicalView(model)
    view.refuse_freed("load_pretrained", patient=True)
    _folders(view, "from_pretrained").read(view, Path(folder))


def folders_of(view: LogicalView) -> PretrainedFolders | None:
    """The folders of the attached host's framework; None: it has none, or the model is not attached."""
    stage = view.model.__dict__.get("_eplb_runtime_stage")
    return stage.host.folders if stage is not None else None


def _folders(view: LogicalView, by_library: str) -> PretrainedFolders:
    if view.balancer is None:
        raise CheckpointError(f"the model is not attached: use the library's own {by_library}")
    if (folders := folders_of(view)) is None:
        raise CheckpointError("this framework has no checkpoint folders of its own: use checkpoint.save and load")
    return folders
