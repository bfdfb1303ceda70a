"""What a plain ``state_dict`` of an attached model or optimizer says of itself, and what ``load_state_dict`` takes.

A rank's state dict holds its own experts, in the slots where they are: loaded on another rank, or after a migration,
they would become other experts without a word. So it carries which experts it holds, and is refused where they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ...balancer.balancer import Balancer
from ...distributed.consensus import barrier
from ...moe.experts.registry import MARK
from ...moe.experts.slices import local, rearranged
from .description import MoELayer

logger = logging.getLogger("eplb_runtime")

OURS = "eplb_runtime.checkpoint, or eplb_runtime.logical_state_dict and load_logical_state_dict"
BY_THE_FRAMEWORK = "the framework's distributed checkpoints (sharded_state_dict), which name experts"


@dataclass(frozen=True)
class Homes:
    """Where the experts of a layer are, rank after rank, this rank's place, and whether any has moved."""

    order: Sequence[int]
    rank: int
    num_ranks: int
    moved: bool

    @property
    def here(self) -> list[int]:
        """The logical expert of each of this rank's rows."""
        return self.of(self.rank)

    def of(self, rank: int) -> list[int]:
        rows = len(self.order) // self.num_ranks
        return list(self.order[rank * rows : (rank + 1) * rows])

    def mark(self, device: torch.device | str = "cpu") -> Tensor:
        """What a state dict says of itself: whose rows it has, and where all experts stood."""
        return torch.tensor([self.rank, *self.order], dtype=torch.float64, device=device).as_subclass(_OfOneRank)

    def why_not(self, mark: Sequence[float] | Tensor | None, what: str, name: str) -> str:
        """Return why rows with this mark cannot be put where the experts are now, or "". Ranks that were given state of
        one moment come to the same, also those whose own experts have stayed."""
        if mark is None and self.num_ranks == 1:  # whole, as of a model without a balancer
            theirs = list(range(len(self.order)))
            return refusal(what, name, theirs, self.here) if self.here != theirs else ""
        if mark is None:
            why = (
                f"the {what} does not say which experts of {name} its rows are, and experts have moved since attach: "
                f"keep what state_dict() gives under {MARK!r}, or use {OURS}"
            )
            return why if self.moved else ""
        mark = torch.as_tensor(mark).tolist()
        theirs = [round(number) for number in mark]
        # The mean of two orders is no order, whatever their weights; that of equal ones may be a little off.
        is_order = sorted(theirs[1:]) == list(range(len(self.order)))
        if not is_order or any(abs(a - b) > 1e-6 for a, b in zip(mark, theirs, strict=True)):
            return (
                f"the {what} mixes rows of {name} from before and after experts moved: average in logical order "
                "(eplb_runtime.logical_state_dict), or tensors that move along (balancer.register)"
            )
        then = Homes(theirs[1:], theirs[0], self.num_ranks, self.moved)
        if then.rank != self.rank:
            return refusal(what, name, then.here, self.here)
        for rank in (self.rank, *range(self.num_ranks)):
            if then.of(rank) != self.of(rank):
                where = "" if rank == self.rank else f" on rank {rank} of the EP group"
                return refusal(what, name, then.of(rank), self.of(rank), where=where)
        return ""


def _refuse(*_: Any) -> Any:
    raise RuntimeError(
        "this state dict holds one rank's experts under names that all ranks have; torch.distributed.checkpoint "
        "would keep those of one rank: save and load eplb_runtime.checkpoint.LogicalState(model, optimizer) by it"
    )


_REFUSING = {"__create_write_items__": _refuse, "__create_chunk_list__": _refuse}


def mark_parameter(parameter: nn.Parameter) -> None:
    """Let torch.distributed.checkpoint neither write nor read a live parameter that holds one rank's rows."""
    if not isinstance(parameter, DTensor):
        own = vars(parameter)
        own.update(_REFUSING, __getstate__=lambda: {key: own[key] for key in own.keys() - {"__getstate__", *_REFUSING}})


class _OfOneRank(Tensor):
    """A tensor that torch.distributed.checkpoint neither writes nor reads: it keeps one rank's rows for all ranks."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __create_write_items__ = __create_chunk_list__ = _refuse

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone().as_subclass(_OfOneRank)


def warn_once_of_parts() -> Callable[[Homes], None]:
    """Return what says once that a state dict is of this rank alone: kept as a checkpoint, it would lose experts."""
    line = "state_dict() of an attached model holds this rank's %d of %d experts: for a checkpoint of the whole use "
    line += "eplb_runtime.checkpoint.save, save_pretrained or logical_state_dict, on every rank"
    say = cache(lambda here, experts: logger.warning(line, here, experts))
    return lambda homes: say(len(homes.here), len(homes.order))


def mark_state(
    experts: nn.Module,
    name: str,
    homes: Callable[[], Homes],
    refuse: Callable[[str], None],
    *,
    made_with: list[int] | None = None,
    on_partial: Callable[[Homes], None] = lambda homes: None,
) -> None:
    """Let the state of an experts module say which logical experts its rows are, by a tensor next to the weights, which
    goes wherever they go. ``refuse``: raises on all ranks that load if one gives it a reason. ``made_with``: the
    experts of this rank where the host made them as tensors of their own. ``on_partial`` is called when a state dict
    takes this rank's rows, and not live parameters."""

    def rows_of(module: nn.Module, state: Mapping[str, Any], prefix: str) -> set[int]:
        own = [state.get(prefix + key) for key, _ in module.named_parameters()]
        return {tensor.shape[0] for tensor in own if isinstance(tensor, Tensor) and tensor.ndim}

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        now = homes()
        if made_with is not None:
            metadata[MARK] = now.here
            if now.here != made_with:
                # Shapes fit a model without a balancer, where these would be other experts: it shall not know a key.
                state[prefix + MARK] = torch.tensor(now.here)
        elif now.num_ranks > 1 and rows_of(module, state, prefix) == {len(now.here)}:
            state[prefix + MARK] = now.mark(next(module.parameters()).device)
            if not any(isinstance(state.get(prefix + key), nn.Parameter) for key, _ in module.named_parameters()):
                on_partial(now)

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        refuse(why_not(module, state, prefix, metadata))
        state.pop(prefix + MARK, None)

    def why_not(module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any]) -> str:
        now, marked = homes(), state.get(prefix + MARK)
        if made_with is not None:
            # Without a version the framework has put it together, from a checkpoint that names experts.
            theirs = metadata.get(MARK, made_with if "version" in metadata else now.here)
            theirs = theirs if marked is None else marked.tolist()
            if theirs != now.here and any(prefix + key in state for key, _ in module.named_parameters()):
                return refusal("state dict", name, theirs, now.here, BY_THE_FRAMEWORK)
            return ""
        rows, own = rows_of(module, state, prefix), [state.get(prefix + key) for key, _ in module.named_parameters()]
        if rows == {len(now.order)} and now.num_ranks > 1 and not any(isinstance(one, DTensor) for one in own):
            return f"the state dict holds all experts of {name}: load it before attach, or use {OURS}"
        return now.why_not(marked, "state dict", name) if rows == {len(now.here)} else ""

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)
    object.__setattr__(experts, MARK, name)  # who walks along the keys of a state dict finds something


def mark_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    homes_of: Callable[[str], Homes],
    refuse: Callable[[str], None],
) -> list[RemovableHandle]:
    """Let the state of an optimizer say which logical experts its rows are; ``refuse`` as for `mark_state`. Returns how
    to end it."""

    def held(state: dict[str, Any]) -> dict[int, tuple[str, Tensor]]:
        """Experts that the optimizer holds, by their number in a state dict, as far as that has numbers."""
        return {number: (names[id(p)], p) for number, p in _numbered(optimizer, state) if id(p) in names}

    def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        experts = held(state)
        # Of DTensors torch.distributed.checkpoint keeps all ranks' rows.
        kinds = {number: Tensor if isinstance(p, DTensor) else _OfOneRank for number, (_, p) in experts.items()}
        state[MARK] = {name: homes_of(name).mark().as_subclass(kinds[number]) for number, (name, _) in experts.items()}
        state["state"] = {n: _as(kinds[n], of) if n in kinds else of for n, of in state["state"].items()}

    def why_not(state: dict[str, Any], experts: Mapping[int, tuple[str, Tensor]]) -> str:
        for number, (name, parameter) in experts.items():
            values = (state["state"].get(number) or {}).values()
            now, what = homes_of(name), "optimizer's state dict"
            tensors = [value for value in values if isinstance(value, Tensor) and value.ndim == parameter.ndim]
            rows = {value.shape[0] for value in tensors if value.numel() > 1 or value.shape == parameter.shape}
            if rows and rows != {len(now.here)}:
                return refusal(what, name, list(range(max(rows))), now.here)
            if rows and (why := now.why_not(state.get(MARK, {}).get(name), what, name)):
                return why
        return ""

    def loading(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        refuse(why_not(state, experts := held(state)))
        return state | {"state": {n: _as(Tensor, of) if n in experts else of for n, of in state["state"].items()}}

    return [optimizer.register_state_dict_post_hook(saved), optimizer.register_load_state_dict_pre_hook(loading)]


def _as(kind: type[Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with its plain tensors, but single numbers, as of this class."""
    return {key: v.as_subclass(kind) if type(v) in (Tensor, _OfOneRank) and v.ndim else v for key, v in state.items()}


def refusal(what: str, name: str, theirs: list[int], here: list[int], instead: str = OURS, *, where: str = "") -> str:
    return (
        f"the {what} holds experts {_shown(theirs)} of {name}{where}, and {'there' if where else 'here'} stand "
        f"{_shown(here)}: a plain state dict fits only the rank and placement that it was taken at; use {instead}"
    )


def _shown(experts: list[int]) -> str:
    more = ", ..." if len(experts) > 8 else ""
    return f"[{', '.join(map(str, experts[:8]))}{more}]"


# -- in logical order, where a framework saves and loads experts itself: rows travel, in an exchange for each tensor ---


class StateError(RuntimeError):
    """State that cannot be brought into, or out of, logical order."""


class LogicalOrder:
    """The rows of an attached model's expert tensors, between logical order and the current placement."""

    def __init__(self, balancer: Balancer) -> None:
        self.balancer, registry = balancer, balancer.runtime.registry
        self._layer_of = {id(p): layer for layer in registry.layers for p in registry.parameters(layer)}

    def layer_of(self, parameter: Tensor) -> int | None:
        """MoE layer index of an expert parameter, else None."""
        return self._layer_of.get(id(parameter))

    @torch.no_grad()
    def converted(self, tensor: Tensor, layer: int, name: str, loads: bool) -> DTensor:
        """Return a tensor in logical order, in new memory; or, where it ``loads``, one of logical order as experts
        stand here. Collective."""
        stand_E, groups = self.balancer.placement.homes_LRH[layer].reshape(-1), self.balancer.runtime.groups
        logical_E = np.arange(len(stand_E))
        here_E, wanted_E = (logical_E, stand_E) if loads else (stand_E, logical_E)
        if not isinstance(tensor, DTensor) or local(tensor).shape[0] != len(stand_E) // len(groups.job.row_ranks):
            raise StateError(
                f"{name} is no DTensor whose rows are divided over ranks as the model's are: load and save it "
                "by the framework's own checkpoints"
            )
        moved = rearranged(local(tensor), here_E, wanted_E, groups)
        return DTensor.from_local(
            moved, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )


def keep_logical_order(
    model: nn.Module, layers: Sequence[MoELayer], balancer: Balancer, *, same_tensors: bool = False
) -> None:
    """Let the state of a model, or a stage of it, have experts in logical order, and be taken and loaded by all ranks
    or none: one that does it alone says who is missing, and waits as long as the host would (ranks may read data
    before).

    ``same_tensors``: torchtitan's checkpointer keeps the tensors that it was given first, and writes into them what the
    same key holds later: so they are the same tensors each time, and never those of the model.
    """
    order, everyone, seconds = LogicalOrder(balancer), list(balancer.runtime.job.ranks), balancer.config.timeout_seconds
    for layer in layers:
        _keep_order(layer, order, same_tensors)
    meet = lambda what: barrier(everyone, what, seconds, patient=True)  # noqa: E731
    model.register_state_dict_pre_hook(lambda *_: meet("the state of the model"))
    model.register_load_state_dict_pre_hook(lambda *_: meet("the loading of the model's state"))
    model.register_load_state_dict_post_hook(lambda *_: balancer.weights_changed())  # copies follow


def _keep_order(layer: MoELayer, order: LogicalOrder, same_tensors: bool) -> None:
    kept: dict[str, DTensor] = {}
    experts, name, names = layer.experts, layer.name, layer.parameters
    index = order.layer_of(layer.parameter(names[0]))
    assert index is not None

    def saved(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for own in names:
            tensor = order.converted(state[prefix + own], index, f"{name}.{own}", False)
            if own in kept:
                local(kept[own]).copy_(local(tensor))
            state[prefix + own] = kept.setdefault(own, tensor) if same_tensors else tensor

    def loading(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise StateError(f"{name}: load_state_dict(assign=True) would replace the experts that are balanced")
        for own in names:
            if prefix + own in state:
                state[prefix + own] = order.converted(state[prefix + own], index, f"{name}.{own}", True)

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)


def order_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], balancer: Balancer
) -> list[RemovableHandle]:
    """Let the state of an optimizer have experts in logical order; returns how to end it."""
    order = LogicalOrder(balancer)

    def in_order(state: dict[str, Any], loads: bool) -> dict[str, Any]:
        balancer.runtime.barrier("the state of the optimizer")
        changed = dict(state["state"])
        for number, parameter in _numbered(optimizer, state):
            layer = order.layer_of(parameter)
            if layer is not None and number in changed:
                # One number for all experts (Adam's step) stays as it is.
                changed[number] = {
                    key: order.converted(value, layer, f"{names[id(parameter)]}/{key}", loads)
                    if isinstance(value, Tensor) and value.numel() > 1
                    else value
                    for key, value in sorted(changed[number].items())
                }
        return {**state, "state": changed}

    return [
        optimizer.register_state_dict_post_hook(lambda _, state: in_order(state, False)),
        optimizer.register_load_state_dict_pre_hook(lambda _, state: in_order(state, True)),
    ]


def _numbered(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield parameters by their numbers in a state dict, as far as that has numbers."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return zip(numbers, every, strict=False)
