"""State in logical order: what a model and its optimizer hold, whatever ranks and slots it stands on. In memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..balancer.balancer import Balancer
from ..distributed.consensus import gather_rows
from ..moe.experts.matching import MARK
from ..moe.experts.optimizer_state import is_per_expert
from ..moe.experts.slices import has_memory, keep_slices, local
from .optimizers import Given, as_one

logger = logging.getLogger("eplb_runtime")


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model or optimizer; one line that says why."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the training state.

    Args:
        part: ``"model"`` (parameters and persistent buffers), ``"optimizer"`` or ``"extra"`` (what was registered).
        name: the model's own (an extra tensor: ``<parameter>/<name>``).
        state: the optimizer's key, of optimizer state; else empty.
        tensor: the live tensor; of experts, this rank's rows ``[E/R, ...]``.
        layer: MoE layer index when its rows are experts that are spread over ranks, else None.
    """

    part: str
    name: str
    state: str
    tensor: Tensor
    layer: int | None

    @property
    def key(self) -> str:
        """What `logical_state_dict` calls it."""
        return f"{self.part}.{self.name}.{self.state}" if self.part == "optimizer" else f"{self.part}.{self.name}"


class LogicalView:
    """Names of everything in a model and its optimizer, and where the experts stand; it owns nothing.

    Args:
        model: attached or not; DistributedDataParallel and torch.compile around it are looked through.
        optimizer: one, or all of them; None: without optimizer state.

    Raises:
        CheckpointError: the optimizer holds a tensor that is no parameter of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Given = None) -> None:
        self.model, self.balancer = _unwrapped(model)
        if self.balancer is not None and self.balancer._runtime.host_dispatches:
            raise CheckpointError(
                "the framework keeps each expert in tensors of its own and saves them by logical expert: use its own "
                "checkpoints, and keep balancer.state_dict() with them"
            )
        self.optimizer = as_one(optimizer)
        stage = self.model.__dict__.get("_eplb_runtime_stage")
        if stage is not None and stage.host.saves_itself:
            raise CheckpointError(f"this model is saved and loaded in logical order by {stage.host.saves_itself}")
        self._prefix: str = stage.prefix if stage is not None else ""
        keep_slices(self.model)
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self._name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        for group in self.optimizer.param_groups if self.optimizer is not None else []:
            self.names_of(group)

    def layer_of(self, parameter: str) -> int | None:
        """MoE layer index of a spread expert parameter, else None."""
        return self.balancer.layer_of_parameter.get(self._prefix + parameter) if self.balancer is not None else None

    def entries(self, *parts: str) -> Iterator[Entry]:
        """Everything that is saved, loaded and compared, in an order that is equal on every rank.

        Args:
            parts: only these; none given: ``"model"``, ``"optimizer"``, ``"extra"``.
        """
        if not parts or "model" in parts:
            yield from self._model_entries()
        if not parts or "optimizer" in parts:
            yield from self._optimizer_entries()
        if (not parts or "extra" in parts) and self.balancer is not None:
            for name, (layer, tensor) in self.balancer._extra_tensors.items():
                if name.startswith(self._prefix):
                    yield Entry("extra", name.removeprefix(self._prefix), "", tensor, layer)

    def _model_entries(self) -> Iterator[Entry]:
        """By the names of ``model.state_dict()``; tied tensors under each of their names."""
        for name, tensor in self.model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor) and name.rpartition(".")[2] != MARK:
                yield Entry("model", name, "", tensor, self.layer_of(self._name_of.get(id(tensor), name)))

    def _optimizer_entries(self) -> Iterator[Entry]:
        for name in self.parameters:
            for key, value in sorted(self.optimizer_state(name).items(), key=lambda item: str(item[0])):
                if isinstance(value, Tensor):
                    yield Entry("optimizer", name, str(key), value, self.layer_of_state(name, str(key), value))

    def whole_size(self, entry: Entry) -> torch.Size:
        """Its size in the whole model: ``[E, ...]`` where this rank has some experts' rows or slices."""
        size = entry.tensor.size()
        return size if entry.layer is None else torch.Size([self.num_experts, *size[1:]])

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Names of the parameters in a param group."""
        try:
            return [self._name_of[id(parameter)] for parameter in group["params"]]
        except KeyError:
            raise CheckpointError(
                "the optimizer holds a tensor that is no parameter of this model: give the model that it trains"
            ) from None

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """What the optimizer keeps for a parameter; empty before its first step."""
        if self.optimizer is None:
            return {}
        return dict(self.optimizer.state.get(self.parameters[name], {}))

    def layer_of_state(self, name: str, key: str, value: Any) -> int | None:
        """MoE layer index when a state tensor's rows are spread experts, else None."""
        layer = self.layer_of(name)
        if layer is None or not isinstance(value, Tensor):
            return None
        return layer if is_per_expert(key, value, self.parameters[name]) else None

    def experts_here(self, layer: int) -> list[int]:
        """The logical expert of each of this rank's rows."""
        if self.balancer is None:
            raise ValueError("nothing is spread in a model that is not attached")
        return self.balancer._home_experts(layer)

    @property
    def num_experts(self) -> int:
        return self.balancer.placement.num_experts if self.balancer is not None else 0

    def refuse_freed(self, what: str, *, patient: bool = False, merged_too: bool = True) -> None:
        """Refuse state whose memory is freed, as jobs do between phases, or of a base with adapters merged into it, on
        all ranks before any of them waits for another. Collective when attached.

        Args:
            what: the call, by name.
            patient: wait as long as the host's process groups do: before a load ranks may come at very different times.
            merged_too: False: adapters alone are meant, which are what they are while they are merged.

        Raises:
            CheckpointError: some of it is freed or merged, here or on another rank.
            RuntimeError: a rank did not come within the timeout.
        """
        freed = self._freed() or (why_merged(self.model) if merged_too else "")
        freed = f"{what}: {freed}" if freed else ""
        if self.balancer is not None:
            if not patient:
                self.balancer._runtime.barrier(what)
            group, device = self.balancer._gradient_group, self.balancer._runtime.device
            here = torch.tensor([bool(freed)], dtype=torch.uint8, device=device)
            ranks = [dist.get_process_group_ranks(group)[n] for n in gather_rows(here, group).flatten().nonzero()]
            freed = freed or (
                f"{what}: state of rank {ranks[0]} is freed or merged; its own error says which" if ranks else ""
            )
        if freed:
            raise CheckpointError(freed)

    def _freed(self) -> str:
        """Name a tensor that has no memory now; empty: all have."""
        if self.balancer is not None:
            registry = self.balancer._runtime.registry
            if changed := next(filter(None, map(registry.why_freed, registry.layers)), ""):
                return changed
            if changed := self.balancer._why_freed():
                return changed
        freed = (entry.key for entry in self.entries() if not has_memory(entry.tensor))
        return next((f"{key}: its memory is freed: load it first" for key in freed), "")

    def weights_changed(self) -> None:
        """Tell the balancer that weights were written: replica slots must follow. Collective when attached."""
        if self.balancer is not None:
            self.balancer.weights_changed()


def why_merged(model: nn.Module) -> str:
    """Say why weights are not what their names say: adapters are added to them (PEFT's ``merged_adapters``), and stand
    beside them; empty: they are."""
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            return f"adapters are merged into {name}, and stand beside it: unmerge_adapter() first"
    return ""


def _unwrapped(model: nn.Module) -> tuple[nn.Module, Balancer | None]:
    for module in model.modules():
        balancer = module.__dict__.get("_eplb_runtime_balancer")
        if balancer is not None:
            return module, balancer
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model, None
        model = inner


@torch.no_grad()
def logical_state_dict(model: nn.Module, optimizer: Given = None) -> dict[str, Tensor]:
    """Every parameter, buffer and optimizer tensor, flat, on the CPU, equal on every rank. Collective when attached.

    Expert tensors are whole, ``[E, ...]`` in logical order, so runs with different placements (or with no balancer at
    all) can be compared entry by entry. Each rank holds all of it; the logger ``eplb_runtime`` says at INFO how much
    that is before it starts. For models that do not fit, see ``save``.

    Args:
        model: attached or not.
        optimizer: the one that was attached, or the list of them; None: without their state.

    Returns:
        ``{"model.<name>": tensor, "optimizer.<parameter>.<state>": tensor, "extra.<parameter>/<name>": tensor}``.
    """
    view = LogicalView(model, optimizer)
    view.refuse_freed("logical_state_dict", patient=True)
    entries = list(view.entries())
    _announce(view, entries)
    return {entry.key: whole_on_cpu(view, entry) for entry in entries}


def whole_on_cpu(view: LogicalView, entry: Entry) -> Tensor:
    """A copy of the whole tensor, experts in logical order; they come one at a time. Collective when attached."""
    if entry.layer is not None and view.balancer is not None:
        return view.balancer.gather_experts(entry.layer, entry.tensor, device="cpu")
    if isinstance(entry.tensor, DTensor):
        return entry.tensor.full_tensor().detach().cpu()
    return entry.tensor.detach().to("cpu", copy=True)


def _announce(view: LogicalView, entries: Sequence[Entry]) -> None:
    """Every rank will hold all of it: say so before a job runs out of memory over it."""
    sizes = [view.whole_size(entry).numel() * entry.tensor.element_size() for entry in entries]
    logger.info(
        "logical_state_dict: the whole state is %.4g GiB on the CPU of every rank (%d tensors)",
        sum(sizes) / 2**30,
        len(sizes),
    )


@torch.no_grad()
def load_logical_state_dict(model: nn.Module, optimizer: Given, state: Mapping[str, Tensor]) -> None:
    """Take what ``logical_state_dict`` gave: each rank its own experts' rows. Between steps; collective when attached.

    Optimizer state that does not exist yet is made, with the saved dtype; what exists for a parameter without an entry
    goes. Options of param groups are not in ``state`` and stay.

    Args:
        model: attached or not.
        optimizer: one, or the list of them; None: their entries are ignored.
        state: the same on every rank.

    Raises:
        CheckpointError: an entry is missing, has no place in the model, or another shape; nothing is changed then.
    """
    view = LogicalView(model, optimizer)
    view.refuse_freed("load_logical_state_dict", patient=True)
    copies: list[tuple[Tensor, Tensor]] = []
    unused = set(state)

    def take(key: str, tensor: Tensor, layer: int | None) -> None:
        unused.discard(key)
        if key not in state:
            raise CheckpointError(f"{key} is not in the state: it was made from another model")
        copies.append((local(tensor), local_part(view, state[key], tensor, layer, key)))

    for entry in view.entries("model", "extra"):
        take(entry.key, entry.tensor, entry.layer)
    states: dict[str, dict[str, Tensor]] = {name: {} for name in view.parameters}
    for key in sorted(unused):
        if key.startswith("optimizer."):
            unused.discard(key)
            name, state_key = split_key(view, key.removeprefix("optimizer."))
            states[name][state_key] = state[key]
    if unused:
        raise CheckpointError(f"{min(unused)} has no place in this model")
    new_states = {} if view.optimizer is None else {name: _local_states(view, name, states[name]) for name in states}
    for live, value in copies:
        live.copy_(value)
    for name, values in new_states.items():
        set_optimizer_state(view, name, values)
    view.weights_changed()


def local_part(view: LogicalView, whole: Tensor, live: Tensor, layer: int | None, key: str) -> Tensor:
    """What of a whole tensor belongs into ``live`` on this rank."""
    wanted = live.shape if layer is None else torch.Size([view.num_experts, *live.shape[1:]])
    if whole.shape != wanted:
        raise CheckpointError(f"{key} has shape {tuple(whole.shape)}; this model has {tuple(wanted)}")
    return part_here(whole if layer is None else whole[view.experts_here(layer)], live)


def part_here(whole: Tensor, live: Tensor) -> Tensor:
    """What of a tensor of ``live``'s shape is on this rank: all of it, or its shard."""
    if not isinstance(live, DTensor):
        return whole
    return local(distribute_tensor(whole.to(live.device), live.device_mesh, live.placements, src_data_rank=None))


def split_key(view: LogicalView, key: str) -> tuple[str, str]:
    """``<parameter>.<state>`` in two; state keys may have dots, so the longest parameter name counts."""
    names = [name for name in view.parameters if key.startswith(name + ".")]
    if not names:
        raise CheckpointError(f"optimizer.{key} belongs to no parameter of this model")
    name = max(names, key=len)
    return name, key[len(name) + 1 :]


def _local_states(view: LogicalView, name: str, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    states = {}
    for key, value in whole.items():
        live = new_state_tensor(view, name, key, value.shape, value.dtype)
        layer = view.layer_of_state(name, key, live)
        local(live).copy_(local_part(view, value, live, layer, f"optimizer.{name}.{key}"))
        states[key] = live
    return states


def is_expert_state(view: LogicalView, name: str, size: torch.Size) -> bool:
    """Whether a saved state tensor of this size has the experts of a spread parameter as its rows."""
    spread = view.layer_of(name) is not None
    return spread and len(size) == view.parameters[name].ndim and size[0] == view.num_experts


def new_state_tensor(
    view: LogicalView, name: str, key: str, size: torch.Size, dtype: torch.dtype, reuse: bool = False
) -> Tensor:
    """An empty tensor for an optimizer entry whose whole size is ``size``: local rows of experts, on its device.

    Args:
        reuse: give the live one if it is like that.
    """
    parameter = view.parameters[name]
    if is_expert_state(view, name, size):
        size = torch.Size([parameter.shape[0], *size[1:]])
    old = view.optimizer_state(name).get(key)
    if reuse and isinstance(old, Tensor) and (old.shape, old.dtype) == (size, dtype):
        return old
    if isinstance(parameter, DTensor) and size == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=dtype)
    device = old.device if isinstance(old, Tensor) else _device_of_state(view, parameter, key)
    return torch.empty(size, dtype=dtype, device=device)


def _device_of_state(view: LogicalView, parameter: Tensor, key: str) -> torch.device:
    """Where torch.optim keeps it: with the parameter, but for the step count of optimizers that run on the host."""
    assert view.optimizer is not None
    group = next((g for g in view.optimizer.param_groups if any(p is parameter for p in g["params"])), {})
    if key == "step" and not group.get("capturable") and not group.get("fused"):
        return torch.device("cpu")
    return parameter.device


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


def set_optimizer_state(view: LogicalView, name: str, values: Mapping[str, Any]) -> None:
    """Replace a parameter's state; tensors that fit are written in place (CUDA graphs hold them)."""
    assert view.optimizer is not None
    parameter = view.parameters[name]
    old = view.optimizer_state(name)
    if not old and not values:
        return
    new: dict[str, Any] = {}
    for key, value in values.items():
        before = old.get(key)
        if before is not value and isinstance(before, Tensor) and isinstance(value, Tensor) and _alike(before, value):
            value = before.copy_(value)
        new[key] = value
    view.optimizer.state[parameter] = new
