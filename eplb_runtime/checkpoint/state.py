"""State in logical order: what a model and its optimizer hold, on any ranks and slots; and how ranks agree on it."""

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Self, TypeVar

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
    def of(cls, tensor: Tensor) -> Self:
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
        """Return the key in `logical_state_dict`: part and name, and, of optimizer state, the optimizer's own key."""
        return f"{self.part}.{self.name}.{self.state}" if self.part == "optimizer" else f"{self.part}.{self.name}"


class LogicalView:
    """Names of everything in a model and its optimizer, and where the experts are; it owns nothing. CheckpointError:
    the optimizer, or a module around the attached model, holds a tensor that is not of the model.

    Args:
        model: attached or not; DistributedDataParallel and torch.compile around it are looked through.
        optimizer: one, or all of them; None: without optimizer state.
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
        """Yield an `Entry` for each tensor that is saved, loaded and compared, in an order that is equal on every rank.
        ``parts``: some of ``"model"``, ``"optimizer"``, ``"extra"``; none: all."""
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
        """Yield an `Entry` for each tensor in a parameter's optimizer state, as it is or is to be, sorted by key."""
        for key, value in sorted(state.items(), key=lambda item: str(item[0])):
            if isinstance(value, Tensor):
                layer = self.layer_of(name)
                if layer is not None and not is_per_expert(str(key), value, self.parameters[name]):
                    layer = None
                yield Entry("optimizer", name, str(key), value, layer)

    def layer_of(self, parameter: str) -> int | None:
        """Return the MoE layer of a parameter whose rows are experts spread over ranks; None: any other parameter."""
        return self.balancer.layer_of_parameter.get(self._prefix + parameter) if self.balancer is not None else None

    def experts_here(self, layer: int) -> list[int]:
        """Return the logical expert of each of this rank's home rows in a layer."""
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
        """Return shape and dtype of an entry's whole tensor: ``[E, ...]`` where this rank has experts' rows."""
        shape = tuple(entry.tensor.shape)
        return TensorSpec(shape if entry.layer is None else (self.num_experts, *shape[1:]), entry.tensor.dtype)

    def blocks_of(self, entry: Entry) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield (offsets in the whole tensor, live memory) of each block: an expert, a tensor, a DTensor's chunk."""
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
        """Return a copy of each param group, in which ``"params"`` are the names of its parameters."""
        return [{**group, "params": self.names_of(group)} for group in self.param_groups]

    def names_of(self, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a param group's parameters. CheckpointError: one of them is no parameter of the model."""
        try:
            return [self._name_of[id(parameter)] for parameter in group["params"]]
        except KeyError:
            raise CheckpointError(
                "the optimizer holds a tensor that is no parameter of this model: give the model that it trains"
            ) from None

    def optimizer_state(self, name: str) -> dict[str, Any]:
        """Return a copy of the optimizer's dict for a parameter; empty before its first step, or without one."""
        one = self._optimizer_of.get(name)
        return dict(one.state.get(self.parameters[name], {})) if one is not None else {}

    def set_optimizer_state(self, name: str, state: Mapping[str, Any]) -> None:
        """Replace the optimizer's state of a parameter; nothing without an optimizer for it, or if both are empty."""
        one = self._optimizer_of.get(name)
        if one is not None and (state or self.optimizer_state(name)):
            one.state[self.parameters[name]] = dict(state)

    def numbers(self) -> Iterator[tuple[str, str, Any]]:
        """Yield (parameter's name, key, value) of the optimizer state that is no tensor."""
        for name in self.parameters:
            for key, value in self.optimizer_state(name).items():
                if not isinstance(value, Tensor):
                    yield name, str(key), value

    def options_of(self, saved: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the saved options (learning rate, ...) for each live param group, found by its parameters' names; {}:
        none are saved. Nothing is set. CheckpointError: parameters of a group had different options when saved."""
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
        """Set the options of each live param group, as `options_of` returns them; tensors are written in place."""
        for live, new in zip(self.param_groups, options, strict=True):
            for option, value in new.items():
                if isinstance(live.get(option), Tensor) and isinstance(value, Tensor):
                    live[option].copy_(value)
                else:
                    live[option] = value

    def refuse_freed(self, what: str, *, patient: bool = False, merged_too: bool = True) -> None:
        """Raise CheckpointError, when attached on all ranks, if memory of the state is freed on one, as jobs do between
        phases, or adapters are merged into a base. Collective when attached (a barrier; RuntimeError: a rank did not
        come). ``what``: the call, by name. ``patient``: wait as long as the host's process groups do, as before a load.
        ``merged_too``: False: merged adapters are allowed, as for state of adapters alone, which does not change."""
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
        """Let the balancer refresh replicas after weights were written. Collective when attached."""
        if self.balancer is not None:
            self.balancer.weights_changed()

    def restore_placement(self, saved: Mapping[str, Any] | None) -> None:
        """Load a saved `Balancer.state_dict`, which migrates to its placement; None: do nothing. Collective. If it does
        not fit or the migration is dropped, that is logged, and the current placement stays."""
        if self.balancer is None or saved is None:
            return
        try:
            self.balancer.load_state_dict(saved)
        except PlacementError as error:
            logger.info("the saved placement is not used: %s", error)
        except RuntimeError as error:
            logger.warning("%s; training starts from the current placement", error)


def warn_of_left_out(line: str, left: Iterable[str]) -> None:
    """Log a warning on rank 0: ``line`` with the first of the names ``left`` and how many more. No names: nothing."""
    names = sorted(left)
    if names and not (dist.is_initialized() and dist.get_rank()):
        logger.warning(line, f"{names[0]} and {len(names) - 1} more" if names[1:] else names[0])


def why_merged(model: nn.Module) -> str:
    """Return which module has adapters (PEFT's ``merged_adapters``) merged into its weights and the mend; "": none."""
    for name, module in model.named_modules():
        if getattr(module, "merged_adapters", None):
            return f"adapters are merged into {name}, and are kept, too: unmerge_adapter() first"
    return ""


def _unwrapped(model: nn.Module) -> tuple[nn.Module, Balancer | None]:
    for module in model.modules():
        if (balancer := module.__dict__.get("_eplb_runtime_balancer")) is not None:
            inside = {id(tensor) for _, tensor in (*module.named_parameters(), *module.named_buffers())}
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                head, _, own = name.rpartition(".")
                if id(tensor) not in inside and own not in model.get_submodule(head)._non_persistent_buffers_set:
                    raise CheckpointError(f"{name} is outside the attached model: give the attached model alone")
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
    """Return a CPU copy of an entry's whole tensor, experts in logical order. Collective when attached."""
    if entry.layer is not None and view.balancer is not None:
        return view.balancer.gather_experts(entry.layer, entry.tensor, device="cpu")
    return value_of(entry.tensor).to("cpu", copy=True)  # a DTensor in one piece is live memory, too


def value_of(tensor: Tensor) -> Tensor:
    """Return a tensor detached: a DTensor whole, which is collective over its mesh; any other as it is, live."""
    with torch.no_grad():
        return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


# -- folders that all ranks see --------------------------------------------------------------------------------------


class JointAccess:
    """One rank's part in a save or load, with a group (None: alone) whose backend carries a device's tensors. A rank
    that fails still takes part, and every rank raises at the next check: none waits for one that gave up."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self._device = group, device
        self.ranks = [0] if group is None else dist.get_process_group_ranks(group)
        self.number = 0 if group is None else group.rank()

    @classmethod
    def of(cls, view: LogicalView) -> Self:
        """Return the access of all ranks of the model's job; not attached: of the world, or of this process alone."""
        if view.balancer is not None:
            return cls(view.balancer.runtime.groups.everyone, view.balancer.runtime.device)
        if not dist.is_initialized():
            return cls(None, torch.device("cpu"))
        return cls(dist.group.WORLD, torch.device(dist.distributed_c10d._get_object_coll_device()))

    def together(self, what: str, action: Callable[[], Result]) -> Result:
        """Run an action on each rank, and return this rank's result when all have succeeded. Collective. Raises what
        failed on this rank, or CheckpointError, which names another rank that failed."""
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
        """Run an action on the first rank alone; the others wait for it. Collective; raises as `together`."""
        self.together(what, action if self.number == 0 else lambda: None)

    def gather(self, mine: Any) -> list[Any]:
        """Return a list of every rank's ``mine``, a value that JSON can say. Collective."""
        return [mine] if self.group is None else gather_json(mine, self.group, self._device)

    def new_token(self) -> str:
        """Return 16 random hexadecimal digits, for the names of a save's files, equal on all ranks. Collective."""
        return str(self.gather(secrets.token_hex(8))[0])

    def folder_has(self, path: Path) -> bool:
        """Return whether a file is there, equal on all ranks. Collective. CheckpointError: only some ranks see it."""
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
        """Return the names of the stored parts of these experts; none given: of all experts, or of the whole tensor."""
        numbers = experts or range(self.experts or 1)
        return tuple(name.replace("*", str(n), 1) if self.experts else name for n in numbers for name in self.names)

    def cut(self, value: Tensor, expert: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over (name, view) of the stored parts of ``value``: a whole tensor, or one expert's."""
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
        """Read the saved values of ``entries`` into their live tensors on this rank, an expert at a time."""
        for entry in entries:
            for offsets, block in view.blocks_of(entry):
                self.read_block(entry.key, offsets, block)

    def read_block(self, key: str, offsets: Sequence[int], block: Tensor) -> None:
        """In subclasses: fill ``block`` with saved values of tensor ``key`` from ``offsets`` on, cast to its dtype."""
        raise NotImplementedError


def stretch(offsets: Sequence[int], block: Tensor) -> tuple[slice, ...]:
    """Return the slices of the whole tensor, one per dimension, where a block at ``offsets`` lies."""
    return tuple(slice(at, at + length) for at, length in zip(offsets, block.shape, strict=True))
