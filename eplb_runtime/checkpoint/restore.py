"""Put a checkpoint into a model: the same checks and the same order for files of ours, of DCP, of a framework, and for
state in memory."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..utils.text import one_line
from . import dcp, disk
from .state import CheckpointError, Given, JointAccess, LogicalView, Saved, TensorSpec, stretch, warn_of_left_out


@torch.no_grad()
def load(folder: str | Path, model: nn.Module, optimizer: Given = None, *, warm_start: bool = True) -> None:
    """Read what `save`, `async_save` or plain DCP wrote, whatever placement, EP size or balancer it was saved with.
    Collective, between steps. Waits for an `async_save` of this model first. Each rank reads its own experts, straight
    into the live tensors; then replicas are refreshed. Optimizer state is made where there is none yet, with the saved
    dtype; with ``optimizer=None`` it is not read. Names, shapes and options are checked before anything is written, and
    in our own format every byte. With DCP's a damaged file can leave a mixture, and a folder from someone else can run
    their code. ``warm_start``: migrate to the saved placement where EP size and slots are the same, and go on from the
    load that was saved with it. Rank 0 logs a line.
    Raises CheckpointError: it is damaged, entries are missing, have no place in the model, or have other shapes;
    nothing is changed then."""
    view = LogicalView(model, optimizer)
    view.refuse_freed("load", patient=True)
    disk.wait_for_last_save(view)
    access, path = JointAccess.of(view), Path(folder)
    ours = access.folder_has(path / disk.MARKER)

    def opened() -> tuple[Saved, Callable[[], None]]:
        try:
            saved = disk.opened(path, access) if ours else dcp.FolderOfDCP(path, view)
            return saved, fitted(view, saved)
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{folder} cannot be used: {one_line(error, with_type=True)}") from error

    saved, write = access.together(f"{folder} was not loaded, nothing is changed", opened)
    if warm_start:
        view.restore_placement(saved.balancer)
    access.together(f"{folder} was not loaded, the model is a mixture now", write)
    view.weights_changed()
    disk.log("loaded from", folder, disk.step_of(view))


@torch.no_grad()
def load_logical_state_dict(model: nn.Module, optimizer: Given, state: Mapping[str, Tensor]) -> None:
    """Copy what `logical_state_dict` gave, the same on every rank, into the model and optimizer: each rank copies its
    own experts' rows; then replicas are refreshed. Between steps; collective when attached. Optimizer state that does
    not exist yet is made, with the saved dtype; state of a parameter without an entry is removed. Options of param
    groups are not in ``state`` and stay; with ``optimizer=None`` all optimizer state stays.
    Raises CheckpointError, with nothing changed: an entry is missing, has no place in the model, or another shape."""
    view = LogicalView(model, optimizer)
    view.refuse_freed("load_logical_state_dict", patient=True)
    fitted(view, _InMemory(state))()
    view.weights_changed()


class _InMemory(Saved):
    """What `logical_state_dict` gave."""

    name, param_groups = "the state", ()

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state
        self.tensors = {key: TensorSpec.of(tensor) for key, tensor in state.items()}

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        block.copy_(self._state[key][stretch(offsets, block)])


# -- folders of the host's framework -----------------------------------------------------------------------------------


def export_pretrained(model: nn.Module, folder: str | Path, **options: Any) -> None:
    """Write what ``save_pretrained`` of the whole model would, a piece at a time, from the first rank. Collective,
    between steps. On top of its model a rank needs the memory of a bucket (64 MiB) or one tensor, and the first one on
    the host that of a shard. Files get their names when all are whole, the index last. ``options``: of the library's
    ``save_pretrained``: ``max_shard_size`` (here ``"5GB"`` unless given), ``save_original_format``; not what uploads,
    renames or writes something else.
    Raises CheckpointError: there are no such folders for this model, or another rank failed; OSError: this rank could
    not write. The folder is as it was then, or can no longer be loaded."""
    view = LogicalView(model)
    view.refuse_freed("export_pretrained")
    _folders(view, "save_pretrained").write(view, Path(folder), **options)


@torch.no_grad()
def load_pretrained(model: nn.Module, folder: str | Path) -> None:
    """Read a ``from_pretrained`` folder (``model.safetensors``, or an index) into the model, each rank its experts, and
    refresh replicas. Collective, between steps. Weights are cast to the model's dtype; optimizer state stays.
    Raises CheckpointError: there is no such folder for this model, weights are missing or have another shape, or the
    library does more to them than rename and cut; nothing is changed then."""
    view = LogicalView(model)
    view.refuse_freed("load_pretrained", patient=True)
    folders, access, what = _folders(view, "from_pretrained"), JointAccess.of(view), f"{folder} was not loaded whole"
    access.together(what, access.together(what, lambda: fitted(view, folders.opened(view, Path(folder)), "model")))
    view.weights_changed()


def _folders(view: LogicalView, by_library: str) -> ModuleType:
    if view.balancer is None:
        raise CheckpointError(f"the model is not attached: use the library's own {by_library}")
    if view.folders is None:
        raise CheckpointError("this framework has no checkpoint folders of its own: use checkpoint.save and load")
    return view.folders


# -- what fits ---------------------------------------------------------------------------------------------------------


def fitted(view: LogicalView, saved: Saved, *parts: str) -> Callable[[], None]:
    """Check that a checkpoint fits; return a function that writes its ``parts`` (``"model"``, ``"extra"``; none: both)
    and, if the view has optimizers, their options and state (none saved: removed), but refreshes no replicas. That is
    collective where reading is. CheckpointError: an entry is missing, has no place or another shape, or options do not
    fit. Left out: other stages' entries and, with a warning, extras not registered and state no optimizer here has."""
    parts = parts or ("model", "extra")
    known = {entry.key: entry for entry in view.entries(*parts)}
    if missing := next((key for key in known if key not in saved.tensors), ""):
        raise CheckpointError(f"{saved.name} has no {missing}: it was saved from another model")
    if not view.in_stages:
        if unknown := sorted(key for key in saved.tensors.keys() - known.keys() if key.startswith("model.")):
            raise CheckpointError(f"{unknown[0]} in {saved.name} has no place in the model ({len(unknown)} such)")
        left = {key.removeprefix("extra.") for key in saved.tensors.keys() - known.keys() if key.startswith("extra.")}
        warn_of_left_out("%s in the checkpoint is not loaded: call balancer.register for it before the load", left)
    states = _states(view, saved) if view.optimizers else {}
    of_states = [entry for name, state in states.items() for entry in view.state_entries(name, state)]
    for entry in (*known.values(), *of_states):
        size, shape = view.spec_of(entry).shape, tuple(saved.tensors[entry.key].shape)
        if shape != size:
            raise CheckpointError(f"{entry.key} has shape {shape} in {saved.name}, {size} in the model")
    options = view.options_of(saved.param_groups or ()) if view.optimizers else []

    def write() -> None:
        saved.fill(view, [*view.entries(*parts), *of_states])
        for name, values in states.items():
            view.set_optimizer_state(name, values)
        view.set_options(options)

    return write


def _states(view: LogicalView, saved: Saved) -> dict[str, dict[str, Any]]:
    """The optimizer state to be of each parameter, with the tensors that it is read to."""
    if saved.param_groups is None:
        raise CheckpointError(f"{saved.name} has no optimizer: load it with optimizer=None")
    states: dict[str, dict[str, Any]] = {name: {} for group in view.param_groups for name in view.names_of(group)}
    left: set[str] = set()
    tensors = {key.removeprefix("optimizer."): of for key, of in saved.tensors.items() if key.startswith("optimizer.")}
    for own, value in sorted({**saved.numbers, **tensors}.items()):
        name = own
        while name and name not in view.parameters:  # state keys may have dots, so the longest parameter name counts
            name = name.rpartition(".")[0]
        state = own[len(name) + 1 :]
        if name in states:
            states[name][state] = _state_tensor(view, name, state, value) if isinstance(value, TensorSpec) else value
        elif name:
            left.add(name)
        elif not view.in_stages:
            raise CheckpointError(f"{saved.name} has optimizer state {own}, which is of no parameter of the model")
    warn_of_left_out("give the optimizer of %s, too: the checkpoint has its state, and it is left out", left)
    return states


def _state_tensor(view: LogicalView, name: str, key: str, saved: TensorSpec) -> Tensor:
    """Where an entry of optimizer state is read to: the live tensor, whose shape is compared later, or a new one."""
    parameter, size = view.parameters[name], torch.Size(saved.shape)
    if view.layer_of(name) is not None and len(size) == parameter.ndim and size[0] == view.num_experts:
        size = torch.Size([parameter.shape[0], *size[1:]])
    old = view.optimizer_state(name).get(key)
    if isinstance(old, Tensor) and (old.shape != size or old.dtype == saved.dtype):
        return old
    if isinstance(parameter, DTensor) and size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=saved.dtype)
    device = old.device if isinstance(old, Tensor) else parameter.device
    if key == "step" and not isinstance(old, Tensor):
        # torch.optim keeps it on the host, but for optimizers that run on the device.
        group = next((g for g in view.param_groups if any(p is parameter for p in g["params"])), {})
        device = device if group.get("capturable") or group.get("fused") else torch.device("cpu")
    return torch.empty(size, dtype=saved.dtype, device=device)
