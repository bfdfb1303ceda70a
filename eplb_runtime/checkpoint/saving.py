"""Save and load: in our own format unless another is asked for, and whatever a folder has is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn

from ..utils.errors import one_line
from . import dcp, disk
from .disk import MARKER, Named
from .restore import Fitted, PretrainedFolders, Saved, folders_of, numbers_of, restore_placement, to_json
from .state import CheckpointError, Given, JointAccess, LogicalView

logger = logging.getLogger("eplb_runtime")

Format = Literal["safetensors", "dcp"]
Result = TypeVar("Result")


def save(folder: str | Path, model: nn.Module, optimizer: Given = None, *, format: Format = "safetensors") -> None:
    """Write a checkpoint in logical order; each rank its own experts. Collective, between steps.

    On top of its state a rank needs the memory of one expert's tensor. A checkpoint that is in the folder already is
    replaced in one step when the new one is whole.

    Args:
        folder: one that all ranks see.
        format: ``"safetensors"``: one tensor per expert, Hugging Face's index, and ``checkpoint.json`` with checksums
            of all bytes, which is written last; ``"dcp"``: torch.distributed.checkpoint's, into a new folder, without
            checksums, with a pickle as metadata. (Other storage than a file system: `LogicalState`.)

    Raises:
        CheckpointError: something cannot be kept in this format, or another rank failed; the folder is as it was.
        OSError: this rank could not write; likewise.
    """
    view = LogicalView(model, optimizer)
    if _is_dcp(format):
        dcp.save(folder, view)
    else:
        _ended(_saving(view))
        view.refuse_freed("save")
        access = JointAccess.of(view)
        _write(Path(folder), view, access, *access.together(f"{folder} was not saved", lambda: _content(view, access)))
    _log("saved to", folder, view)


def async_save(
    folder: str | Path, model: nn.Module, optimizer: Given = None, *, format: Format = "safetensors"
) -> Future[Any]:
    """Copy what this rank writes (see ``save``) to the CPU, and write it in the background while training goes on.

    The background thread talks over a group of the balancer's own, so that it cannot meet training's collectives.
    Whatever saves or loads this model next waits for it.

    Returns:
        A future that is done when the checkpoint is whole on disk; its ``result()`` raises what went wrong.
    """
    view = LogicalView(model, optimizer)
    if _is_dcp(format):
        return dcp.async_save(folder, view)
    view.refuse_freed("async_save")
    before = _saving(view)
    if view.balancer is None:
        _ended(before)  # its thread talks over the same group
    access = JointAccess.of(view)
    live, numbers = access.together(f"{folder} was not saved", lambda: _content(view, access))
    tensors = [(part, name, value.to("cpu", copy=True)) for part, name, value in live]
    if view.balancer is not None:
        access = JointAccess(view.balancer.runtime.groups.background, torch.device("cpu"))

    def write() -> None:
        _ended(before)
        _write(Path(folder), view, access, tensors, numbers)

    worker = ThreadPoolExecutor(1, thread_name_prefix="eplb_runtime save")
    saving = worker.submit(write)
    worker.shutdown(wait=False)
    object.__setattr__(view.model, "_eplb_runtime_saving", saving)
    return saving


@torch.no_grad()
def load(
    folder: str | Path, model: nn.Module, optimizer: Given = None, *, key: str = "", warm_start: bool = True
) -> None:
    """Read a checkpoint, whatever placement, EP size or balancer it was saved with. Collective, between steps.

    Each rank reads its own experts, straight into the live tensors. Optimizer state is made where there is none yet,
    with the saved dtype. Names, shapes and options are checked before anything is written, and in our own format every
    byte. With DCP's a damaged file can leave a mixture, and a folder from someone else can run their code.

    Args:
        folder: what ``save``, ``async_save`` or plain DCP wrote.
        model: attached or not.
        optimizer: one, or the list of them; None: their entries are not read.
        key: under which the state was saved with DCP, when it was one of several (``{"app": LogicalState(...)}``).
        warm_start: migrate to the saved placement where EP size and slots are the same, else to one that is planned for
            the load that was saved with it, if any.

    Raises:
        CheckpointError: it is damaged, entries are missing, have no place in the model, or have other shapes; nothing
            is changed then.
    """
    view = LogicalView(model, optimizer)
    view.refuse_freed("load", patient=True)
    _ended(_saving(view))
    access, path = JointAccess.of(view), Path(folder)
    unchanged = f"{folder} was not loaded, nothing is changed"
    opens: Callable[[], Saved] = lambda: dcp.FolderOfDCP(folder, view, key)  # noqa: E731
    if access.folder_has(path / MARKER):
        if key:
            raise CheckpointError(f"{folder} has no keys, as DCP's checkpoints may have: leave out key={key!r}")
        marker = access.together(unchanged, lambda: disk.verified(path, access.number, access.size))
        opens = lambda: disk.Folder(path, marker)  # noqa: E731
    saved = access.together(unchanged, lambda: _usable(folder, opens))
    fitted = access.together(unchanged, lambda: _usable(folder, lambda: Fitted(view, saved)))
    restore_placement(view, saved.balancer, warm_start)
    access.together(f"{folder} was not loaded, the model is a mixture now", fitted.write)
    view.weights_changed()
    _log("loaded from", folder, view)


def _usable(folder: str | Path, action: Callable[[], Result]) -> Result:
    """Return the result of reading fields of a checkpoint, which may be anything."""
    try:
        return action()
    except CheckpointError:
        raise
    except (OSError, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise CheckpointError(f"{folder} cannot be used: {one_line(error, with_type=True)}") from error


# -- writing our own format ------------------------------------------------------------------------------------------


def _content(view: LogicalView, access: JointAccess) -> tuple[Iterable[Named], str]:
    """The tensors that this rank writes; and, on the first rank of a stage, what is no tensor, as JSON."""
    balancer = view.balancer.state_dict() if view.balancer is not None else None  # first: all ranks meet in it
    ranks = view.balancer.runtime.job.data_ranks if view.balancer is not None else access.ranks
    layout, tied = disk.layout_of(view)
    numbers = {
        "layout": {key: asdict(stored) for key, stored in layout.items() if stored.names != (key.partition(".")[2],)},
        "tied": tied,
        "optimizer": numbers_of(view, to_json),
        "balancer": balancer,
    }
    text = json.dumps(numbers)
    return disk.tensors_of_rank(view, layout, ranks), text if access.ranks[access.number] == ranks[0] else ""


@torch.no_grad()
def _write(folder: Path, view: LogicalView, access: JointAccess, tensors: Iterable[Named], numbers: str) -> None:
    problem = f"{folder} was not saved"
    token = access.new_token()
    try:
        files = access.together(
            problem, lambda: disk.seals_of(folder, disk.write_tensors(folder, access.number, token, tensors))
        )
        of_ranks = [json.loads(text) for text in access.gather_bytes(json.dumps(files).encode())]
        stages = [json.loads(text) for text in access.gather_bytes(numbers.encode()) if text]
    except BaseException:
        disk.remove_own(folder, access.number, token)
        raise
    folders = folders_of(view)
    access.on_first(
        problem,
        lambda: disk.publish(
            folder,
            token,
            {name: tuple(known) for one in of_ranks for name, known in one.items()},
            {
                "layout": {key: stored for stage in stages for key, stored in stage["layout"].items()},
                "tied": {key: other for stage in stages for key, other in stage["tied"].items()},
                "optimizers": [stage["optimizer"] for stage in stages if stage["optimizer"] is not None],
                "balancer": stages[0]["balancer"],
            },
            lambda: None if folders is None else folders.describe(view, folder),
        ),
    )


def _saving(view: LogicalView) -> Future[None] | None:
    """The last `async_save` of this model: a folder has one writer and no reader meanwhile."""
    return view.model.__dict__.get("_eplb_runtime_saving")


def _ended(saving: Future[None] | None) -> None:
    if saving is not None:
        with suppress(Exception):  # its own caller hears of it
            saving.result()


def _log(what: str, folder: str | Path, view: LogicalView) -> None:
    """A line on the first rank; that experts were placed again is a line of the balancer's."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    step = "" if view.balancer is None else f", step {view.balancer.rebalancer.step} of the balancer"
    logger.info("checkpoint %s %s%s", what, folder, step)


def _is_dcp(name: str) -> bool:
    if name not in ("safetensors", "dcp"):
        raise CheckpointError(f"format={name!r} is unknown; choose one of: safetensors, dcp")
    return name == "dcp"


# -- folders of the host's framework -----------------------------------------------------------------------------------


def export_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, a piece at a time. Collective, between steps.

    The first rank writes it. On top of its model a rank needs the memory of a bucket (64 MiB) or one tensor, the first
    one on the host that of a shard. Files get their names when all are whole, the index last.

    Args:
        folder: of the first rank.
        options: of the library's ``save_pretrained``: ``max_shard_size`` (here ``"5GB"`` unless given), ``variant``,
            ``save_original_format``; not what uploads or writes something else.

    Raises:
        CheckpointError: there are no such folders for this model, or another rank failed.
        OSError: this rank could not write; what was in the folder stays, or does not load.
    """
    view = LogicalView(model)
    view.refuse_freed("export_pretrained")
    _folders(view, "save_pretrained").write(view, Path(folder), **options)


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Read a folder that ``from_pretrained`` reads (safetensors); each rank its own experts. Collective, between steps.

    Weights are cast to the model's dtype; optimizer state stays.

    Args:
        folder: with ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there is no such folder for this model, weights are missing or have another shape, or cannot be
            read by expert; nothing is changed then.
    """
    view = LogicalView(model)
    view.refuse_freed("load_pretrained", patient=True)
    folders, access, what = _folders(view, "from_pretrained"), JointAccess.of(view), f"{folder} was not loaded whole"
    fitted = access.together(what, lambda: Fitted(view, folders.opened(view, Path(folder)), "model"))
    access.together(what, fitted.write)
    view.weights_changed()


def _folders(view: LogicalView, by_library: str) -> PretrainedFolders:
    if view.balancer is None:
        raise CheckpointError(f"the model is not attached: use the library's own {by_library}")
    if (folders := folders_of(view)) is None:
        raise CheckpointError("this framework has no checkpoint folders of its own: use checkpoint.save and load")
    return folders
