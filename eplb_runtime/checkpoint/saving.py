"""Save and load: in our own format unless another is asked for, and whatever a folder has is read."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn

from . import dcp
from . import folder as own
from .disk import MARKER
from .joint_access import JointAccess
from .optimizers import Given
from .state import CheckpointError, LogicalView

logger = logging.getLogger("eplb_runtime")

Format = Literal["safetensors", "dcp"]


def save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Given = None,
    *,
    format: Format = "safetensors",
    storage_writer: torch_dcp.StorageWriter | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Write a checkpoint in logical order; each rank its own experts. Collective, between steps.

    Beside its state a rank needs the memory of one expert's tensor. A checkpoint that is in the folder already is
    replaced in one step when the new one is whole.

    Args:
        folder: one that all ranks see.
        format: ``"safetensors"``: files of each rank with one tensor per expert, an index as Hugging Face's, and
            ``checkpoint.json`` with checksums of all bytes, which is written last; ``"dcp"``:
            torch.distributed.checkpoint's, which plain DCP reads. Its ``.metadata`` is a pickle: load such folders only
            from people you trust. It has no checksums and needs a new folder.
        storage_writer: of DCP, for storage other than a file system.
        process_group: of the ranks that save a model that is not attached; None: all.

    Raises:
        CheckpointError: something cannot be kept in this format, or another rank failed; the folder is as it was.
        OSError: this rank could not write; likewise.
    """
    view = LogicalView(model, optimizer)
    if _format(format) == "dcp" or storage_writer is not None:
        dcp.save(folder, view, storage_writer, process_group)
    else:
        own.save(Path(folder), view, process_group)
    _log("saved to", folder, view)


def async_save(
    folder: str | Path,
    model: nn.Module,
    optimizer: Given = None,
    *,
    format: Format = "safetensors",
    storage_writer: torch_dcp.StorageWriter | None = None,
) -> Future[Any]:
    """As ``save``, but writes in the background: when it returns, the state is copied, and training may go on.

    The copy is on the CPU: this rank's experts and its share of the rest, with optimizer state. A commit that comes
    while it is made waits, as the next step does; later ones touch only the live tensors. The background thread talks
    over a group of the balancer's own, so that it cannot meet training's collectives. Whatever saves or loads this
    model next waits for it.

    Returns:
        A future that is done when the checkpoint is whole on disk; its ``result()`` raises what went wrong.
    """
    view = LogicalView(model, optimizer)
    if _format(format) == "dcp" or storage_writer is not None:
        return dcp.async_save(folder, view, storage_writer)
    return own.async_save(Path(folder), view)


def load(
    folder: str | Path,
    model: nn.Module,
    optimizer: Given = None,
    *,
    key: str = "",
    warm_start: bool = True,
    storage_reader: torch_dcp.StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Read a checkpoint, whatever placement, EP size or balancer it was saved with. Collective, between steps.

    Each rank reads its own experts, straight into the live tensors. Optimizer state is made where there is none yet,
    with the saved dtype. Names, shapes and options are checked before anything is written; in our own format, so is
    every byte (each rank reads its share for that). With DCP's format a damaged file can leave a mixture, and a folder
    from someone else can run their code: it holds a pickle.

    Args:
        folder: what ``save``, ``async_save`` or plain DCP wrote.
        model: attached or not.
        optimizer: one, or the list of them; None: their entries are not read.
        key: under which the state was saved with DCP, when it was one of several (``{"app": LogicalState(...)}``).
        warm_start: migrate to the saved placement when EP size and slots are the same, else to one that is made for the
            load that was saved with it; where there is none, say so in the log.
        storage_reader: of DCP, for storage other than a file system.
        process_group: of the ranks that load a model that is not attached; None: all.

    Raises:
        CheckpointError: it is damaged, entries are missing, have no place in the model, or have other shapes; nothing
            is changed then.
    """
    view = LogicalView(model, optimizer)
    view.refuse_freed("load", patient=True)
    own.wait_for_saving(view)
    if storage_reader is None and JointAccess.of(view, process_group).folder_has(Path(folder) / MARKER):
        if key:
            raise CheckpointError(f"{folder} has no keys, as DCP's checkpoints may have: leave out key={key!r}")
        own.load(Path(folder), view, warm_start=warm_start, process_group=process_group)
    else:
        dcp.load(
            folder,
            view,
            key=key,
            warm_start=warm_start,
            storage_reader=storage_reader,
            process_group=process_group,
        )
    _log("loaded from", folder, view)


def _log(what: str, folder: str | Path, view: LogicalView) -> None:
    """A line on the first rank; that experts were placed anew is a line of the balancer's."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    step = "" if view.balancer is None else f", step {view.balancer._progress().step} of the balancer"
    logger.info("checkpoint %s %s%s", what, folder, step)


def _format(name: str) -> str:
    if name not in ("safetensors", "dcp"):
        raise CheckpointError(f"format={name!r} is unknown; choose one of: safetensors, dcp")
    return name
