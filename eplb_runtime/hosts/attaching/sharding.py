"""Cut a model's experts to those of this rank; give a model on the meta device its memory; put everything back.

On the meta device a model has shapes and no memory. Each rank is given its own experts and the rest. What a checkpoint
will bring is NaN until it is loaded, so that a load that was forgotten shows. What no checkpoint holds (non-persistent
buffers, such as rotary frequencies) is made by the model's own code.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...moe.experts.optimizer_state import replace_parameter
from .description import AnyOptimizer, AttachError, MoELayer


def cut_rows(layer: MoELayer, name: str, rows: list[int], device: torch.device, keep: bool = False) -> nn.Parameter:
    """Return a new parameter with these rows of a full one; of one on the meta device, with NaN on ``device``. The
    layer stays as it is. ``keep``: return the full parameter itself, with all experts, if it has memory."""
    full = layer.parameter(name)
    if keep and not full.is_meta and name not in layer.by_expert:
        return full
    stack = layer.of_experts(name, full.detach())
    if full.is_meta:
        local = blank(torch.Size([len(rows), *stack.shape[1:]]), full.dtype, device)
        return nn.Parameter(local, requires_grad=full.requires_grad)
    return nn.Parameter(stack[rows], requires_grad=full.requires_grad)


def install_parameter(
    layer: MoELayer, name: str, local: nn.Parameter, rows: list[int] | None, optimizers: Sequence[AnyOptimizer]
) -> None:
    """Copy the old parameter's attributes to ``local``, and put ``local`` in its place in the module and in torch
    optimizers, whose state is cut to ``rows``; None: it stays whole."""
    old = layer.parameter(name)
    local.__dict__.update(vars(old))  # what people write on parameters (no weight decay, groups)

    def take(state: Tensor) -> Tensor:
        return state if rows is None else layer.of_experts(name, state.detach())[rows]

    for optimizer in optimizers:
        held = (p for group in optimizer.param_groups for p in group["params"])
        if isinstance(optimizer, torch.optim.Optimizer) and any(p is old for p in held):
            replace_parameter(optimizer, old, local, take)
    layer.put(name, local)


# -- the meta device ---------------------------------------------------------------------------------------------------


def blank(size: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of NaN, or of zeros where the dtype has no NaN."""
    return torch.full(size, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)


def make_buffers(model: nn.Module, device: torch.device, remake: Callable[[nn.Module], None]) -> None:
    """Give the model's meta buffers memory on ``device``: NaN or 0, and what ``remake(module)`` writes into those that
    checkpoints leave out. AttachError: it does not write one of them."""
    for module in model.modules():
        meta = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
        missing = [name for name in meta if name in module._non_persistent_buffers_set]
        filled = list[dict[str, Tensor]]()
        for value in (0, 1) if missing else ():
            module._buffers.update({name: torch.full_like(meta[name], value, device=device) for name in missing})
            remake(module)
            filled.append({name: module.get_buffer(name).clone() for name in missing})
        for name in missing:
            # Whatever its code leaves as it was, is different after two different starts.
            if not torch.equal(*(made[name] for made in filled)):
                raise AttachError(
                    f"buffer {name} of {type(module).__name__} is in no checkpoint and the model's code does not make "
                    "it again: build the model with its buffers off the meta device"
                )
        kept = {name: buffer for name, buffer in meta.items() if name not in missing}
        module._buffers.update({name: blank(one.shape, one.dtype, device) for name, one in kept.items()})


def make_parameters(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters memory on ``device``, with NaN (integers: zeros). They stay the same objects, for ties."""
    for parameter in model.parameters():
        if parameter.is_meta:
            _swap(parameter, blank(parameter.shape, parameter.dtype, device))


def _swap(parameter: nn.Parameter, tensor: Tensor) -> None:
    """Put a tensor into a parameter, which stays the same object."""
    made = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, made)


# -- as it was before --------------------------------------------------------------------------------------------------


class ModelSnapshot:
    """Snapshot of what attaching changes in models, optimizers and their ``patched``. It keeps full experts alive."""

    def __init__(
        self, models: Sequence[nn.Module], steppers: Sequence[AnyOptimizer | None], layers: Sequence[MoELayer]
    ) -> None:
        optimizers = [one for one in steppers if isinstance(one, torch.optim.Optimizer)]
        patched = [thing for one in (*layers, *steppers) for thing in getattr(one, "patched", ())]
        parameters = [parameter for model in models for parameter in model.parameters()]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        own = [vars(thing) for thing in (*(m for model in models for m in model.modules()), *optimizers, *patched)]
        inside = [value for one in own for value in one.values() if isinstance(value, dict | set)]  # parameters, hooks
        held = [*own, *inside, *(o.state for o in optimizers), *groups, *(group["params"] for group in groups)]
        self._held: list[tuple[Any, Any]] = [(one, one.copy()) for one in held]
        self._meta = [parameter for parameter in parameters if parameter.is_meta]
        self._hooks = [(parameter, dict(parameter._backward_hooks or {})) for parameter in parameters]

    def restore(self) -> None:
        """Put attributes, parameters, buffers, hooks, optimizer groups and state back; values stay as they are."""
        for one, before in self._held:
            one.clear()
            (one.extend if isinstance(one, list) else one.update)(before)
        for parameter in self._meta:
            if not parameter.is_meta:
                _swap(parameter, torch.empty_like(parameter, device="meta"))
        for parameter, hooks in self._hooks:
            if now := parameter._backward_hooks:
                now.clear()
                now.update(hooks)
