"""Cut a model's experts to those of this rank, in ``attach`` or, for FSDP2 over EDP, before it; give a model on the
meta device its memory; put everything back.

On the meta device a model has shapes and no memory. Each rank is given its own experts and the rest. What a checkpoint
will bring is NaN until it is loaded, so that a load that was forgotten shows. What no checkpoint holds (non-persistent
buffers, such as rotary frequencies) is made by the model's own code.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...config import BalancerConfig, take_trial
from ...distributed.process_groups import ProcessGroups
from ...distributed.ranks import Ranks
from ...moe.experts.optimizer_state import replace_parameter
from ...placement import Placement
from ...utils.text import one_line
from .checks import check, rollback, try_together
from .description import AttachError, MoELayer, Spread, Stage, mark_spread
from .self_test import problems_of
from .trial import layout_of

logger = logging.getLogger("eplb_runtime")


def shard_stage(
    stage: Stage, *, config: BalancerConfig, ep_group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """``shard_experts`` for a model whose host has described it; arguments and errors as there."""
    host = stage.host
    try:
        # A communicator of a job that leaves part of the world out would stay to the end of the process.
        ranks, layers = Ranks.of_group(ep_group), [len(host.layers)]
        if (trial := take_trial(keep=True)) is not None:
            config, ranks = layout_of(trial, config, ranks)
        groups = ProcessGroups(ranks, layers, device, config.timeout_seconds, only_control=True)
    except Exception as error:
        raise AttachError(one_line(error, with_type=True)) from error
    with rollback(groups) as undo:
        placement = check([stage], [], config, groups, device)
        for problem in problems_of(host.layers, try_together(host.layers, config, groups)):
            logger.warning("%s", problem)
        undo.callback(Before([stage.model], []).restore)
        rows_LH = rows_of_rank(placement, groups.job.ep_rank)
        for layer, rows in zip(host.layers, rows_LH, strict=True):
            for name in layer.parameters:
                layer.put(name, cut_rows(layer, name, rows, device, trial is not None and trial.layout == "single"))
            mark_spread(layer.experts, Spread(len(rows), placement.digest(), groups.job.ep_ranks))
    groups.close()


def rows_of_rank(placement: Placement, rank: int) -> Tensor:
    """int64 ``[L, E/R]``: the logical experts at home on a rank."""
    return torch.from_numpy(placement.homes_LRH[:, rank].astype("int64"))


def cut_rows(layer: MoELayer, name: str, rows: Tensor, device: torch.device, keep: bool = False) -> nn.Parameter:
    """These experts' rows of a full parameter. ``keep`` the very parameter, which a loop may have from before, where
    it has memory: all experts are here."""
    full = layer.parameter(name)
    if keep and not full.is_meta and name not in layer.by_expert:
        return full
    stack = layer.of_experts(name, full.detach())
    if full.is_meta:
        local = blank(torch.Size([len(rows), *stack.shape[1:]]), full.dtype, device)
        return nn.Parameter(local, requires_grad=full.requires_grad)
    return nn.Parameter(stack[rows.to(full.device)].contiguous(), requires_grad=full.requires_grad)


def install_parameter(
    layer: MoELayer, name: str, local: nn.Parameter, rows: Tensor | None, optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Put a parameter in the place of an expert parameter, in module and optimizer; ``rows`` of what was there are its
    own."""
    old = layer.parameter(name)
    local.__dict__.update(vars(old))  # what people write on parameters (no weight decay, groups)

    def take(state: Tensor) -> Tensor:
        return state if rows is None else layer.of_experts(name, state.detach())[rows.to(state.device)].contiguous()

    for optimizer in optimizers:
        if any(p is old for group in optimizer.param_groups for p in group["params"]):
            replace_parameter(optimizer, old, local, take)
    layer.put(name, local)


STEADY_ROW_BYTES = 128
"""Two of the widest vectors of a CPU (AVX-512). Elementwise loops take two at a time and compute what is left at the
end otherwise, with other last bits; with rows of this many bytes nothing is ever left, wherever a row is."""


def note_of_odd_rows(parameters: Mapping[str, Tensor]) -> str:
    """Return a line about odd rows, where there are such: on a CPU the last bits of a result depend on their place."""
    odd = {}
    for name, tensor in parameters.items():
        widths = [width * tensor.element_size() for width in tensor.shape[1:]]
        if tensor.device.type == "cpu" and tensor.ndim > 2 and any(width % STEADY_ROW_BYTES for width in widths):
            odd[name] = " and ".join(map(str, widths))
    if not odd:
        return ""
    first, rows = next(iter(odd.items()))
    return (
        f"{len(odd)} expert tensors, such as {first}, make rows of {rows} bytes: on a CPU results may differ in the "
        f"last bits by placement; widths that are multiples of {STEADY_ROW_BYTES} bytes avoid it"
    )


# -- the meta device ---------------------------------------------------------------------------------------------------


class MetaError(ValueError):
    """The model cannot be made from the meta device."""


def blank(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN where the dtype has it, else zeros."""
    return torch.full(size, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def make_buffers(model: nn.Module, device: torch.device, remake: Callable[[nn.Module], None]) -> None:
    """Give meta buffers memory; the model's own code, or MetaError, fills those that checkpoints leave out."""
    for module in model.modules():
        missing = [name for name, _ in _meta_buffers(module) if name in module._non_persistent_buffers_set]
        filled = []
        for value in (0, 1):
            for name in missing:
                module._buffers[name] = torch.full_like(module._buffers[name], value, device=device)  # type: ignore[arg-type]
            if missing:
                remake(module)
            filled.append([module._buffers[name].clone() for name in missing])  # type: ignore[union-attr]
        for name, first, second in zip(missing, *filled, strict=True):
            # Whatever its code leaves as it was, is different after two different starts.
            if not torch.equal(first, second):
                raise MetaError(
                    f"buffer {name} of {type(module).__name__} is in no checkpoint and the model's code does not make "
                    "it again: build the model with its buffers off the meta device"
                )
        for name, buffer in _meta_buffers(module):
            module._buffers[name] = blank(buffer.shape, buffer.dtype, device)


def make_parameters(model: nn.Module, device: torch.device) -> None:
    """Give memory to all meta parameters; they stay the same objects, for the optimizer and for ties."""
    for parameter in model.parameters():
        if parameter.is_meta:
            made = nn.Parameter(blank(parameter.shape, parameter.dtype, device), requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
            torch.utils.swap_tensors(parameter, made)


def _meta_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            yield name, buffer


# -- as it was before --------------------------------------------------------------------------------------------------


class Before:
    """What attaching changes of models and optimizers. It keeps full experts alive until it is dropped."""

    def __init__(self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        modules = [module for model in models for module in model.modules()]
        self._objects = [_Attributes(thing) for thing in (*modules, *optimizers)]
        self._groups = [(g, g["params"], list(g["params"])) for o in optimizers for g in o.param_groups]
        self._states = [(optimizer.state, dict(optimizer.state)) for optimizer in optimizers]
        self._meta = [p for model in models for p in model.parameters() if p.is_meta]
        self._hooks = [(p, set(p._backward_hooks or {})) for model in models for p in model.parameters()]

    def restore(self) -> None:
        """Everything as it was: the same parameters, buffers, hooks and forwards in the same modules."""
        for attributes in self._objects:
            attributes.restore()
        for group, listed, parameters in self._groups:
            listed[:] = parameters
            group["params"] = listed
        for state, before in self._states:
            state.clear()
            state.update(before)
        for parameter in self._meta:
            if not parameter.is_meta:  # back to the meta device; it stays the same object
                bare = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                bare.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, bare)
        for parameter, hooks in self._hooks:
            now = parameter._backward_hooks or {}
            for number in now.keys() - hooks:
                del now[number]


class _Attributes:
    """The attributes of an object, and what is in those that are dicts or sets (parameters, buffers, hooks)."""

    def __init__(self, thing: Any) -> None:
        self._thing = thing
        self._before = dict(vars(thing))
        self._inside = [(value, value.copy()) for value in self._before.values() if isinstance(value, (dict, set))]

    def restore(self) -> None:
        now = vars(self._thing)
        now.clear()
        now.update(self._before)
        for value, before in self._inside:
            value.clear()
            value.update(before)
