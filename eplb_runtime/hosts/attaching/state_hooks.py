"""What a plain ``state_dict`` of an attached model or optimizer says of itself, and what ``load_state_dict`` takes.

A rank's state dict holds its own experts, in the slots where they are: loaded on another rank, or after a migration,
they would become other experts without a word. So it carries which experts it holds, and is refused where they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
OF_ONE_RANK = (
    "state_dict() of an attached model holds this rank's %d of %d experts: for a checkpoint of the whole use "
    "eplb_runtime.checkpoint.save, save_pretrained or logical_state_dict, on every rank"
)


def refusal(what: str, name: str, instead: str = OURS) -> str:
    """Return the line on state whose rows are not known to be those that stand here."""
    return (
        f"the {what} does not say that its rows of {name} are the experts that stand here: plain state fits only the "
        f"rank and placement that it was taken at; keep its {MARK!r}, load state of all experts before attach, average "
        f"tensors that move along (balancer.register), or use {instead}"
    )


@dataclass(frozen=True)
class _Homes:
    """Experts of a layer as they stand now: all, rank after rank, and those of this one."""

    order: list[int]
    here: list[int]
    rank: int
    moved: bool

    @classmethod
    def now(cls, balancer: Balancer, layer: int) -> _Homes:
        homes_RH, rank = balancer.placement.homes_LRH[layer], balancer.runtime.job.ep_rank
        return cls(homes_RH.ravel().tolist(), homes_RH[rank].tolist(), rank, balancer.rebalancer.has_moved(layer))

    @property
    def alone(self) -> bool:
        return len(self.here) == len(self.order)

    def mark(self, device: torch.device | str = "cpu") -> Tensor:
        """What a state dict says of itself: whose rows it has, and where all experts stood."""
        return torch.tensor([self.rank, *self.order], dtype=torch.float64, device=device).as_subclass(_OfOneRank)

    def fit(self, mark: Any) -> bool:
        """Return whether rows with this mark may be put where the experts are now. Ranks that were given state of one
        moment come to the same, also those whose own experts have stayed."""
        if mark is None:  # as of a model without a balancer, or one before any move
            return self.order == sorted(self.order) if self.alone else not self.moved
        marked, now = torch.as_tensor(mark).double().cpu().as_subclass(Tensor), self.mark().as_subclass(Tensor)
        # Averages of equal ones may be a little off.
        return marked.shape == now.shape and torch.allclose(marked, now, rtol=0, atol=1e-6)


def _refuse_on_all(balancer: Balancer, what: str, why: str) -> None:
    """Raise on every rank of an EP group if one of them has a reason. Collective over it until ``close``."""
    ranks, problem = balancer.runtime.job.ep_ranks, RuntimeError(why) if why else None
    if len(ranks) > 1 and not balancer.closed:
        why = barrier(ranks, f"load_state_dict of {what}", balancer.config.timeout_seconds, problem, patient=True)
    if why:
        raise RuntimeError(why)


def _refuse_here(*_: Any) -> Any:
    raise RuntimeError(
        "this state dict holds one rank's experts under names that all ranks have; torch.distributed.checkpoint "
        "would keep those of one rank: save and load eplb_runtime.checkpoint.LogicalState(model, optimizer) by it"
    )


_REFUSING = {"__create_write_items__": _refuse_here, "__create_chunk_list__": _refuse_here}


def mark_parameter(parameter: nn.Parameter) -> None:
    """Let torch.distributed.checkpoint neither write nor read a live parameter that holds one rank's rows."""
    if not isinstance(parameter, DTensor):
        own = vars(parameter)
        own.update(_REFUSING, __getstate__=lambda: {key: own[key] for key in own.keys() - {"__getstate__", *_REFUSING}})


class _OfOneRank(Tensor):
    """A tensor that torch.distributed.checkpoint neither writes nor reads: it keeps one rank's rows for all ranks."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    __create_write_items__ = __create_chunk_list__ = _refuse_here

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Any:
        return self.clone().as_subclass(_OfOneRank)


def mark_state(
    experts: nn.Module, name: str, balancer: Balancer, layer: int, of_part: Callable[[int, int], None] | None
) -> None:
    """Let the state of an experts module say which logical experts its rows are, by a tensor next to the weights, which
    goes wherever they go. ``of_part`` is called with numbers of experts, here and in all, when a state dict takes this
    rank's rows of trained experts, and not live parameters. None: the host has made the experts of this rank as tensors
    of their own."""
    made_with, instead = ([], OURS) if of_part else (_Homes.now(balancer, layer).here, BY_THE_FRAMEWORK)

    def own(state: Mapping[str, Any], prefix: str) -> list[Any]:
        return [state[prefix + key] for key, _ in experts.named_parameters() if prefix + key in state]

    def rows_of(tensors: list[Any]) -> set[int]:
        return {tensor.shape[0] for tensor in tensors if isinstance(tensor, Tensor) and tensor.ndim}

    def saved(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        now, tensors = _Homes.now(balancer, layer), own(state, prefix)
        if of_part is None:
            metadata[MARK] = now.here
            if now.here != made_with:
                # Shapes fit a model without a balancer, where these would be other experts: it shall not know a key.
                state[prefix + MARK] = torch.tensor(now.here)
        elif not now.alone and rows_of(tensors) == {len(now.here)}:
            state[prefix + MARK] = now.mark(next(experts.parameters()).device)
            trained = any(parameter.requires_grad for parameter in experts.parameters())
            if trained and not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
                of_part(len(now.here), len(now.order))

    def fits(now: _Homes, tensors: list[Any], mark: Tensor | None, metadata: Mapping[str, Any]) -> bool:
        if of_part is None:
            # Without a version the framework has put it together, from a checkpoint that names experts.
            theirs = metadata.get(MARK, made_with if "version" in metadata else now.here)
            return not tensors or (theirs if mark is None else mark.tolist()) == now.here
        if rows_of(tensors) == {len(now.here)}:
            return now.fit(mark)
        return rows_of(tensors) != {len(now.order)} or any(isinstance(tensor, DTensor) for tensor in tensors)

    def loading(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        now, mark = _Homes.now(balancer, layer), state.pop(prefix + MARK, None)
        why = "" if fits(now, own(state, prefix), mark, metadata) else refusal("state dict", name, instead)
        _refuse_on_all(balancer, name, why)

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)
    object.__setattr__(experts, MARK, name)  # who walks along the keys of a state dict finds something


def mark_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], balancer: Balancer
) -> list[RemovableHandle]:
    """Let the state of an optimizer say which logical experts its rows are; returns how to end it."""
    homes = lambda name: _Homes.now(balancer, balancer.layer_of_parameter[name])  # noqa: E731

    def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        experts = _numbered(optimizer, state, names)
        # Of DTensors torch.distributed.checkpoint keeps all ranks' rows.
        kinds = {number: Tensor if isinstance(p, DTensor) else _OfOneRank for number, (_, p) in experts.items()}
        state[MARK] = {name: homes(name).mark().as_subclass(kinds[number]) for number, (name, _) in experts.items()}
        state["state"] = {n: _as(kinds[n], of) if n in kinds else of for n, of in state["state"].items()}

    def fits(state: dict[str, Any], number: int, name: str, parameter: Tensor) -> bool:
        values = (state["state"].get(number) or {}).values()
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim == parameter.ndim]
        rows = {value.shape[0] for value in tensors if value.numel() > 1 or value.shape == parameter.shape}
        now = homes(name)
        return not rows or (rows == {len(now.here)} and now.fit(state.get(MARK, {}).get(name)))

    def loading(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        experts = _numbered(optimizer, state, names)
        wrong = (name for number, (name, p) in experts.items() if not fits(state, number, name, p))
        why = next((refusal("optimizer's state dict", name) for name in wrong), "")
        _refuse_on_all(balancer, "the optimizer", why)
        return state | {"state": {n: _as(Tensor, of) if n in experts else of for n, of in state["state"].items()}}

    return [optimizer.register_state_dict_post_hook(saved), optimizer.register_load_state_dict_pre_hook(loading)]


def _as(kind: type[Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state with its plain tensors, but single numbers, as of this class."""
    return {key: v.as_subclass(kind) if type(v) in (Tensor, _OfOneRank) and v.ndim else v for key, v in state.items()}


def _numbered(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], names: Mapping[int, str]
) -> dict[int, tuple[str, Tensor]]:
    """Return experts that an optimizer holds, by their numbers in a state dict, as far as that has numbers."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return {n: (names[id(p)], p) for n, p in zip(numbers, every, strict=False) if id(p) in names}


# -- in logical order, where a framework saves and loads experts itself: rows travel, in an exchange for each tensor ---


@torch.no_grad()
def _converted(balancer: Balancer, tensor: Tensor, parameter: str, what: str, loads: bool) -> DTensor:
    """Return a tensor of an expert parameter in logical order, in new memory; or, where it ``loads``, one of logical
    order as experts stand here. Collective."""
    stand_E = balancer.placement.homes_LRH[balancer.layer_of_parameter[parameter]].reshape(-1)
    logical_E, groups = np.arange(len(stand_E)), balancer.runtime.groups
    here_E, wanted_E = (logical_E, stand_E) if loads else (stand_E, logical_E)
    if not isinstance(tensor, DTensor) or local(tensor).shape[0] != len(stand_E) // len(groups.job.row_ranks):
        raise RuntimeError(
            f"{parameter}{what} is no DTensor whose rows are divided over ranks as the model's are: load and save it "
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
    everyone, seconds = list(balancer.runtime.job.ranks), balancer.config.timeout_seconds
    for layer in layers:
        _keep_order(layer, balancer, same_tensors)
    meet = lambda what: barrier(everyone, what, seconds, patient=True)  # noqa: E731
    model.register_state_dict_pre_hook(lambda *_: meet("the state of the model"))
    model.register_load_state_dict_pre_hook(lambda *_: meet("the loading of the model's state"))
    model.register_load_state_dict_post_hook(lambda *_: balancer.weights_changed())  # copies follow


def _keep_order(layer: MoELayer, balancer: Balancer, same_tensors: bool) -> None:
    kept: dict[str, DTensor] = {}
    names = {id(parameter): name for name, parameter in balancer.runtime.parameters.items()}
    names_of = {own: names[id(layer.parameter(own))] for own in layer.parameters}

    def saved(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        for own, name in names_of.items():
            tensor = _converted(balancer, state[prefix + own], name, "", False)
            if own in kept:
                local(kept[own]).copy_(local(tensor))
            state[prefix + own] = kept.setdefault(own, tensor) if same_tensors else tensor

    def loading(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(f"{layer.name}: load_state_dict(assign=True) would replace the experts")
        for own, name in names_of.items():
            if prefix + own in state:
                state[prefix + own] = _converted(balancer, state[prefix + own], name, "", True)

    layer.experts._register_state_dict_hook(saved)
    layer.experts._register_load_state_dict_pre_hook(loading, with_module=True)


def order_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], balancer: Balancer
) -> list[RemovableHandle]:
    """Let the state of an optimizer have experts in logical order; returns how to end it."""

    def in_order(state: dict[str, Any], loads: bool) -> dict[str, Any]:
        balancer.runtime.barrier("the state of the optimizer")
        changed = dict(state["state"])
        for number, (name, _) in _numbered(optimizer, state, names).items():
            # One number for all experts (Adam's step) stays as it is.
            rows = {k: v for k, v in sorted(changed.get(number, {}).items()) if isinstance(v, Tensor) and v.numel() > 1}
            if rows:
                ordered = {key: _converted(balancer, value, name, f"/{key}", loads) for key, value in rows.items()}
                changed[number] = changed[number] | ordered
        return {**state, "state": changed}

    return [
        optimizer.register_state_dict_post_hook(lambda _, state: in_order(state, False)),
        optimizer.register_load_state_dict_pre_hook(lambda _, state: in_order(state, True)),
    ]
