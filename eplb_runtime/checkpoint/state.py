"""State in logical order: what a model and its optimizer hold, on any ranks and slots; and how ranks agree on it."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..balancer.balancer import Balancer
from ..distributed.consensus import barrier, gather_json
from ..moe.experts.optimizer_state import is_per_expert
from ..moe.experts.registry import MARK
from ..moe.experts.slices import columns, has_memory, keep_slices, local
from ..placement import PlacementError

logger = logging.getLogger("eplb_runtime")

Result = TypeVar("Result")
Given = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model or optimizer; one line that says why."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


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
        """Its name in `logical_state_dict`."""
        return f"{self.part}.{self.name}.{self.state}" if self.part == "optimizer" else f"{self.part}.{self.name}"


class LogicalView:
    """Names of everything in a model and its optimizer, and where the experts are; it owns nothing.

    Args:
        model: attached or not; DistributedDataParallel and torch.compile around it are looked through.
        optimizer: one, or all of them; None: without optimizer state.

    Raises:
        CheckpointError: the optimizer holds a tensor that is no parameter of the model.
    """

    def __init__(self, model: nn.Module, optimizer: Given = None) -> None:
        self.model, self.balancer = _unwrapped(model)
        if self.balancer is not None and self.balancer.runtime.host_dispatches:
            raise CheckpointError(
                "the framework keeps each expert in tensors of its own and saves them by logical expert: use its own "
                "checkpoints, and keep balancer.state_dict() with them"
            )
        given = [] if optimizer is None else optimizer
        self.optimizers = list(given) if isinstance(given, Sequence) else [given]
        stage = self.model.__dict__.get("_eplb_runtime_stage")
        if stage is not None and stage.host.saves_itself:
            raise CheckpointError(f"this model is saved and loaded in logical order by {stage.host.saves_itself}")
        self.folders: ModuleType | None = stage.host.folders if stage is not None else None
        self._prefix: str = stage.prefix if stage is not None else ""
        keep_slices(self.model)
        self.parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self._name_of = {id(parameter): name for name, parameter in self.parameters.items()}
        # The optimizer and not its state, which load_state_dict replaces.
        self._optimizer_of = {
            name: one for one in self.optimizers for group in one.param_groups for name in self.names_of(group)
        }

    def entries(self, *parts: str) -> Iterator[Entry]:
        """Everything that is saved, loaded and compared, in an order that is equal on every rank; ``parts``: only
        these of ``"model"``, ``"optimizer"``, ``"extra"``."""
        if not parts or "model" in parts:  # by the names of state_dict(): tied tensors under each of their names
            for name, tensor in self.model.state_dict(keep_vars=True).items():
                if isinstance(tensor, Tensor) and name.rpartition(".")[2] != MARK:
                    yield Entry("model", name, "", tensor, self.layer_of(self._name_of.get(id(tensor), name)))
        if not parts or "optimizer" in parts:
            for name in self.parameters:
                yield from self.state_entries(name, self.optimizer_state(name))
        if (not parts or "extra" in parts) and self.balancer is not None:
            for name, (layer, tensor) in self.balancer.tensors.registered.items():
                if name.startswith(self._prefix):
                    yield Entry("extra", name.removeprefix(self._prefix), "", tensor, layer)

    def state_entries(self, name: str, state: Mapping[Any, Any]) -> Iterator[Entry]:
        """The tensors of a parameter's optimizer state, which may be one that the optimizer has not got yet."""
        for key, value in sorted(state.items(), key=lambda item: str(item[0])):
            if isinstance(value, Tensor):
                layer = self.layer_of(name)
                if layer is not None and not is_per_expert(str(key), value, self.parameters[name]):
                    layer = None
                yield Entry("optimizer", name, str(key), value, layer)

    def layer_of(self, parameter: str) -> int | None:
        """MoE layer index of a spread expert parameter, else None."""
        return self.balancer.layer_of_parameter.get(self._prefix + parameter) if self.balancer is not None else None

    def experts_here(self, layer: int) -> list[int]:
        """The logical expert of each of this rank's rows."""
        assert self.balancer is not None
        return list(map(int, self.balancer.placement.homes_LRH[layer, self.balancer.runtime.job.ep_rank]))

    @property
    def num_experts(self) -> int:
        return self.balancer.placement.num_experts if self.balancer is not None else 0

    @property
    def in_stages(self) -> bool:
        """Return whether other pipeline stages have the rest of the model."""
        return self.balancer is not None and len(self.balancer.runtime.job.layers_of_stage) > 1

    def spec_of(self, entry: Entry) -> TensorSpec:
        """An entry as the whole model has it: ``[E, ...]`` where this rank has some experts' rows or slices."""
        shape = tuple(entry.tensor.shape)
        return TensorSpec(shape if entry.layer is None else (self.num_experts, *shape[1:]), entry.tensor.dtype)

    def blocks_of(self, entry: Entry) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield each block of a tensor that this rank holds, live, and where it begins in the whole tensor."""
        here = local(entry.tensor).detach()
        zeros = (0,) * here.ndim
        if entry.layer is not None:
            for row, expert in enumerate(self.experts_here(entry.layer)):
                yield (expert, *(columns(entry.tensor).start or 0, *zeros)[: here.ndim - 1]), here[row : row + 1]
        elif not isinstance(entry.tensor, DTensor):
            yield zeros, here
        elif here.numel():
            yield from ((tuple(chunk.offsets), here) for chunk in entry.tensor.__create_chunk_list__())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups of all optimizers, in one list."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def named_groups(self) -> list[dict[str, Any]]:
        """Param groups with names of their parameters."""
        return [{**group, "params": self.names_of(group)} for group in self.param_groups]

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Names of the parameters in a param group."""
        try:
            return [self._name_of[id(parameter)] for parameter in group["params"]]
        except KeyError:
            raise CheckpointError(
                "the optimizer holds a tensor that is no parameter of this model: give the model that it trains"
            ) from None

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """The optimizer's state of a parameter; empty before its first step."""
        one = self._optimizer_of.get(name)
        return dict(one.state.get(self.parameters[name], {})) if one is not None else {}

    def set_optimizer_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Replace what the optimizer keeps for a parameter."""
        one = self._optimizer_of.get(name)
        if one is not None and (state or self.optimizer_state(name)):
            one.state[self.parameters[name]] = dict(state)

    def numbers(self) -> Iterator[tuple[str, str, Any]]:
        """Yield optimizer state that is no tensor: its parameter, its key, and it."""
        for name in self.parameters:
            for key, value in self.optimizer_state(name).items():
                if not isinstance(value, Tensor):
                    yield name, str(key), value

    def options_of(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Learning rates and the like for each live param group, by parameter name: groups may be cut otherwise than
        when they were saved, so long as a group has one set of options."""
        group_of = {name: number for number, group in enumerate(saved) for name in group["params"]}
        found: list[dict[str, Any]] = []
        for live in self.named_groups:
            names = live["params"]
            numbers = sorted({group_of[name] for name in names if name in group_of})
            options = [{k: v for k, v in saved[number].items() if k != "params"} for number in numbers] or [{}]
            if any(other != options[0] for other in options):
                raise CheckpointError(
                    f"the param group of {names[0]} was several with different options when saved: build the optimizer "
                    "with the same groups"
                )
            for name, value in options[0].items():
                if isinstance(live.get(name), Tensor) and value is not None:
                    options[0][name] = torch.as_tensor(value, dtype=live[name].dtype).expand_as(live[name])
                elif isinstance(live.get(name), tuple):
                    options[0][name] = tuple(value)
            found.append(options[0])
        return found

    def set_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Write what `options_of` gave."""
        for live, new in zip(self.param_groups, options, strict=True):
            for option, value in new.items():
                if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                    live[option].copy_(value)
                else:
                    live[option] = value

    def refuse_freed(self, what: str, *, patient: bool = False, merged_too: bool = True) -> None:
        """Refuse state whose memory is freed, as jobs do between phases, or of a base with adapters merged into it, on
        all ranks before any of them waits for another. Collective when attached. ``patient``: wait as long as the
        host's process groups do: before a load ranks may come at very different times. ``merged_too``: False: of
        adapters alone, which do not change while they are merged."""
        of_experts = self.balancer.tensors.memory.why_freed() if self.balancer is not None else ""
        freed = (one.key for one in self.entries() if not has_memory(one.tensor))
        problem = of_experts or next((f"{key}: its memory is freed: load it first" for key in freed), "")
        problem = problem or (why_merged(self.model) if merged_too else "")
        error = CheckpointError(f"{what}: {problem}") if problem else None
        if self.balancer is not None:
            ranks, seconds = self.balancer.runtime.job.ranks, self.balancer.config.timeout_seconds
            if cause := barrier(ranks, what, seconds, error, patient=patient):
                raise CheckpointError(f"{what}: {cause.replace(f'{what}: ', '', 1)}")
        if error is not None:
            raise error

    def weights_changed(self) -> None:
        """Tell the balancer that weights were written: replica slots must follow. Collective when attached."""
        if self.balancer is not None:
            self.balancer.weights_changed()

    def restore_placement(self, saved: Mapping[str, Any] | None) -> None:
        """Migrate to a saved placement if it fits. Collective."""
        if self.balancer is None or saved is None:
            return
        try:
            self.balancer.load_state_dict(saved)
        except PlacementError as error:
            logger.info("the saved placement is not used: %s", error)
        except RuntimeError as error:
            logger.warning("%s; training starts from the current placement", error)


def warn_of_left_out(line: str, left: Iterable[str]) -> None:
    """Say on the first rank what of a checkpoint is not read."""
    names = sorted(left)
    if names and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(line, f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0])


def why_merged(model: nn.Module) -> str:
    """Say that adapters are merged into a module's weights (PEFT's ``merged_adapters``), and what to do; empty: into
    none."""
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            return f"adapters are merged into {name}, and are kept, too: unmerge_adapter() first"
    return ""


def _unwrapped(model: nn.Module) -> tuple[nn.Module, Balancer | None]:
    for module in model.modules():
        balancer = module.__dict__.get("_eplb_runtime_balancer")
        if balancer is not None:
            return module, balancer
    wrapper = nn.parallel.DistributedDataParallel
    while isinstance(inner := getattr(model, "module" if isinstance(model, wrapper) else "_orig_mod", None), nn.Module):
        model = inner
    return model, None


@torch.no_grad()
def logical_state_dict(model: nn.Module, optimizer: Given = None) -> dict[str, Tensor]:
    """Return every parameter, buffer and optimizer tensor, flat, on the CPU, equal on every rank: ``{"model.<name>":
    tensor, "optimizer.<parameter>.<state>": tensor, "extra.<parameter>/<name>": tensor}``. Collective when attached.
    Expert tensors are whole, ``[E, ...]`` in logical order, so runs with different placements (or with no balancer at
    all) can be compared entry by entry. Each rank holds all of it: for models that do not fit, see ``save``.
    ``optimizer``: the one that was attached, or the list of them; None: without their state."""
    view = LogicalView(model, optimizer)
    view.refuse_freed("logical_state_dict", patient=True)
    return {entry.key: whole_on_cpu(view, entry) for entry in list(view.entries())}


def whole_on_cpu(view: LogicalView, entry: Entry) -> Tensor:
    """A copy of the whole tensor, experts in logical order; they come one at a time. Collective when attached."""
    if entry.layer is not None and view.balancer is not None:
        return view.balancer.gather_experts(entry.layer, entry.tensor, device="cpu")
    return value_of(entry.tensor).to("cpu", copy=True)  # a DTensor in one piece is live memory, too


def value_of(tensor: Tensor) -> Tensor:
    """A tensor that is no expert's, whole. Collective over the ranks that have parts of it."""
    with torch.no_grad():
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


# -- folders that all ranks see --------------------------------------------------------------------------------------


class JointAccess:
    """One rank's part in a save or load, with a group (None: alone) whose backend carries a device's tensors. A rank
    that fails still takes part, and every rank raises at the next check: none waits for one that gave up."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group, self._device = group, device
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.number = 0 if group is None else group.rank()

    @classmethod
    def of(cls, view: LogicalView) -> JointAccess:
        """All ranks of the model's job; of one that is not attached, the world."""
        if view.balancer is not None:
            return cls(view.balancer.runtime.groups.everyone, view.balancer.runtime.device)
        if not dist.is_initialized():
            return cls(None, torch.device("cpu"))
        return cls(dist.group.WORLD, torch.device(dist.distributed_c10d._get_object_coll_device()))

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Return the result of an action, which has succeeded on all ranks. Raises what failed on this rank, or
        CheckpointError, which names another rank that failed."""
        try:
            result = action()
        except Exception:
            with suppress(Exception):  # of ranks that do not come; the cause is this one
                self.gather("failed")
            raise
        if failed := [rank for rank, word in zip(self.ranks, self.gather(None), strict=True) if word]:
            raise CheckpointError(f"{what}: rank {failed[0]} failed; its own error says why")
        return result

    def on_first(self, what: str, action: Callable[[], object]) -> None:
        """Do it on the first rank alone, and wait for it. Raises as `together`."""
        self.together(what, action if self.number == 0 else lambda: None)

    def gather(self, mine: Any) -> list[Any]:
        """Every rank's, which JSON can say."""
        return [mine] if self._group is None else gather_json(mine, self._group, self._device)

    def new_token(self) -> str:
        """Return a name that no other save has, the same on all ranks."""
        return str(self.gather(secrets.token_hex(8))[0])

    def folder_has(self, path: Path) -> bool:
        """Return whether a file is there, for all ranks alike; refused where only some see it."""
        seen = self.gather(path.is_file() or None)
        if any(seen) and not all(seen):
            rank = self.ranks[seen.index(None)]
            raise CheckpointError(f"rank {rank} does not see {path}: give a folder that all ranks see")
        return any(seen)


@dataclass(frozen=True)
class Stored:
    """How one tensor of the training state is stored.

    Args:
        names: of its parts; ``*`` in them is the number of the expert.
        experts: E, where each expert is stored by itself; 0: the tensor is stored whole.
        sizes: of the parts along ``dim``; empty: there is one part.
        dim: dimension of the tensor (of one expert, without E) along which it is cut into parts.
    """

    names: tuple[str, ...]
    experts: int = 0
    sizes: tuple[int, ...] = ()
    dim: int = 0

    def names_of(self, *experts: int) -> tuple[str, ...]:
        """Names of the parts of these experts, without any of all, or of the tensor."""
        numbers = experts or range(self.experts or 1)
        return tuple(name.replace("*", str(n), 1) if self.experts else name for n in numbers for name in self.names)

    def cut(self, value: Tensor, expert: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Yield name and values of each part."""
        parts = value.split(list(self.sizes), self.dim) if self.sizes else (value,)
        return zip(self.names_of(expert), parts, strict=True)


class Saved:
    """A checkpoint that is open for reading.

    Attributes:
        name: of messages.
        tensors: by the keys of `logical_state_dict`.
        param_groups: of all optimizers; None: there is none.
        numbers: optimizer state that is no tensor, by ``<parameter>.<state>``.
        balancer: `Balancer.state_dict`, or None.
    """

    name: str
    tensors: Mapping[str, TensorSpec]
    param_groups: Sequence[Mapping[str, Any]] | None = None
    numbers: Mapping[str, Any] = MappingProxyType({})
    balancer: Mapping[str, Any] | None = None

    def fill(self, view: LogicalView, entries: Sequence[Entry]) -> None:
        """Write the saved values into live tensors, an expert at a time."""
        for entry in entries:
            for offsets, block in view.blocks_of(entry):
                self.read_block(entry.key, offsets, block)

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        """Fill a block of a tensor, which begins at ``offsets``; values are cast to its dtype."""
        raise NotImplementedError


def stretch(offsets: Sequence[int], block: Tensor) -> tuple[slice, ...]:
    """Where a block is in the whole tensor."""
    return tuple(slice(at, at + length) for at, length in zip(offsets, block.shape, strict=True))
