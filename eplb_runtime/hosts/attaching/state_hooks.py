"""What a plain ``state_dict`` of an attached model or optimizer says of itself, and what ``load_state_dict`` takes.

A rank's state dict holds its own experts, in the slots where they are: loaded on another rank, or after a migration,
they would become other experts without a word. So it carries which experts it holds, and is refused where they differ.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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

Handles = list[RemovableHandle]
OURS = "eplb_runtime.checkpoint, or eplb_runtime.logical_state_dict and load_logical_state_dict"
BY_THE_FRAMEWORK = "the framework's distributed checkpoints (sharded_state_dict), which name experts"
OF_ONE_RANK = (
    "state_dict() of an attached model holds this rank's %d of %d experts: for a checkpoint of the whole use "
    "eplb_runtime.checkpoint.save, save_pretrained or logical_state_dict, on every rank"
)


def refusal(what: str, name: str, instead: str = OURS) -> str:
    """Return an error line: a ``what`` does not say that its rows of ``name`` are this rank's experts; with advice."""
    return (
        f"the {what} may hold other experts in its rows of {name} than this rank has now: a plain state dict fits only "
        f"the rank and placement that it was taken at; keep its entry {MARK!r}, load all experts before attach, give "
        f"averages to balancer.register, or use {instead}"
    )


def _homes_here(balancer: Balancer, layer: int) -> list[int]:
    return [*map(int, balancer.placement.homes_LRH[layer][balancer.runtime.job.ep_rank])]


def _mark(here: list[int]) -> Tensor:
    return torch.tensor(here, dtype=torch.float64)


def _fits(balancer: Balancer, layer: int, mark: Any) -> bool:
    """Return whether rows with this mark may be put where experts are now; None: rows of a model before any move."""
    here = _homes_here(balancer, layer)
    if mark is None:
        is_whole = len(here) == balancer.placement.num_experts
        return here == sorted(here) if is_whole else not balancer.rebalancer.has_moved(layer)
    marked = torch.as_tensor(mark).double().cpu()  # averages of equal marks may be a little off
    return marked.shape == (len(here),) and torch.allclose(marked, _mark(here), rtol=0, atol=1e-6)


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
        "would keep those of one rank: use eplb_runtime.checkpoint.save(..., format='dcp') and load"
    )


_REFUSING = {"__create_write_items__": _refuse_here, "__create_chunk_list__": _refuse_here}


def keep_from_dcp(tensor: Tensor) -> Tensor:
    """Let torch.distributed.checkpoint raise on a tensor, unless that is a DTensor; return the same tensor."""
    if not isinstance(tensor, DTensor):  # of which all ranks' rows are kept
        own = vars(tensor)
        own.update(_REFUSING, __getstate__=lambda: {key: own[key] for key in own.keys() - {"__getstate__", *_REFUSING}})
    return tensor


def mark_state(
    experts: nn.Module, name: str, balancer: Balancer, layer: int, of_part: Callable[[int, int], None] | None
) -> None:
    """Hook an experts module: its state dict gets a tensor `MARK` with the logical experts of its rows, and loading
    rows of other experts raises RuntimeError on all ranks of the EP group. ``of_part(experts here, experts in all)`` is
    called when a state dict takes trained rows of this rank, and not live parameters. None: the host keeps each expert
    in tensors of its own; the mark is in the metadata, and after a move in the state dict, too."""
    made_with, in_all = _homes_here(balancer, layer), balancer.placement.num_experts

    def own(state: Mapping[str, Any], prefix: str) -> tuple[list[Any], set[int]]:
        tensors = [state[prefix + key] for key, _ in experts.named_parameters() if prefix + key in state]
        return tensors, {one.shape[0] for one in tensors if isinstance(one, Tensor) and one.ndim}

    def saved(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        here, (tensors, rows) = _homes_here(balancer, layer), own(state, prefix)
        if of_part is None:
            metadata[MARK] = here
            if here != made_with:
                # Shapes fit a model without a balancer, where these would be other experts: it shall not know a key.
                state[prefix + MARK] = torch.tensor(here)
        elif len(here) < in_all and rows == {len(here)}:
            state[prefix + MARK] = keep_from_dcp(_mark(here).to(next(experts.parameters()).device))
            trained = any(parameter.requires_grad for parameter in experts.parameters())
            if trained and not any(isinstance(tensor, nn.Parameter) for tensor in tensors):
                of_part(len(here), in_all)

    def fits(state: Mapping[str, Any], prefix: str, mark: Tensor | None, metadata: Mapping[str, Any]) -> bool:
        here, (tensors, rows) = _homes_here(balancer, layer), own(state, prefix)
        if of_part is None:
            # Without a version the framework has put it together, from a checkpoint that names experts.
            theirs = metadata.get(MARK, made_with if "version" in metadata else here)
            return not tensors or _fits(balancer, layer, theirs if mark is None else mark)
        if rows == {len(here)}:
            return _fits(balancer, layer, mark)
        return rows != {in_all} or any(isinstance(tensor, DTensor) for tensor in tensors)

    def loading(_: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any) -> None:
        mark = state.pop(prefix + MARK, None)
        why = refusal("state dict", name, OURS if of_part else BY_THE_FRAMEWORK)
        _refuse_on_all(balancer, name, "" if fits(state, prefix, mark, metadata) else why)

    experts._register_state_dict_hook(saved)
    experts._register_load_state_dict_pre_hook(loading, with_module=True)
    object.__setattr__(experts, MARK, name)  # who walks along the keys of a state dict finds something


def mark_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], balancer: Balancer) -> Handles:
    """Hook an optimizer: its state dict says under `MARK` which logical experts its rows are, and loading other
    experts' rows raises RuntimeError on all ranks of the EP group. Return the hooks' handles."""
    layers = balancer.layer_of_parameter

    def saved(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        experts = _numbered(optimizer, state, names)
        state[MARK] = {name: _mark(_homes_here(balancer, layers[name])) for name, _ in experts.values()}
        for number, (name, parameter) in experts.items():
            if not isinstance(parameter, DTensor):  # of which all ranks' rows are kept
                keep_from_dcp(state[MARK][name])
                if of := state["state"].get(number):
                    state["state"][number] = {key: _apart(value) for key, value in of.items()}

    def fits(state: dict[str, Any], number: int, name: str, parameter: Tensor) -> bool:
        values = (state["state"].get(number) or {}).values()
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim == parameter.ndim]
        rows = {value.shape[0] for value in tensors if value.numel() > 1 or value.shape == parameter.shape}
        here, mark = _homes_here(balancer, layers[name]), state.get(MARK, {}).get(name)
        return not rows or (rows == {len(here)} and _fits(balancer, layers[name], mark))

    def loading(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        experts = _numbered(optimizer, state, names).items()
        wrong = [name for number, (name, parameter) in experts if not fits(state, number, name, parameter)]
        _refuse_on_all(balancer, "the optimizer", refusal("optimizer's state dict", wrong[0]) if wrong else "")

    return [optimizer.register_state_dict_post_hook(saved), optimizer.register_load_state_dict_pre_hook(loading)]


def _apart(value: Any) -> Any:
    """A tensor of an expert parameter's state, but a single number, as another that is kept from DCP."""
    return keep_from_dcp(value.detach()) if isinstance(value, Tensor) and value.ndim else value


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
    """Hook a model, or a stage of it: its state dict has experts in logical order, and loading takes them so. Both are
    collective over the job from now on: if not all ranks come, a warning names those missing, and the others wait as
    long as the host would. After loading, replicas follow.

    ``same_tensors``: the state dict has the same expert tensors each time, with new values, and never the model's:
    torchtitan's checkpointer keeps the tensors that it was given first.
    """
    names = {id(parameter): name for name, parameter in balancer.runtime.parameters.items()}
    kept: dict[str, DTensor] = {}

    def meet(what: str) -> None:
        barrier(list(balancer.runtime.job.ranks), what, balancer.config.timeout_seconds, patient=True)

    def saved(layer: MoELayer, _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for own in layer.parameters:
            name = names[id(layer.parameter(own))]
            tensor = _converted(balancer, state[prefix + own], name, "", False)
            if name in kept:
                local(kept[name]).copy_(local(tensor))
            state[prefix + own] = kept.setdefault(name, tensor) if same_tensors else tensor

    def loading(
        layer: MoELayer, _: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *__: Any
    ) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise RuntimeError(f"{layer.name}: load_state_dict(assign=True) would replace the experts")
        for own in layer.parameters:
            if (key := prefix + own) in state:
                state[key] = _converted(balancer, state[key], names[id(layer.parameter(own))], "", True)

    for layer in layers:
        layer.experts._register_state_dict_hook(partial(saved, layer))
        layer.experts._register_load_state_dict_pre_hook(partial(loading, layer), with_module=True)
    model.register_state_dict_pre_hook(lambda *_: meet("the state of the model"))
    model.register_load_state_dict_pre_hook(lambda *_: meet("the loading of the model's state"))
    model.register_load_state_dict_post_hook(lambda *_: balancer.weights_changed())  # copies follow


def order_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], balancer: Balancer) -> Handles:
    """Hook an optimizer: its state dict has experts in logical order, as loading does; collective. Return handles."""

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

    saved = optimizer.register_state_dict_post_hook(lambda _, state: in_order(state, False))
    return [saved, optimizer.register_load_state_dict_pre_hook(lambda _, state: in_order(state, True))]
